"""A worker's measured durations for the planner: of every iteration once it is committed, in a few numbers."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from megatron_recycle.runtime.budget import announce_profile, profile
from megatron_recycle.runtime.stopwatch import Stopwatch

if TYPE_CHECKING:
    from megatron_recycle.runtime.worker import StageWorker

_FIRST, _EVERY = 4, 25
"""Commits after which durations are told for the first time (then after each), and memory again."""


class Profiling:
    """Tells the coordinator of one worker's durations.

    Args:
        watch: measures them.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._commits = 0
        self._untold: list[dict[str, float]] = []

    def committed(self, worker: StageWorker) -> None:
        """An iteration is final."""
        self._commits += 1
        medians = {kind: round(median(seconds), 7) for kind, seconds in self._watch.take().items()}
        if self._commits > 1:  # the first has much in it that comes once: memory, threads, caches
            self._untold.append(medians)
        if self._commits < _FIRST:
            return
        found = profile(worker) if self._commits == _FIRST or self._commits % _EVERY == 0 else {}
        worker.agent.event("profile", iterations=self._untold, **found)
        self._untold = []
        if self._commits == _FIRST and worker.plan.problem.live(worker.place.me.stage)[0] == worker.place.me:
            announce_profile(worker.place.me, found)
