"""When a worker's measured durations go to the planner: at a steady pace, and early when they have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_recycle.plan.costs import NOTABLE
from megatron_recycle.runtime.budget import announce_profile, profile
from megatron_recycle.runtime.stopwatch import Stopwatch

if TYPE_CHECKING:
    from megatron_recycle.runtime.worker import StageWorker

_FIRST, _EVERY = 4, 25  # commits after which they go in any case
_RECENT = 2  # iterations that a change is looked for in
_IN_A_ROW = 2  # commits that must show it, so that one odd iteration changes nothing


class Profiling:
    """Tells the coordinator of one worker's durations.

    Args:
        watch: measures them.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._commits = 0
        self._told: Mapping[str, float] = {}
        self._changed = 0

    def committed(self, worker: StageWorker, microbatches: int) -> None:
        """An iteration is final; ``microbatches`` are those that this worker ran of it."""
        self._commits += 1
        if self._commits == _FIRST or self._commits % _EVERY == 0:
            self._tell(worker, self._watch.medians(), early=False)
        elif self._commits > _FIRST and microbatches:
            recent = self._watch.medians(_RECENT * microbatches)
            self._changed = self._changed + 1 if notable(self._told, recent) else 0
            if self._changed == _IN_A_ROW:
                self._tell(worker, recent, early=True)

    def _tell(self, worker: StageWorker, medians: Mapping[str, float], early: bool) -> None:
        found = profile(worker)
        worker.agent.event("profile", **medians, **found, early=early)
        self._told, self._changed = medians, 0
        if self._commits == _FIRST and worker.plan.problem.live(worker.place.me.stage)[0] == worker.place.me:
            announce_profile(worker.place.me, found)


def notable(told: Mapping[str, float], recent: Mapping[str, float]) -> bool:
    """Whether the work on a micro-batch takes so much longer or shorter than was told that plans should know."""
    kinds = [kind for kind in "FBW" if kind in told and kind in recent]
    before, now = (sum(medians[kind] for kind in kinds) for medians in (told, recent))
    return abs(now - before) > NOTABLE * before
