"""Durations of this worker's actions, for the planner.

Waits for other workers do not count, except those in a reduction: the peer that comes last waits least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from megatron_recycle.plan import of_place
from megatron_recycle.runtime.compute.device import Device, Moment


class Stopwatch:
    """Durations of actions on ``device`` since the last `take`, at most the latest ``window`` of each kind, and of each
    chunk where the stage has several.

    They are the device's, and read by `take`, so that measuring blocks no thread.

    Attributes:
        beside: kind -> a block around each action, for a framework's own timers.
        more: seconds that the actions last taken took beyond the result of `take`, for layers of other stages.
    """

    def __init__(self, device: Device, window: int = 256) -> None:
        self._device, self._window = device, window
        self._taken: dict[str, deque[tuple[Moment, Moment, float]]] = {}
        self.more = 0.0
        self.beside: Callable[[str], AbstractContextManager[None]] = lambda kind: nullcontext()

    @contextmanager
    def measure(self, kind: str, share: float = 1.0, chunk: int = 0) -> Iterator[None]:
        """Take the time of the block as one action of ``kind``; an interrupted one does not count.

        Args:
            share: planned time of the block as a share of that of the stage's own layers, where it runs more than
                these, or fewer.
            chunk: of the stage, in the order of the model's layers.
        """
        begun = self._device.moment()
        with self.beside(kind):
            yield
        taken = self._taken.setdefault(of_place(kind, chunk), deque(maxlen=self._window))
        taken.append((begun, self._device.moment(), share))

    def take(self) -> dict[str, list[float]]:
        """Seconds of each action that has ended since the last call, scaled to the stage's own layers, by kind: "F" of
        the stage's first chunk, "F/1" of its second."""
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
