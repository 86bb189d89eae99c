"""What a worker keeps of its sends: as long as they may be unread, and no longer."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import (
    Action,
    Costs,
    Grid,
    Message,
    Plan,
    Problem,
    Worker,
    channels,
    postings,
    read_by,
    reads,
    receives,
    transfers,
)
from megatron_recycle.planner import quick
from megatron_recycle.runtime.comm.activations import Transport
from megatron_recycle.runtime.comm.backend import Backend
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.messages import encode_header, meta_of
from megatron_recycle.runtime.comm.tags import WORLD

UP, DOWN = Worker(0, 0), Worker(0, 1)
COUNT = 4
CHANNELS = {(UP, DOWN): [Message("F", 0, m) for m in range(COUNT)],
            (DOWN, UP): [Message("B", 0, m) for m in range(COUNT)]}

READS = {to: [(source, message) for message in messages] for (source, to), messages in CHANNELS.items()}


class Plain(Backend):
    """A library that is waited for without a limit."""

    ordered, host, quick = False, True, True

    def wait(self, work: Any, limit: Any, closed: Any, read: bool) -> None:
        work.wait()


class Work:
    """As gloo's own: that a transfer has ended is only known to whoever waits for it."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        pass


class Wire:
    """A process group whose peer has always sent and read everything."""

    def __init__(self) -> None:
        self.sends: weakref.WeakSet[Work] = weakref.WeakSet()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 9

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        work = Work()
        self.sends.add(work)
        return work

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        if tensors[0].dtype == torch.int64:
            tensors[0].copy_(encode_header(meta_of([torch.zeros(2)])))
        return Work()

    def unread(self) -> int:
        return len(self.sends)


def transport(me: Worker) -> tuple[Transport, Wire]:
    wire = Wire()
    groups: Any = SimpleNamespace(me=me, world=Comm(wire, Plain(), WORLD), rank=lambda worker: worker.stage)
    made = Transport(groups, torch.device("cpu"))
    made.use(CHANNELS, READS[me], {Message("B", 0, m): (Message("F", 0, m),) for m in range(COUNT)})
    return made, wire


def test_an_activation_is_kept_until_its_gradient_has_come_back():
    up, wire = transport(UP)
    for _ in range(10):
        up.begin()
        for m in range(COUNT):
            up.send(Message("F", 0, m), [torch.zeros(2)])
        assert wire.unread() >= COUNT
        for m in range(COUNT):
            up.receive(Message("B", 0, m))
        assert wire.unread() == 0


def test_a_gradient_is_kept_until_the_next_iteration_but_one():
    down, wire = transport(DOWN)
    for iteration in range(10):
        down.begin()
        for m in range(COUNT):
            down.receive(Message("F", 0, m))
            down.send(Message("B", 0, m), [torch.zeros(2)])
        assert wire.unread() == COUNT * min(iteration + 1, 2)


def test_a_gradient_that_has_been_read_is_not_kept():
    down, wire = transport(DOWN)
    down.use(CHANNELS, READS[DOWN], {Message("F", 0, m): (Message("B", 0, m - 1),) for m in range(1, COUNT)})
    for iteration in range(10):
        down.begin()
        for m in range(COUNT):
            down.receive(Message("F", 0, m))
            down.send(Message("B", 0, m), [torch.zeros(2)])
            assert wire.unread() <= 1 + min(iteration, 1)


def test_a_micro_batch_of_another_shape_is_refused():
    """The receiver has posted a buffer of the first one's shape, and gloo fills as much of it as there is."""
    up, _ = transport(UP)
    up.begin()
    up.send(Message("F", 0, 0), [torch.zeros(4, 2)])
    with pytest.raises(UnsupportedError, match=r"float32\[3, 2\].*dataloader_drop_last"):
        up.send(Message("F", 0, 1), [torch.zeros(3, 2)])


class Counting(Wire):
    """Counts the receives that are posted and not waited for yet; headers are none."""

    def __init__(self) -> None:
        super().__init__()
        self.posted = self.most = 0

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        super().recv(tensors, rank, tag)
        if tensors[0].dtype == torch.int64:
            return Work()
        self.posted += 1
        self.most = max(self.most, self.posted)
        return Counted(self)


class Counted(Work):
    def __init__(self, wire: Counting) -> None:
        self._wire = wire

    def wait(self) -> None:
        self._wire.posted -= 1


