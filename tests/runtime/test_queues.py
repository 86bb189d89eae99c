"""What workers send each other beside activations comes to an end also where each of them has one queue for all of it,
and nothing overtakes (NCCL's rules), with the same bits. Activations do not yet: their order is the plan's."""

from __future__ import annotations

import itertools
import random
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.errors import GenerationOver, TransferError
from megatron_recycle.plan import Costs, Grid, Problem, Worker, channels, pieces, read_by, reads
from megatron_recycle.planner import quick
from megatron_recycle.runtime import bundle
from megatron_recycle.runtime.comm.activations import Transport
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.losses import LossRelay
from megatron_recycle.runtime.comm.reduction import ExactReduction, FastReduction
from megatron_recycle.runtime.compute.accumulate import Accumulators, Layout
from megatron_recycle.runtime.stage import Tie
from megatron_recycle.runtime.state_copy import give, take
from tests.fakes.network import Fabric, Killed, Stuck
from tests.runtime.comms import connected
from tests.runtime.test_accumulate import contribution, logical

RULES = pytest.mark.parametrize("ordered", [False, True], ids=["gloo's rules", "NCCL's rules"])
GRID = Grid(2, (4, 4, 4))
LOST = Worker(1, 0)
LIVE = [Worker(pipeline, stage) for pipeline in range(3) for stage in range(2) if (pipeline, stage) != LOST]


def exact(ordered: bool, seed: int = 0) -> list[torch.Tensor]:
    """The reduced gradients of the workers of stage 0 with two of three left, and a parameter tied to stage 1's."""
    plan = quick(Problem(GRID, Costs.uniform(2, 20, 22, 18, 1), (LOST,), block=2))
    fabric = Fabric(seed, ordered=ordered)
    groups = connected(fabric, GRID, LIVE)

    def reduce(me: Worker) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(7))
        reduction = ExactReduction(3, (4, 4, 4), 2, pieces(plan, me.stage), me, "tokens")
        sums = Accumulators(Layout([parameter]), reduction.place)
        for kind, pipeline, microbatch, _ in plan.actions(me):
            if kind == "B":
                sums.add(pipeline, microbatch, [(parameter, contribution(pipeline, microbatch))])
        return reduction.gradient(sums, groups[me], [Tie(parameter, (0, 1))])

    return fabric.run(*[lambda me=me: reduce(me) for me in LIVE])


@RULES
@pytest.mark.parametrize("seed", range(5))
def test_exact_and_tied_gradients(ordered, seed):
    one = logical([4, 4, 4], 2)
    assert all(torch.equal(found, one + one) for found in exact(ordered, seed))


def test_without_batches_they_would_wait_for_ever(monkeypatch):
    monkeypatch.setattr(Comm, "batch", lambda self: nullcontext())
    exact(ordered=False)
    with pytest.raises(Stuck, match="nobody can go on"):
        exact(ordered=True)


@RULES
def test_a_stages_state_for_two_that_come_in(ordered):
    fabric = Fabric(3, ordered=ordered)
    grid = Grid(1, (1, 1, 1, 1))
    workers = [Worker(pipeline, 0) for pipeline in range(4)]
    groups = connected(fabric, grid, workers)
    state = {name: torch.randn(count) for name, count in (("a", 5), ("b", 70_000), ("c", 0))}
    joined = workers[2:]
    facts = {"steps": 3, "scale": torch.tensor(2.0)}

    def copy(me: Worker) -> Any:
        if me not in joined:
            return give(groups[me], joined, state, facts)
        return take(groups[me], joined, torch.device("cpu"))

    *_, one, other = fabric.run(*[lambda me=me: copy(me) for me in workers])
    for tensors, told, received in (one, other):
        assert tensors.keys() == state.keys() and all(torch.equal(tensors[name], state[name]) for name in state)
        assert told["steps"] == 3 and received.bytes == 4 * 70_005 + 4


def test_a_state_that_arrives_damaged_is_refused(monkeypatch):
    """One bit of one giver's share is another one than its checksum was made of."""
    fabric = Fabric(3)
    workers = [Worker(pipeline, 0) for pipeline in range(3)]
    groups = connected(fabric, Grid(1, (1, 1, 1)), workers)
    state = {"a": torch.randn(5), "b": torch.randn(70_000)}
    sums, taker = bundle.checksum, list[int]()
    monkeypatch.setattr(bundle, "checksum", lambda part: (
        sums(part) ^ (part.numel() > 20 and threading.get_ident() in taker)))

    def copy(me: Worker) -> Any:
        if me != workers[2]:
            return give(groups[me], workers[2:], state, {})
        taker.append(threading.get_ident())
        with pytest.raises(TransferError, match=r"the state of stage 0 arrived damaged \(b\)"):
            take(groups[me], workers[2:], torch.device("cpu"))
        return None

    fabric.run(*[lambda me=me: copy(me) for me in workers])


