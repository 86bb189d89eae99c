"""A thread that is ahead of its device looks neither fast nor slow, and holds nothing that is not there yet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from megatron_recycle.runtime import site
from megatron_recycle.runtime.compute import device as devices
from megatron_recycle.runtime.compute.device import Cpu, Cuda, Device, Moment, Pace, device_of
from megatron_recycle.runtime.compute.memory import ActivationMemory
from megatron_recycle.runtime.compute.stopwatch import Stopwatch
from megatron_recycle.runtime.memory_budget import KeptBytes, kept_bytes, room_on
from megatron_recycle.runtime.profiling import _spent
from megatron_recycle.runtime.site import Meters


class Queue(Device):
    """A GPU in words: what it is asked for takes ``seconds`` each, and is done when somebody waits for it."""

    def __init__(self) -> None:
        self.asked = self.done = 0.0
        self.bytes = self.taken = 0

    def ask(self, seconds: float) -> None:
        """Returns at once."""
        self.asked += seconds

    def moment(self) -> Moment:
        return At(self, self.asked)

    def allocated(self) -> int | None:
        return self.bytes

    def room(self) -> int | None:
        return 1000 - self.bytes

    def outside(self) -> int:
        return self.taken


class At:
    def __init__(self, queue: Queue, when: float) -> None:
        self.queue, self.when = queue, when

    def over(self) -> bool:
        return self.queue.done >= self.when

    def wait(self) -> None:
        self.queue.done = max(self.queue.done, self.when)

    def since(self, before: Moment) -> float:
        assert isinstance(before, At)
        return self.when - before.when


def test_a_thread_is_at_most_one_action_ahead():
    queue = Queue()
    pace, waited = Pace(queue), []
    for seconds in (3.0, 5.0, 2.0, 4.0):
        before = queue.done
        queue.ask(seconds)
        pace.keep()
        waited.append(queue.done - before)
    assert waited == [0.0, 3.0, 5.0, 2.0], "what the action before has taken"
    pace.catch_up()
    assert queue.done == queue.asked, "what is held is there"
    queue.ask(1.0)
    pace.keep()
    assert queue.done == queue.asked - 1.0, "and nothing of before is waited for again"


def test_durations_are_the_devices_and_nobody_waits_for_them():
    queue = Queue()
    watch = Stopwatch(queue)
    for seconds in (3.0, 5.0):
        with watch.measure("F"):
            queue.ask(seconds)
    queue.done = 4.0
    assert watch.take() == {"F": [3.0]} and queue.done == 4.0
    queue.done = 8.0
    assert watch.take() == {"F": [5.0]} and watch.take() == {}
    with pytest.raises(KeyError), watch.measure("B"):
        raise KeyError
    assert watch.take() == {}, "an interrupted one does not count"


def test_durations_are_those_of_the_stages_own_layers_also_where_it_runs_others():
    """A stage's costs do not change because it lends a layer of four, or borrows one."""
    queue = Queue()
    watch = Stopwatch(queue)
    for seconds, share in ((4.0, 1.0), (3.0, 0.75), (5.0, 1.25)):
        with watch.measure("F", share):
            queue.ask(seconds)
    queue.done = 12.0
    assert watch.take() == {"F": [4.0, 4.0, 4.0]} and watch.more == 0.0
    with watch.measure("F", 1.25):
        queue.ask(5.0)
    queue.done = 17.0
    assert watch.take() == {"F": [4.0]} and watch.more == 1.0


def test_durations_are_told_by_chunk_and_a_frameworks_own_timers_by_kind():
    queue, kinds = Queue(), []
    watch = Stopwatch(queue)
    watch.beside = lambda kind: nullcontext(kinds.append(kind))
    for chunk, seconds in ((0, 2.0), (1, 5.0), (1, 7.0)):
        with watch.measure("B", chunk=chunk):
            queue.ask(seconds)
    queue.done = 14.0
    taken = watch.take()
    assert taken == {"B": [2.0], "B/1": [5.0, 7.0]} and kinds == ["B"] * 3
    medians = {"B": 2.0, "B/1": 6.0}
    assert _spent({"actions": 17.0}, taken, medians, 0.0, host=True) == {"actions": 14.0, "between": 3.0, "gap": 1.0}


