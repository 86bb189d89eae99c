"""How long this worker's actions take, for the planner.

Waiting for other workers does not count, but for that in a reduction: the peer that comes last waits least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from megatron_recycle.runtime.compute.device import Device, Moment

_KINDS = ("F", "B", "W", "reduce", "step")


class Stopwatch:
    """Durations of actions on ``device`` since they were last asked for, at most the latest ``window`` of each kind.

    They are the device's, and read when they are asked for, so that measuring makes nobody wait.

    Attributes:
        beside: kind -> a block around each action, for a framework's own timers.
    """

    def __init__(self, device: Device, window: int = 256) -> None:
        self._device = device
        self._taken: dict[str, deque[tuple[Moment, Moment]]] = {kind: deque(maxlen=window) for kind in _KINDS}
        self.beside: Callable[[str], AbstractContextManager[None]] = lambda kind: nullcontext()

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Take the time of the block as one action of ``kind``; an interrupted one does not count."""
        begun = self._device.moment()
        with self.beside(kind):
            yield
        self._taken[kind].append((begun, self._device.moment()))

    def take(self) -> dict[str, list[float]]:
        """Seconds of each action of each kind that has ended since the last call."""
        found = {}
        for kind, taken in self._taken.items():
            seconds = []
            while taken and taken[0][1].over():  # they end in their order
                begun, ended = taken.popleft()
                seconds.append(ended.since(begun))
            if seconds:
                found[kind] = seconds
        return found
