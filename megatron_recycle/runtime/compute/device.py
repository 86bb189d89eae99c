"""A worker's device: differences between devices other than computing.

A thread that uses a GPU only enqueues work, and is ahead of the device: results are not there yet, and the thread's own
time says nothing. On a CPU both are the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

_UNDER_WAY = 2
"""Logs whose copies may be under way at a time: their tensors take room on the device, too."""


class Moment(Protocol):
    """The moment at which a device has done all work that the thread has enqueued so far."""

    def over(self) -> bool:
        """Whether it has come. Never blocks."""

    def wait(self) -> None:
        """Block until it has come."""

    def since(self, before: Moment) -> float:
        """Seconds from ``before``, a moment of the same device; both have come."""


class Logged:
    """Tensors of a message in a log, for a time when the device's own may be gone. This one just holds them.

    Attributes:
        tensors: them, or copies, contiguous and on any device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]

    def back(self) -> Sequence[torch.Tensor]:
        """The tensors, on the device. Blocks until they have been copied."""
        return self.tensors


class LogBytes(NamedTuple):
    """Bytes of a log on the device, and in the host's memory beside it."""

    device: int
    host: int


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

    def log(self, tensors: Sequence[torch.Tensor]) -> Logged:
        """Log ``tensors``, results of work that this thread has enqueued, which nothing writes to later. Their room on
        the device may be taken by others once all else has let go of them."""
        return Logged(tensors)

    def log_bytes(self, sizes: Sequence[int]) -> LogBytes:
        """Bytes of the log of messages with these ``sizes``."""
        return LogBytes(sum(sizes), 0)


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


class _Pinned(Logged):
    """Copies in pinned host memory, which the device reads and writes by itself.

    Args:
        tensors: the copies.
        copied: the moment from which on they are whole.
        device: of the originals.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copied: Moment, device: torch.device) -> None:
        super().__init__(tensors)
        self._copied, self._device = copied, device

    def back(self) -> Sequence[torch.Tensor]:
        self._copied.wait()
        return [tensor.to(self._device, non_blocking=True) for tensor in self.tensors]


class Cuda(Device):
    """A GPU. Logs go to pinned host memory, on a stream of their own: computing does not wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._logging: torch.cuda.Stream | None = None
        self._under_way = deque[Moment]()

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

    def log(self, tensors: Sequence[torch.Tensor]) -> Logged:
        if self._logging is None:
            self._logging = torch.cuda.Stream(self._device)
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft().wait()
        self._logging.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._logging):
            copies = [_pinned(tensor).copy_(tensor.detach(), non_blocking=True) for tensor in tensors]
            copied = _OnStream()
        for tensor in tensors:
            tensor.record_stream(self._logging)  # keeps its memory from others until it is copied
        self._under_way.append(copied)
        return _Pinned(copies, copied, self._device)

    def log_bytes(self, sizes: Sequence[int]) -> LogBytes:
        # torch's allocator of pinned memory rounds up to a power of two.
        return LogBytes(_UNDER_WAY * max(sizes, default=0), sum(1 << (size - 1).bit_length() for size in sizes if size))


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


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