def test_a_device_that_counts_its_bytes_is_asked_for_them():
    queue = Queue()
    memory = ActivationMemory(queue)
    memory.begin()
    for number in range(2):
        with memory.forward((0, number), ()):
            queue.bytes += 70
        memory.begin_backward((0, number), ())
    assert memory.held().before_b == 70
    kept = KeptBytes(state=500, undo=0, gradient=0, sums=0, spare=100)
    assert room_on(queue, None, kept, held=70) == int(0.9 * 860) + 70 - 100


def test_room_is_left_for_the_communicators_of_the_next_generation(monkeypatch):
    """They are made before those in use are given back."""
    queue = Queue()
    monkeypatch.setattr(site, "device_of", lambda device: queue)
    meters = Meters(torch.device("cpu"))
    queue.taken = 300
    assert meters.communicators == 300
    kept = kept_bytes([], undo=0, gradient=0, sums=(), peers=1, messages=50, communicators=meters.communicators)
    assert room_on(queue, None, kept, held=0) == 900 - 350


class Stream:
    """A stream in words."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def __str__(self) -> str:
        return self.name

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self} waits for {other}")


def test_a_gpus_log_is_copied_on_a_stream_of_its_own_which_computing_does_not_wait_for(monkeypatch):
    """But for the thread, which lets two copies be under way."""
    told, events, on = list[str](), itertools.count(), [Stream("computing", [])]

    class Event:
        def __init__(self, **options: bool) -> None:
            self.name = f"event {next(events)}"

        def record(self) -> None:
            told.append(f"{self.name} on {on[-1]}")

        def synchronize(self) -> None:
            told.append(f"the thread waits for {self.name}")

    @contextmanager
    def under(stream: Stream) -> Iterator[None]:
        on.append(stream)
        yield
        on.pop()

    def pinned(like: torch.Tensor) -> torch.Tensor:
        told.append(f"a copy on {on[-1]}")
        return torch.empty_like(like)

    for name, stand_in in {"Event": Event, "stream": under, "Stream": lambda device: Stream("logging", told),
                           "current_stream": lambda device: on[-1]}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(devices, "_pinned", pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append(f"held for {stream}"))
    gpu, message = Cuda(torch.device("cpu")), torch.arange(6.0).view(2, 3).t().requires_grad_()
    first = gpu.log([message])
    assert told == ["logging waits for computing", "a copy on logging", "event 0 on logging", "held for logging"]
    gpu.log([message])
    assert not [words for words in told if "the thread" in words]
    gpu.log([message])
    assert [words for words in told if "the thread" in words] == ["the thread waits for event 0"]
    del told[:]
    (back,) = first.back()
    assert told == ["the thread waits for event 0"] and torch.equal(back, message) and not back.requires_grad
    with torch.no_grad():
        message.zero_()
    assert first.tensors[0].any(), "it is a copy"


def test_pinned_memory_is_counted_as_torch_takes_it():
    """By powers of two, on the host; on the device only what is being copied."""
    assert Cuda(torch.device("cuda")).log_bytes([1000, 1024, 1025, 0]) == (2 * 1025, 1024 + 1024 + 2048)
    assert Cpu().log_bytes([1000, 1024]) == (2024, 0)
    kept = KeptBytes(state=500, undo=0, gradient=0, sums=0, spare=100, log=50, host=2**40)
    assert room_on(Queue(), None, kept, held=0) == 900 - 150
    assert room_on(Queue(), 1.0, kept, held=0) == 2**30 - 650


def test_a_cpus_log_is_no_copy():
    message = torch.arange(6.0).requires_grad_()
    (logged,) = Cpu().log([message]).back()
    assert logged.data_ptr() == message.data_ptr() and not logged.requires_grad


def test_a_cpus_moments_come_as_they_are_made():
    one, other = Cpu().moment(), Cpu().moment()
    assert other.over() and other.since(one) >= 0.0
    Pace(Cpu()).catch_up()
    assert isinstance(device_of(torch.device("cpu")), Cpu)
