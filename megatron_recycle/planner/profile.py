"""Costs from the running job: robust averages of measured durations, drift against the planned ones, caps
from bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from ..plan import Costs, PlanError, Worker
from ..plan.costs import NOTABLE

#: measured speeds are rounded to this, so that noise does not make every plan a new one
SPEED_STEP = 0.05


class Profile:
    """Measured durations in seconds, the latest ``window`` per worker and kind.

    Kinds are ``F``, ``B``, ``W``, ``S`` (reduce and step) and ``hop`` (a transfer). A median is taken per
    worker, then over workers, so that neither an odd measurement nor one slow worker shifts a stage's cost. Of
    ``S`` the shortest counts: it includes waiting for the others, and whoever comes last waits least.
    """

    def __init__(self, stages: int, window: int = 64) -> None:
        self._stages = stages
        self._window = window
        self._samples: dict[tuple[str, int, Worker], deque[float]] = {}

    def add(self, kind: str, worker: Worker, seconds: float, stage: int | None = None) -> None:
        """Record one duration. Raises PlanError for an unknown kind or a negative time."""
        if kind not in ("F", "B", "W", "S", "hop") or not seconds >= 0:
            raise PlanError(f"profile: {kind!r} of {seconds!r} seconds is no measurement")
        at = worker.stage if stage is None else stage
        self._samples.setdefault((kind, at, worker), deque(maxlen=self._window)).append(seconds)

    def costs(self) -> Costs | None:
        """Costs in microseconds, with the speeds that differ notably; None until every stage was measured."""
        per_worker: dict[tuple[str, int], dict[Worker, float]] = {}
        for (kind, stage, worker), samples in self._samples.items():
            per_worker.setdefault((kind, stage), {})[worker] = median(samples)
        table: dict[str, list[float]] = {}
        for kind in "FBWS":
            if kind != "W" and any((kind, s) not in per_worker for s in range(self._stages)):
                return None
            usual = min if kind == "S" else median
            table[kind] = [usual(per_worker.get((kind, s), {Worker(0, s): 0.0}).values()) for s in range(self._stages)]
        hops = [value for (kind, _), values in per_worker.items() if kind == "hop" for value in values.values()]
        whole = {kind: tuple(round(t * 1e6) for t in row) for kind, row in table.items()}
        return Costs(whole["F"], whole["B"], whole["W"], round(median(hops) * 1e6) if hops else 0, whole["S"],
                     self._speeds(per_worker, table))

    def _speeds(self, per_worker: Mapping[tuple[str, int], Mapping[Worker, float]],
                table: Mapping[str, Sequence[float]]) -> dict[Worker, float]:
        """Slowness of each worker against its stage, over all of its work together."""
        own: dict[tuple[Worker, int], list[float]] = {}
        for (kind, stage), values in per_worker.items():
            if kind in "FBW":
                for worker, value in values.items():
                    totals = own.setdefault((worker, stage), [0.0, 0.0])
                    totals[0] += value
                    totals[1] += table[kind][stage]
        speeds = {}
        for (worker, _), (mine, usual) in sorted(own.items()):
            factor = round(round(mine / usual / SPEED_STEP) * SPEED_STEP, 2) if usual else 1.0
            if abs(factor - 1) > NOTABLE:
                speeds[worker] = factor
        return speeds


def drifted(planned: Costs, measured: Costs, tolerance: float = 0.10) -> bool:
    """Whether plans made for ``planned`` should be made again: a stage's work, a step or a speed has changed
    by more than ``tolerance``, measured against a whole micro-batch so that tiny costs do not count."""
    for s in range(planned.stages):
        pairs = [(getattr(planned, name)[s], getattr(measured, name)[s])
                 for name in ("forward", "backward_input", "backward_weight")]
        whole = max(1, sum(old for old, _ in pairs))
        if any(abs(new - old) > tolerance * whole for old, new in [*pairs, (planned.step[s], measured.step[s])]):
            return True
    return any(abs(measured.speed.get(w, 1) - planned.speed.get(w, 1)) > tolerance
               for w in {*planned.speed, *measured.speed})


def caps(free: Mapping[Worker, int], before_b: Sequence[int], after_b: Sequence[int],
         units: int = 8) -> tuple[dict[Worker, int], tuple[int, ...], tuple[int, ...]]:
    """Memory caps and weights in whole units from bytes, rounded so that a plan never takes more than there
    is.

    ``free``: bytes per worker left for activations, after all that does not grow with them. ``before_b`` and
    ``after_b``: bytes one micro-batch holds per stage before and after its B. The unit is the largest of
    these divided by ``units``. Returns cap, before_b and after_b as Problem takes them. Raises PlanError
    where not even one micro-batch fits.
    """
    unit = max(1, -(-max([*before_b, *after_b]) // units))
    before = tuple(-(-size // unit) for size in before_b)
    after = tuple(-(-size // unit) for size in after_b)
    cap = {worker: size // unit for worker, size in free.items()}
    for worker, room in cap.items():
        if room < max(before[worker.stage], after[worker.stage]):
            raise PlanError(f"worker {worker} has {free[worker]} bytes left for activations, one micro-batch needs"
                            f" {max(before_b[worker.stage], after_b[worker.stage])}: lower the micro-batch size")
    return cap, before, after
