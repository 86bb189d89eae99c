"""What a worker keeps of its sends: as long as they may be unread, and no longer."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import Message, Worker
from megatron_recycle.runtime.transport import Transport, encode_header, meta_of

UP, DOWN = Worker(0, 0), Worker(0, 1)
COUNT = 4
CHANNELS = {(UP, DOWN): [("F", 0, m) for m in range(COUNT)], (DOWN, UP): [("B", 0, m) for m in range(COUNT)]}


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

    def name(self) -> str:
        return "nccl"  # which is waited for without a limit

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
    groups: Any = SimpleNamespace(me=me, world=wire, rank=lambda worker: worker.stage, generation=1)
    return Transport(groups, CHANNELS, torch.device("cpu")), wire


def test_an_activation_is_kept_until_its_gradient_has_come_back():
    up, wire = transport(UP)
    for _ in range(10):
        up.begin()
        for m in range(COUNT):
            up.send(("F", 0, m), [torch.zeros(2)])
        assert wire.unread() >= COUNT
        for m in range(COUNT):
            up.receive(("B", 0, m))
        assert wire.unread() == 0


def test_a_gradient_is_kept_until_the_next_iteration_but_one():
    down, wire = transport(DOWN)
    for iteration in range(10):
        down.begin()
        for m in range(COUNT):
            down.receive(("F", 0, m))
            down.send(("B", 0, m), [torch.zeros(2)])
        assert wire.unread() == COUNT * min(iteration + 1, 2)


def test_a_gradient_that_has_been_read_is_not_kept():
    down, wire = transport(DOWN)
    down.use(CHANNELS, {Message("F", 0, m): (Message("B", 0, m - 1),) for m in range(1, COUNT)})
    for iteration in range(10):
        down.begin()
        for m in range(COUNT):
            down.receive(("F", 0, m))
            down.send(("B", 0, m), [torch.zeros(2)])
            assert wire.unread() <= 1 + min(iteration, 1)


def test_a_micro_batch_of_another_shape_is_refused():
    """The receiver has posted a buffer of the first one's shape, and gloo fills as much of it as there is."""
    up, _ = transport(UP)
    up.begin()
    up.send(("F", 0, 0), [torch.zeros(4, 2)])
    with pytest.raises(UnsupportedError, match=r"float32\[3, 2\].*dataloader_drop_last"):
        up.send(("F", 0, 1), [torch.zeros(3, 2)])
