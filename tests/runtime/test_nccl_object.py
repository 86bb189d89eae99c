"""What the runtime asks of NCCL through its object, on stand-ins for torch's CUDA: none of it has run on a GPU."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import Message
from megatron_recycle.runtime.comm import backend as backends
from megatron_recycle.runtime.comm.backend import Nccl
from megatron_recycle.runtime.comm.cancellation import Cancelled, Wait
from megatron_recycle.runtime.comm.life import Life
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
    life = Life()
    monkeypatch.setattr(Event, "over", True)
    cuda.wait(work, None, Wait(life), False)
    assert posted == ["first"], "not the stream that computes"
    monkeypatch.setattr(Event, "over", False)
    life.token.cancel()
    comes = threading.Event()
    monkeypatch.setattr(Event, "synchronize", lambda self: comes.wait(60))
    wait = Wait(life)
    with pytest.raises(Cancelled):
        cuda.wait(work, None, wait, False)
    comes.set()
    assert wait.begun


def test_an_operation_is_over_once_the_device_has_passed_it_whatever_the_work_says(
        cuda: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """A work counts as completed once a member is known to be dead. On a GPU the stage's communicator was taken for
    idle then, and not aborted with the others, whose abort waited for it for ever."""
    work: Any = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
    over = cuda.probe(work)
    assert not over()
    monkeypatch.setattr(Event, "over", True)
    assert over()


def test_a_torch_whose_groups_have_no_abort_is_asked_for_the_librarys_own(cuda: Nccl) -> None:
    """Before torch 2.7; an abort that raises in a thread of its own would leave everybody waiting."""
    done: list[str] = []
    cuda.abort(SimpleNamespace(abort=lambda: done.append("group")))
    cuda.abort(SimpleNamespace(_get_backend=lambda device: SimpleNamespace(abort=lambda: done.append(str(device)))))
    assert done == ["group", "cuda"]


def test_all_groups_that_a_raised_operation_has_left_open_are_ended(cuda: Nccl,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    remote_error, in_no_group = 6, 5
    answers = [0, remote_error, in_no_group]
    monkeypatch.setattr(backends, "_nccl", lambda: SimpleNamespace(ncclGroupEnd=lambda: answers.pop(0)))
    cuda.unwind()
    assert not answers
    monkeypatch.setattr(backends, "_nccl", lambda: SimpleNamespace(ncclGroupEnd=lambda: 0))
    with pytest.raises(RuntimeError, match="more than 8 groups"):
        cuda.unwind()


def test_a_torch_that_hides_its_nccl_is_refused_before_anything_is_posted(tmp_path: Path, cuda: Nccl,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    backends._nccl.cache_clear()
    with pytest.raises(UnsupportedError, match="libtorch_cuda.so"):
        cuda.connect(None)


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
