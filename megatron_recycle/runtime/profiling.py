"""A worker's measured durations for the planner: of every iteration once it is committed, in a few numbers."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_recycle.runtime.budget import announce_profile, profile
from megatron_recycle.runtime.lags import Lags
from megatron_recycle.runtime.stopwatch import Stopwatch

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
        self._share: float | None = None
        self._untold: list[dict[str, float]] = []
        self._lags: list[dict[str, Any]] = []

    @property
    def learned(self) -> bool:
        """Whether enough is known of what B and W take apart from each other."""
        return self._commits >= _FIRST and self._share is not None

    def committed(self, worker: StageWorker, iteration: int, lags: Lags) -> None:
        """``iteration`` is final; ``lags`` has the times of its messages."""
        self._commits += 1
        medians = self._apart({kind: median(seconds) for kind, seconds in self._watch.take().items()})
        if self._commits > 1:  # the first has much in it that comes once: memory, threads, caches
            self._untold.append(medians)
            if self._commits <= _FIRST or iteration % _LAGS_EVERY == 0:
                self._lags += filter(None, [lags.told(iteration)])
        if self._commits < _FIRST:
            return
        found = profile(worker) if self._commits == _FIRST or self._commits % _EVERY == 0 else {}
        worker.agent.event("profile", iterations=self._untold, lags=self._lags, **found)
        self._untold, self._lags = [], []
        if self._commits == _FIRST and worker.plan.problem.live(worker.place.me.stage)[0] == worker.place.me:
            announce_profile(worker.place.me, found)

    def _apart(self, medians: dict[str, float]) -> dict[str, float]:
        """With B and W where only whole backwards ran: in the proportion in which they were last seen apart."""
        whole = medians.pop("BW", None)
        if "B" in medians and "W" in medians:
            self._share = medians["B"] / max(medians["B"] + medians["W"], 1e-9)
        elif whole is not None and self._share is not None:
            medians |= {"B": whole * self._share, "W": whole * (1 - self._share)}
        return {kind: round(seconds, 7) for kind, seconds in medians.items()}
