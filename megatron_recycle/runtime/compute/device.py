"""The device that a worker computes on, as far as it differs from one to another beside computing.

A thread that uses a GPU only asks for work, and is ahead of the device: what it has been told to compute is not there
yet, and how long the thread took says nothing. On a CPU both are the same.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Moment(Protocol):
    """The moment at which a device has done all that the thread had asked of it so far."""

    def over(self) -> bool:
        """Whether it has come. Never blocks."""

    def wait(self) -> None:
        """Block until it has come."""

    def since(self, before: Moment) -> float:
        """Seconds from ``before``, a moment of the same device; both have come."""


class Device:
    """A worker's device. What is said here is so where the thread computes itself, and nobody counts memory."""

    def moment(self) -> Moment:
        """When the device has done all that this thread has asked of it until now."""
        return _Now()

    def allocated(self) -> int | None:
        """Bytes in tensors on the device; None: nobody counts them."""
        return None

    def room(self) -> int | None:
        """Bytes that new tensors could take; None: the device is not this worker's alone, and nobody knows."""
        return None

    def outside(self) -> int:
        """Bytes of the device's memory that are in use and not for tensors: communicators, most of all."""
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
    """A GPU. Nothing of this has run on one."""

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
    """Keeps a thread at most one action ahead of its device: what the thread then takes for an action is what the
    device took for the one before, and a thread that stands still stands where the device does."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Moment | None = None

    def keep(self) -> None:
        """An action has been asked for."""
        before, self._last = self._last, self._device.moment()
        if before is not None:
            before.wait()

    def catch_up(self) -> None:
        """Wait until the device has done all that was asked of it."""
        self._last = None
        self._device.moment().wait()
