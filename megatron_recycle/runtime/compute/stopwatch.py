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
        more: seconds by which the actions last asked for took longer than `take` has said, for layers of other stages.
    """

    def __init__(self, device: Device, window: int = 256) -> None:
        self._device = device
        self._taken: dict[str, deque[tuple[Moment, Moment, float]]] = {kind: deque(maxlen=window) for kind in _KINDS}
        self.more = 0.0
        self.beside: Callable[[str], AbstractContextManager[None]] = lambda kind: nullcontext()

    @contextmanager
    def measure(self, kind: str, share: float = 1.0) -> Iterator[None]:
        """Take the time of the block as one action of ``kind``; an interrupted one does not count. ``share``: of the
        time of the stage's own layers that it takes, as planned, where it runs more than these, or fewer."""
        begun = self._device.moment()
        with self.beside(kind):
            yield
        self._taken[kind].append((begun, self._device.moment(), share))

    def take(self) -> dict[str, list[float]]:
        """Seconds of each action of each kind that has ended since the last call, with the stage's own layers."""
        found, self.more = {}, 0.0
        for kind, taken in self._taken.items():
            seconds = []
            while taken and taken[0][1].over():  # they end in their order
                begun, ended, share = taken.popleft()
                took = ended.since(begun)
                seconds.append(took / share)
                self.more += took - seconds[-1]
            if seconds:
                found[kind] = seconds
        return found
