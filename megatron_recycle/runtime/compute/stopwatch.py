"""How long this worker's actions take, for the planner.

Waiting for other workers does not count, but for that in a reduction: the peer that comes last waits least.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KINDS = ("F", "B", "W", "reduce", "step")


class Stopwatch:
    """Durations of actions on ``device`` since they were last asked for, at most the latest ``window`` of each kind.

    On a GPU they are taken between events on the current stream and read when they are asked for, so that
    measuring makes nobody wait.
    """

    def __init__(self, device: torch.device, window: int = 256) -> None:
        self._cuda = device.type == "cuda"
        self._taken: dict[str, deque[float | tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            kind: deque(maxlen=window) for kind in _KINDS}

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Take the time of the block as one action of ``kind``; an interrupted one does not count."""
        if self._cuda:
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            yield
            ended.record()
            self._taken[kind].append((begun, ended))
        else:
            start = time.perf_counter()
            yield
            self._taken[kind].append(time.perf_counter() - start)

    def take(self) -> dict[str, list[float]]:
        """Seconds of each action of each kind that has ended since the last call."""
        found = {}
        for kind, taken in self._taken.items():
            seconds = []
            while taken and (isinstance(one := taken[0], float) or one[1].query()):  # in the order of the stream
                taken.popleft()
                seconds.append(one if isinstance(one, float) else one[0].elapsed_time(one[1]) / 1000)
            if seconds:
                found[kind] = seconds
        return found
