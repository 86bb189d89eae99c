"""A worker's device: differences between devices other than computing.

A thread that uses a GPU only enqueues work, and is ahead of the device: results are not there yet, and the thread's own
time says nothing. On a CPU both are the same.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Moment(Protocol):
    """The moment at which a device has done all work that the thread has enqueued so far."""

    def over(self) -> bool:
        """Whether it has come. Never blocks."""

    def wait(self) -> None:
        """Block until it has come."""

    def since(self, before: Moment) -> float:
        """Seconds from ``before``, a moment of the same device; both have come."""


class Device:
    """A worker's device. The defaults hold where the thread computes itself and memory is not counted."""

    def moment(self) -> Moment:
        """The moment at which the device has done all work enqueued by this thread so far."""
        return _Now()

    def allocated(self) -> int | None:
        """Bytes in tensors on the device; None: there is no count."""
        return None

    def room(self) -> int | None:
        """Bytes that new tensors could take; None: unknown, as the device is not this worker's alone."""
        return None

    def outside(self) -> int:
        """Bytes of the device's memory in use for other things than tensors: communicators, most of all."""
        return 0


class _Now:
    """A moment that has come: the thread's own."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def over(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def since(self, before: Moment) -> float:
        assert isinstance(before, _Now)
        return self._seconds - before._seconds


class Cpu(Device):
    """The host's memory and cores."""


class _OnStream:
    """A moment of the stream that was current."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record()

    def over(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, before: Moment) -> float:
        assert isinstance(before, _OnStream)
        return before._event.elapsed_time(self._event) / 1000


class Cuda(Device):
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def moment(self) -> Moment:
        return _OnStream()

    def allocated(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def room(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def outside(self) -> int:
        free, whole = torch.cuda.mem_get_info(self._device)
        return whole - free - torch.cuda.memory_reserved(self._device)


def device_of(device: torch.device) -> Device:
    """The object for a torch device."""
    return Cuda(device) if device.type == "cuda" else Cpu()


class Pace:
    """Keeps a thread at most one action ahead of its device: its time for an action is then the device's for the one
    before, and a thread that stands still stands where the device does."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Moment | None = None

    def keep(self) -> None:
        """An action has been enqueued."""
        before, self._last = self._last, self._device.moment()
        if before is not None:
            before.wait()

    def catch_up(self) -> None:
        """Wait until the device has done all enqueued work."""
        self._last = None
        self._device.moment().wait()