def most_posted(plan: Plan, me: Worker) -> int:
    """Receives that this worker has posted at a time, over three iterations of ``plan``."""
    wire, talk = Counting(), channels(plan)
    groups: Any = SimpleNamespace(me=me, world=Comm(wire, Plain(), WORLD), rank=lambda worker: worker.stage)
    made = Transport(groups, torch.device("cpu"))
    made.use(talk, reads(plan, me), read_by(plan, me))
    come = {message for _, message in reads(plan, me)}
    go = {message for (source, _), messages in talk.items() if source == me for message in messages}
    for _ in range(3):
        made.begin()
        for kind, d, m, _ in plan.actions(me):
            passed = "B" if kind == "FB" else kind
            read = Message("F", d, m) if kind == "F" else Message(passed, d, m)
            if read in come:
                made.receive(read)
            if Message(passed, d, m) in go:
                made.send(Message(passed, d, m), [torch.zeros(2)])
            made.post()
        assert wire.posted == 0
    return wire.most


@pytest.mark.parametrize("failed", [(), ("1:2",), ("1:2", "0:1")], ids=str)
def test_no_more_receives_are_posted_than_the_plan_counts(failed):
    """Worker 0:2 reads from four others once 1:2 is gone, and has no more memory for that than before."""
    grid = Grid(4, (6, 6, 6))
    plan = quick(Problem(grid, Costs.uniform(4, 20, 22, 18, 1), tuple(map(Worker.parse, failed)), full_backward=(0,)))
    counted = receives(plan)
    assert {me: most_posted(plan, me) for me in plan.workers} == counted
    assert all(count <= plan.problem.receives(me.stage) for me, count in counted.items())
    if failed == ("1:2",):
        assert sum(to == Worker(0, 2) for _, to in channels(plan)) == 4 and counted[Worker(0, 2)] == 4


def test_receives_of_messages_that_are_sent_early_are_counted_too():
    """The last stage of one pipeline reads in another order than the first one sends."""
    problem = Problem(Grid(2, (4,)), Costs.uniform(2, 1, 1, 1))
    plan = quick(problem)
    first = "F0.0 F0.1 F0.2 F0.3 B0.0 W0.0 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3 S"
    turned = "F0.2 B0.2 W0.2 F0.3 B0.3 W0.3 F0.0 B0.0 W0.0 F0.1 B0.1 W0.1 S"
    orders = {me: tuple(map(Action.parse, text.split())) for me, text in ((UP, first), (DOWN, turned))}
    plan = replace(plan, workers=orders)
    assert receives(plan) == {UP: 4, DOWN: 4} == {me: most_posted(plan, me) for me in plan.workers}



class Listed(Wire):
    """A library without tags that runs one transfer after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[tuple[str, int]] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        if tensors[0].dtype != torch.int64:
            self.posted.append(("send", rank))
        return super().send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        if tensors[0].dtype != torch.int64:
            self.posted.append(("receive", rank))
        return super().recv(tensors, rank, tag)


class Queued(Plain):
    ordered = True


@pytest.mark.parametrize("failed", [(), (Worker(1, 1),), (Worker(0, 2), Worker(1, 1))], ids=str)
def test_where_a_library_queues_all_workers_post_in_the_plans_order(failed: tuple[Worker, ...]):
    """Which is what the plan's own test shows to come to an end; receives are posted neither earlier nor later."""
    plan = quick(Problem(Grid(3, (6, 6, 6)), Costs.uniform(3, 20, 22, 18), failed=failed))
    members = sorted(plan.workers)
    order = transfers(plan)
    for me in members:
        wire = Listed()
        groups: Any = SimpleNamespace(me=me, world=Comm(wire, Queued(), WORLD), rank=members.index)
        made = Transport(groups, torch.device("cpu"))
        made.follow(plan)
        for _ in range(2):
            wire.posted.clear()
            made.begin()
            mine = {message: source for source, message in reads(plan, me)}
            sent = {message for (source, _), messages in channels(plan).items() if source == me for message in messages}
            for kind, d, m, _ in plan.actions(me):
                message = Message("F" if kind == "F" else "B", d, m)
                if kind in ("F", "B", "FB") and message in mine:
                    made.receive(message)
                if kind in ("F", "B", "FB") and message in sent:
                    made.send(message, [torch.zeros(2)])
                made.post()
            assert wire.posted == [("send", members.index(target)) if source == me else
                                   ("receive", members.index(source)) for source, target, _ in postings(order, me)]
