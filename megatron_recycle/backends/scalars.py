"""A job's state as numbers for curves in a framework's own writers (TensorBoard, CSV, W&B)."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_recycle.backends.session import Session
from megatron_recycle.plan import Plan


class Scalars:
    """Call it where an iteration's numbers are written: it returns `Recycle/...` names and their values.

    `iteration_seconds` is the time since the last call, so that a failure is a peak; absent on a worker's first call.
    """

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._before: float | None = None
        self._counted: tuple[Plan | None, int] = (None, 0)

    def __call__(self) -> dict[str, float]:
        live, size = len(self._session.live()), len(self._session.place.ranks)
        found = {"live_workers": live, "lost_workers": size - live, "rerouted": self.rerouted(),
                 "generation": self._session.worker.standing.epoch.generation}
        now, before = self._clock(), self._before
        self._before = now
        return {f"Recycle/{name}": float(value) for name, value in
                (found if before is None else {**found, "iteration_seconds": now - before}).items()}

    def rerouted(self) -> int:
        """Stages of micro-batches that run as guests in each iteration of the plan in use."""
        plan = self._session.worker.plan
        if self._counted[0] is not plan:
            self._counted = (plan, sum(worker.pipeline != pipeline
                                       for (pipeline, _, _), worker in plan.route().items()))
        return self._counted[1]
