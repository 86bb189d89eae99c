"""How long this worker's actions take, for the planner.

Waiting for other workers does not count, but for that in a reduction: the peer that comes last waits least.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

_KINDS = ("F", "B", "W", "reduce", "step")


class Stopwatch:
    """Durations of the latest ``window`` actions of each kind on ``device``.

    On a GPU they are taken between events on the current stream and read when they are asked for, so that
    measuring makes nobody wait.
    """

    def __init__(self, device: torch.device, window: int = 32) -> None:
        self._cuda = device.type == "cuda"
        self._window = window
        self._taken: dict[str, list[float | tuple[torch.cuda.Event, torch.cuda.Event]]] = {k: [] for k in _KINDS}

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Take the time of the block as one action of ``kind``; an interrupted one does not count."""
        if self._cuda:
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            yield
            ended.record()
            self._add(kind, (begun, ended))
        else:
            start = time.perf_counter()
            yield
            self._add(kind, time.perf_counter() - start)

    def medians(self, last: int = 0) -> dict[str, float]:
        """Median seconds of each kind of action that was measured; of the ``last`` so many of each, 0: of all."""
        found = {}
        for kind, taken in self._taken.items():
            seconds = [one if isinstance(one, float) else one[0].elapsed_time(one[1]) / 1000 for one in taken[-last:]
                       if isinstance(one, float) or one[1].query()]
            if seconds:
                found[kind] = median(seconds)
        return found

    def _add(self, kind: str, value: float | tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
        self._taken[kind] = [*self._taken[kind][1 - self._window:], value]
