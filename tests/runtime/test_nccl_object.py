"""What the runtime asks of NCCL through its object, on stand-ins for torch's CUDA: none of it has run on a GPU."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_recycle.plan import Message
from megatron_recycle.runtime.comm import backend as backends
from megatron_recycle.runtime.comm.backend import Nccl
from megatron_recycle.runtime.comm.waits import Exits, Left, Wait
from tests.runtime.test_transport import COUNT, DOWN, Plain, transport


class Stream:
    """A stream, by name."""

    current: ClassVar = ["compute"]

    def __init__(self, name: str) -> None:
        self.name = name


@contextmanager
def under(stream: Stream) -> Any:
    Stream.current.append(stream.name)
    yield
    Stream.current.pop()


class Event:
    """Comes when its work is over."""

    def __init__(self, blocking: bool) -> None:
        assert blocking, "a thread that waits does not spin"

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return bool(Event.over)

    over = False

    def synchronize(self) -> None:
        raise AssertionError("only a helper waits")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    names = iter(("first", "second", "third"))
    fake = SimpleNamespace(Stream=lambda: Stream(next(names)), stream=under, Event=Event, current_device=lambda: 1,
                           current_stream=lambda: Stream.current[-1])
    monkeypatch.setattr(backends.torch, "cuda", fake)
    return Nccl()


def test_a_wait_is_for_a_stream_that_waits_and_can_be_left(cuda: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[str] = []
    work: Any = SimpleNamespace(wait=lambda: posted.append(Stream.current[-1]))
    exits = Exits()
    monkeypatch.setattr(Event, "over", True)
    cuda.wait(work, None, Wait(exits), False)
    assert posted == ["first"], "not the stream that computes"
    monkeypatch.setattr(Event, "over", False)
    exits.way_out.take()
    comes = threading.Event()
    monkeypatch.setattr(Event, "synchronize", lambda self: comes.wait(60))
    wait = Wait(exits)
    with pytest.raises(Left):
        cuda.wait(work, None, wait, False)
    comes.set()
    assert wait.begun


def test_only_transfers_are_bounded_in_multiprocessors(cuda: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    def options() -> Any:
        return SimpleNamespace(config=SimpleNamespace(max_ctas=None))

    monkeypatch.setattr(backends.dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    limit = timedelta(seconds=7)
    assert cuda.options(False, limit) is None
    made = cuda.options(True, limit)
    assert made.config.max_ctas == 8 and made._timeout == limit


def test_receives_are_posted_ahead_and_what_has_arrived_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that were made there too: their memory is the other stream's."""
    inside: list[bool] = [False]
    made: dict[int, bool] = {}
    arrived: list[int] = []

    @contextmanager
    def ahead(self: Any) -> Any:
        inside[0] = True
        yield
        inside[0] = False

    empty = torch.empty

    def noting(*arguments: Any, **keywords: Any) -> torch.Tensor:
        tensor = empty(*arguments, **keywords)
        made[tensor.data_ptr()] = inside[0]
        return tensor

    monkeypatch.setattr(Plain, "ahead", ahead)
    monkeypatch.setattr(Plain, "arrived", lambda self, tensor: arrived.append(tensor.data_ptr()))
    monkeypatch.setattr(torch, "empty", noting)
    down, wire = transport(DOWN)
    post, posted = wire.recv, []

    def recv(tensors: list[torch.Tensor], *where: Any) -> Any:
        posted.append(inside[0])
        return post(tensors, *where)

    monkeypatch.setattr(wire, "recv", recv)
    down.begin()
    for m in range(COUNT):
        (tensor,) = down.receive(Message("F", 0, m))
        assert made[tensor.data_ptr()] and arrived[-1] == tensor.data_ptr()
    assert posted == [True] * (COUNT + 1) and not inside[0]