@RULES
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_an_iteration(ordered, seed):
    fabric = Fabric(seed, ordered=ordered)
    groups = connected(fabric, GRID, LIVE)

    def share(me: Worker) -> tuple[float, float]:
        relay = LossRelay(groups[me], GRID, 1, FastReduction(3, 4), 7, 1)
        if me.stage == 1:
            mine = {(me.pipeline, microbatch): torch.tensor(1.0 + me.pipeline) for microbatch in range(4)}
            relay.add(mine, dict.fromkeys(mine, (2.0,)))
        relay.poll()
        found = relay.wait()
        groups[me].control.sum(torch.zeros(1)).wait()  # so that nobody lets go of what another has not read
        return found

    assert set(fabric.run(*[lambda me=me: share(me) for me in LIVE])) == {(2.0, 24.0)}


def iterate(groups: Groups, plan: Any, me: Worker, ahead: bool = False) -> int:
    """Two iterations' activations and gradients; returns how many have come. ``ahead``: receives are posted ahead."""
    transport = Transport(groups, torch.device("cpu"))
    transport.follow(plan)
    if ahead:
        transport.use(channels(plan), reads(plan, me), read_by(plan, me))
    come = {message for _, message in reads(plan, me)}
    go = {message for (source, _), messages in channels(plan).items() if source == me for message in messages}
    count = 0
    for iteration in range(2):
        transport.begin()
        for kind, pipeline, microbatch, _ in plan.actions(me):
            passed = "B" if kind == "FB" else kind
            wanted = [message for message in come if message[1:3] == (pipeline, microbatch) and message[0] == passed]
            for message in wanted:
                (tensor,) = transport.receive(message)
                assert tensor.tolist() == [iteration, pipeline, microbatch], f"{me} reads {message}"
                count += 1
            sent = [message for message in go if message[1:3] == (pipeline, microbatch) and message[0] == passed]
            for message in sent:
                transport.send(message, [torch.tensor([iteration, pipeline, microbatch], dtype=torch.float32)])
            transport.post()
        groups.control.sum(torch.zeros(1)).wait()  # as the commit: nobody is two iterations ahead
    return count


@pytest.mark.parametrize("failed", [(), (LOST,)], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_activations_come_in_the_plans_order_however_late_they_are(failed, seed):
    plan = quick(Problem(GRID, Costs.uniform(2, 20, 22, 18, 1), failed))
    fabric = Fabric(seed)
    live = [worker for worker in plan.workers if worker not in failed]
    groups = connected(fabric, GRID, live)
    counts = fabric.run(*[lambda me=me: iterate(groups[me], plan, me) for me in live])
    assert sum(counts) == 2 * 2 * 12


def die_at(fabric: Fabric, groups: Groups, receive: int) -> None:
    """The process of ``groups`` dies when it posts its receive of this number."""
    end = groups.world.group
    post, numbers = end.recv, itertools.count(1)

    def recv(tensors: Any, source: int, tag: int) -> Any:
        if next(numbers) == receive:
            fabric.die(end.process)
        return post(tensors, source, tag)

    end.recv = recv


def test_whoever_dies_and_whenever_nobody_reads_a_wrong_message_and_nobody_waits_for_ever():
    over = 0
    for seed in range(25):
        draw = random.Random(seed)
        grid = Grid(draw.randint(2, 4), (draw.randint(2, 6),) * draw.randint(2, 4))
        workers = [Worker(pipeline, stage) for pipeline in range(grid.pipelines) for stage in range(grid.stages)]
        failed = draw.sample([worker for worker in workers if worker.pipeline], draw.randint(0, 2))
        plan = quick(Problem(grid, Costs.uniform(grid.stages, 20, 22, 18, 1), tuple(sorted(failed))))
        fabric = Fabric(seed)
        live = [worker for worker in workers if worker not in failed]
        groups = connected(fabric, grid, live)
        victim = draw.choice(live)
        die_at(fabric, groups[victim], draw.randint(1, 12))

        def run(me: Worker, plan: Any = plan, groups: Any = groups, victim: Worker = victim) -> int:
            try:
                return iterate(groups[me], plan, me)
            except GenerationOver:  # the coordinator stops the generation
                for worker in groups.keys() - {victim}:
                    groups[worker].abort()
                raise

        found = dict(zip(live, fabric.run(*[lambda me=me, run=run: run(me) for me in live]), strict=True))
        dead = isinstance(found.pop(victim), Killed)
        assert all(isinstance(each, GenerationOver if dead else int) for each in found.values())
        over += dead
    assert over > 10


@pytest.mark.parametrize("failed", [(), (LOST,)], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_with_nccls_rules_activations_come_in_the_plans_order_too(failed, seed):
    plan = quick(Problem(GRID, Costs.uniform(2, 20, 22, 18, 1), failed))
    fabric = Fabric(seed, ordered=True)
    live = [worker for worker in plan.workers if worker not in failed]
    groups = connected(fabric, GRID, live)
    assert sum(fabric.run(*[lambda me=me: iterate(groups[me], plan, me) for me in live])) == 2 * 2 * 12


def test_with_nccls_rules_receives_that_are_posted_ahead_wait_for_ever():
    """They hold up the sends that their senders wait for."""
    plan = quick(Problem(GRID, Costs.uniform(2, 20, 22, 18, 1)))
    fabric = Fabric(ordered=True)
    groups = connected(fabric, GRID, list(plan.workers))
    with pytest.raises(Stuck, match="a receive from its rank 1, activations or gradients"):
        fabric.run(*[lambda me=me: iterate(groups[me], plan, me, ahead=True) for me in plan.workers])
