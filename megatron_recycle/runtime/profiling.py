"""A worker's measured durations for the planner: of every iteration once it is committed, in a few numbers."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_recycle.runtime.compute.stopwatch import Stopwatch
from megatron_recycle.runtime.compute.transfer_times import Lags
from megatron_recycle.runtime.memory_budget import announce_profile, profile

if TYPE_CHECKING:
    from megatron_recycle.runtime.worker import StageWorker

_FIRST, _EVERY = 4, 25
"""Commits after which durations are told for the first time (then after each), and memory again."""
_LAGS_EVERY = 5
"""Iterations of which the times of messages are told; those before the first telling are, too."""


class Profiling:
    """Tells the coordinator of one worker's durations.

    Args:
        watch: measures them.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._commits = 0
        self._untold: list[dict[str, float]] = []
        self._lags: list[dict[str, Any]] = []

    def committed(self, worker: StageWorker, iteration: int, lags: Lags) -> None:
        """``iteration`` is final; ``lags`` has the times of its messages."""
        self._commits += 1
        medians = {kind: round(median(seconds), 7) for kind, seconds in self._watch.take().items()}
        if self._commits > 1:  # the first has much in it that comes once: memory, threads, caches
            self._untold.append(medians)
            if self._commits <= _FIRST or iteration % _LAGS_EVERY == 0:
                self._lags += filter(None, [lags.told(iteration)])
        if self._commits < _FIRST:
            return
        found = profile(worker) if self._commits == _FIRST or self._commits % _EVERY == 0 else None
        worker.agent.measured(self._untold, self._lags, found)
        self._untold, self._lags = [], []
        if self._commits > _FIRST or found is None:
            return
        if worker.plan.problem.live(worker.place.me.stage)[0] == worker.place.me:
            announce_profile(worker.place.me, found)
