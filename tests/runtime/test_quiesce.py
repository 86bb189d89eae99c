"""A void iteration on communicators that stay: wherever each worker has stopped in it, all of it comes to its end, and
the next one's messages are the right ones."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Costs, Grid, Message, Plan, Problem, Worker, channels, needs, passes_on
from megatron_recycle.planner import quick
from megatron_recycle.runtime.comm.activations import Transport
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.messages import boundary
from tests.fakes.network import Fabric
from tests.runtime.comms import connected
from tests.seeds import by_day

GRID = Grid(3, (4, 4, 4))
LOST = Worker(1, 1)
LIVE = [Worker(pipeline, stage) for pipeline in range(3) for stage in range(3) if (pipeline, stage) != LOST]
PLACEMENTS = ((), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2))
"""One chunk on each stage, V-shaped, interleaved."""


def problem(seed: int) -> Problem:
    placement = PLACEMENTS[seed % 7 % 3]
    return Problem(GRID, Costs.uniform(len(placement) or 3, 20, 22, 18, 1), (LOST,) if seed % 3 else (),
                   placement=placement)


class Party:
    """One worker, with its messages' contents."""

    def __init__(self, groups: Groups, plan: Plan) -> None:
        self.me, self.groups = groups.me, groups
        self.transport = Transport(groups, torch.device("cpu"))
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        self.plan = plan
        self.transport.follow(plan)

    def iterate(self, iteration: int, actions: int | None = None) -> None:
        """``iteration``, or its first ``actions``."""
        self.transport.begin()
        for action in self.plan.actions(self.me)[:actions]:
            if come := needs(self.plan, self.me, action):
                found, wanted = self.transport.receive(come[1]), self._content(iteration, self.me, come[1])
                assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), f"{come[1]}: {found}"
            if go := passes_on(self.plan, self.me, action):
                self.transport.send(go[1], self._content(iteration, *go))
            self.transport.post()

    def _content(self, iteration: int, reader: Worker, message: Message) -> list[torch.Tensor]:
        """Of another shape at each boundary."""
        at = boundary(self.plan.problem.chunks_of, reader, message)
        return [torch.full((3 + at,), float(number)) for number in (iteration, *message[1:3])]


@pytest.mark.parametrize("ordered", [False, True], ids=["gloo's rules", "NCCL's rules"])
@pytest.mark.parametrize("seed", by_day(8, range(20)))
def test_wherever_each_worker_has_stopped(ordered: bool, seed: int) -> None:
    draw = random.Random(seed)
    live = LIVE if seed % 3 else sorted([*LIVE, LOST])
    plan, fabric = quick(problem(seed)), Fabric(seed, ordered=ordered)
    groups = connected(fabric, GRID, live)
    parties = {me: Party(groups[me], plan) for me in live}
    stops = {me: draw.randrange(len(plan.actions(me)) + 1) for me in live}
    ways_out = [groups[me].world.life.token.cancel for me in live]

    def stop(me: Worker) -> None:
        try:
            parties[me].iterate(1, stops[me])
        except GenerationOver as error:
            assert "what it belongs to is void" in str(error)
        for take in ways_out:
            take()

    fewer = plan.without([(1, microbatch) for microbatch in draw.sample(range(4), seed % 4)])  # some channels are new
    for party in parties.values():
        party.follow(fewer)
    assert fabric.run(*[lambda me=me: parties[me].iterate(0) for me in live]) == [None] * len(live)
    for party in parties.values():
        party.follow(plan)
    assert fabric.run(*[lambda me=me: stop(me) for me in live]) == [None] * len(live)
    begun = {pair: (parties[pair[0]].transport.begun()[pair][0], parties[pair[1]].transport.begun()[pair][1])
             for pair in channels(plan)}

    def go_on(me: Worker) -> None:
        groups[me].reopen()
        assert parties[me].transport.can_drain
        parties[me].transport.drain(plan, begun)
        for iteration in (2, 3):
            parties[me].iterate(iteration)
            groups[me].control.sum(torch.zeros(1)).wait()  # as the commit: nobody is two iterations ahead

    assert fabric.run(*[lambda me=me: go_on(me) for me in live]) == [None] * len(live)


def test_what_came_too_late_to_free_anybody_frees_nobody_later():
    """The thread that waits for the verdict may tell of it when the training thread has known for long."""
    fabric = Fabric()
    one, other = connected(fabric, Grid(2, (1,)), [Worker(0, 0), Worker(0, 1)]).values()
    take = one.world.life.token.cancel
    one.reopen()
    take()
    into = torch.zeros(1)
    pending = one.world.receive(into, 1, 0)
    fabric.run(pending.wait, other.world.send(torch.ones(1), 0, 0).wait)
    assert into.item() == 1.0


def test_a_worker_that_does_not_know_the_shapes_says_so():
    fabric = Fabric()
    plan = quick(problem(0))
    groups = connected(fabric, GRID, sorted([*LIVE, LOST]))
    assert [party.transport.can_drain for party in (Party(groups[Worker(0, stage)], plan) for stage in range(3))] == [
        False, False, False]
