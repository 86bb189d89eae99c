"""Costs of the running job: robust averages of measured durations, drift against the planned ones, caps from bytes.

docs/slowness.md explains when a worker counts as slow and when a stage's costs have changed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median, median_low

from megatron_recycle.measure.noise import LONG, RECENT, notable, spread
from megatron_recycle.plan import Costs, PlanError, Worker, of_place
from megatron_recycle.plan.costs import NOTABLE

#: measured speeds are rounded to this, so that noise does not make every plan a new one
SPEED_STEP = 0.05

KINDS = ("F", "B", "W", "S")

_TOLERANCE = 0.10
_UNITS = 8
"""Memory units of a micro-batch."""
_CLEAR_SPREADS, _CLEAR_SECONDS = 8.0, 0.5  # seconds: summed over one micro-batch in each of three iterations


class Profile:
    """The latest measured durations in seconds, one of each kind per worker and iteration.

    Kinds are ``F``, ``B``, ``W`` and ``S`` (reduce and step, with all other work that comes once an iteration); ``F/1``
    is the F of the second chunk of a worker's stage, and so on. A median is taken per worker, then over workers, so
    that neither an odd measurement nor one slow worker shifts a stage's cost. An S includes waiting for the other
    workers, and the last worker to arrive waits least: of each iteration the shortest counts.
    """

    def __init__(self) -> None:
        self._series: dict[Worker, dict[str, deque[float]]] = {}
        self._factors: dict[Worker, float] = {}
        self._streaks: dict[Worker, int] = {}  # times in a row that a worker not in _factors seemed to differ

    def add(self, worker: Worker, seconds: Mapping[str, float], chunks: int = 1) -> None:
        """Take in one iteration. Raises PlanError for an unknown kind or a negative time.

        Args:
            chunks: of the worker's stage. An iteration in which it had no work in one of them says nothing about its
                speed.
        """
        for kind, value in seconds.items():
            if kind.partition("/")[0] not in KINDS or not value >= 0:
                raise PlanError(f"profile: {kind!r} of {value!r} seconds is no measurement")
        series = self._series.setdefault(worker, {})
        work = [[seconds[name] for kind in "FBW" if (name := of_place(kind, chunk)) in seconds]
                for chunk in range(chunks)]
        for kind, value in (*seconds.items(), *([("all", sum(map(sum, work)))] if all(work) else [])):
            series.setdefault(kind, deque(maxlen=LONG)).append(value)

    def forget(self, worker: Worker) -> None:
        """Drop the measurements of a worker that has a new process."""
        self._series.pop(worker, None)
        self._factors.pop(worker, None)
        self._streaks.pop(worker, None)

    def noise(self, live: Iterable[Worker]) -> dict[str, float]:
        """Relative spread of one measurement, by kind, of all chunks; "all" is the whole work on a micro-batch."""
        live = tuple(live)
        return {kind: spread(values for worker in live for name, values in self._series.get(worker, {}).items()
                             if name.partition("/")[0] == kind) for kind in (*KINDS, "all")}

    def factors(self, live: Iterable[Worker]) -> dict[Worker, float]:
        """Slowness of the workers that differ notably from their stage, and by more than noise: 1.5 takes half as long
        again for a micro-batch. A worker known to differ stays known until it has come back half of the way."""
        live = tuple(live)
        noise = self.noise(live)["all"]
        found = {}
        for worker in live:
            peers = [other for other in live if other.stage == worker.stage]
            recent, known = self._ratio(worker, peers, RECENT), self._factors.get(worker)
            if recent is None or not notable(recent, 1, NOTABLE, noise):
                self._streaks.pop(worker, None)
            if recent is None:
                if known is not None:  # no work, no news
                    found[worker] = known
                continue
            if not notable(recent, 1, NOTABLE, 0):
                continue
            latest = self._ratio(worker, peers, LONG)
            if notable(recent, 1, NOTABLE, noise) and (known is not None or self._confirmed(worker, peers, noise)):
                found[worker] = recent
            elif latest is not None and (latest > 1) == (recent > 1) and notable(latest, 1, NOTABLE, noise, LONG):
                found[worker] = latest
            elif known is not None and (known > 1) == (recent > 1) and _further(recent, math.sqrt(known)):
                found[worker] = known
            if worker in found and known is not None and not notable(found[worker], known, SPEED_STEP, noise):
                found[worker] = known
        self._factors = found
        self._streaks = {worker: count for worker, count in self._streaks.items() if worker not in found}
        return dict(found)

    def _confirmed(self, worker: Worker, peers: Sequence[Worker], noise: float) -> bool:
        """Whether a worker that differs now differs for good.

        Two kinds of evidence suffice: each of three iterations differs clearly, by many spreads or by more time than a
        busy machine lets a process wait; or six iterations in a row differ."""
        usual = median_low(self._medians(peers, RECENT))
        latest = tuple(self._of(worker, "all"))[-RECENT:]
        mildest = min(latest, key=lambda seconds: abs(math.log(max(seconds, 1e-9) / usual)))
        if not notable(mildest, usual, NOTABLE, noise):
            self._streaks.pop(worker, None)
            return False
        self._streaks[worker] = self._streaks.get(worker, 0) + 1
        clear = abs(math.log(mildest / usual)) > _CLEAR_SPREADS * noise
        return clear or sum(latest) - RECENT * usual > _CLEAR_SECONDS or self._streaks[worker] > RECENT

    def costs(self, live: Iterable[Worker], placement: Sequence[int], window: int = LONG, hop: float = 0.0,
              middle: Callable[[Sequence[float]], float] = median) -> Costs | None:
        """Costs in microseconds over the latest ``window`` iterations, with the speeds that differ notably; None until
        every chunk was measured.

        Args:
            placement: the stage of each chunk of the model.
            hop: seconds that a transfer takes.
            middle: of several measurements; the mean tells what a busy machine adds, too, and is no ground to plan on.
        """
        live, speeds = tuple(live), {}
        table: dict[str, list[float]] = {kind: [] for kind in KINDS}
        of_stage: list[list[Worker]] = []  # workers with usual durations
        for stage in range(1 + max(placement)):
            workers = [worker for worker in live if worker.stage == stage]
            usual = [worker for worker in workers if worker not in self._factors] or workers
            speeds.update({worker: _rounded(self._factors[worker]) for worker in workers if worker not in usual})
            table["S"].append(middle(self._steps(workers, window)))
            of_stage.append(usual)
        for chunk, stage in enumerate(placement):
            for kind in "FBW":
                name = of_place(kind, placement[:chunk].count(stage))
                values = [middle(latest) for worker in of_stage[stage]
                          if (latest := tuple(self._of(worker, name))[-window:])]
                if not values and kind != "W":
                    return None
                table[kind].append(middle(values or [0.0]))
        whole = {kind: tuple(round(seconds * 1e6) for seconds in row) for kind, row in table.items()}
        return Costs(whole["F"], whole["B"], whole["W"], round(hop * 1e6), whole["S"], speeds)

    def _steps(self, workers: Iterable[Worker], window: int) -> list[float]:
        """Times of a stage's S after all workers have come to it, for the latest iterations."""
        latest = [reversed(tuple(self._of(worker, "S"))[-window:]) for worker in workers if self._of(worker, "S")]
        return [min(row) for row in zip(*latest)] or [0.0]

    def _ratio(self, worker: Worker, peers: Sequence[Worker], window: int) -> float | None:
        """The worker's work over the median of all ``peers``, itself included; of two peers the faster one counts.
        None: not known yet."""
        own, everybody = (self._medians(workers, window) for workers in ([worker], peers))
        return own[0] / median_low(everybody) if own and len(everybody) > 1 else None

    def _medians(self, workers: Iterable[Worker], window: int) -> list[float]:
        """Per worker with so many measurements, the median work of its latest ``window`` ones."""
        latest = (tuple(self._of(worker, "all"))[-window:] for worker in workers)
        return [median(values) for values in latest if len(values) == window]

    def _of(self, worker: Worker, kind: str) -> Sequence[float]:
        return self._series.get(worker, {}).get(kind, ())


def _further(ratio: float, other: float) -> bool:
    return abs(math.log(ratio)) > abs(math.log(other))


def _rounded(factor: float) -> float:
    return max(SPEED_STEP, round(round(factor / SPEED_STEP) * SPEED_STEP, 2))


def drifted(planned: Costs, measured: Costs, noise: Mapping[str, float] | None = None, window: int = RECENT,
            placement: Sequence[int] = ()) -> bool:
    """Whether plans made for ``planned`` should be made again.

    They should if a chunk's work, a step, a transfer or a speed has changed by more than a tolerance and by more than
    noise. The tolerance is a share of a whole micro-batch, so that changes of tiny costs do not count: of its work in
    that chunk (or in the stage's average chunk if that is more); for a step, of its work in the whole stage.

    Args:
        placement: the stage of each chunk; (): each stage has one.
        noise: spread of one measurement by kind, as from `Profile.noise`; None: the measurements are exact.
        window: the number of measurements that ``measured`` is made of.
    """
    def changed(old: float, new: float, whole: float, kind: str) -> bool:
        return abs(new - old) > _TOLERANCE * whole and notable(new, old, 0, (noise or {}).get(kind, 0.0), window)

    named = {"F": "forward", "B": "backward_input", "W": "backward_weight"}
    placement = placement or range(planned.stages)
    wholes = [max(1, sum(work)) for work in zip(*(getattr(planned, name) for name in named.values()), strict=True)]
    of_stage = [[whole for whole, at in zip(wholes, placement, strict=True) if at == stage]
                for stage in range(1 + max(placement))]
    if any(changed(old, new, max(whole, mean(of_stage[stage])), kind) for kind, name in named.items()
           for old, new, whole, stage in zip(getattr(planned, name), getattr(measured, name), wholes, placement,
                                             strict=True)):
        return True
    if any(changed(old, new, sum(whole), "S")
           for old, new, whole in zip(planned.step, measured.step, of_stage, strict=True)):
        return True
    # A busy machine's lateness adds to the hop, so few iterations do not judge it.
    if (noise is None or window == LONG) and abs(measured.hop - planned.hop) > NOTABLE * min(wholes):
        return True
    return any(changed(planned.speed.get(worker, 1), measured.speed.get(worker, 1), 1, "speed")
               for worker in {*planned.speed, *measured.speed})


def caps(free: Mapping[Worker, int], before_b: Sequence[int], after_b: Sequence[int], message: Sequence[int],
         placement: Sequence[int] = ()) -> tuple[dict[Worker, int], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Memory caps and weights in whole units from bytes, rounded so that no plan exceeds the memory.

    ``free``: bytes per worker left for activations, after all memory that does not grow with them. ``before_b`` and
    ``after_b``: bytes one micro-batch holds per chunk before and after its B; ``message``: bytes of a posted receive;
    ``placement``: the stage of each chunk, (): each stage has one. The unit is the largest of the first two divided by
    eight. Returns cap, before_b, after_b and message as Problem takes them. Raises PlanError where not even one
    micro-batch fits.
    """
    unit = max(1, -(-max([*before_b, *after_b]) // _UNITS))
    before = tuple(-(-size // unit) for size in before_b)
    after = tuple(-(-size // unit) for size in after_b)
    cap = {worker: size // unit for worker, size in free.items()}
    for worker, room in cap.items():
        chunks = [chunk for chunk, stage in enumerate(placement or range(len(before))) if stage == worker.stage]
        if room < sum(max(before[chunk], after[chunk]) for chunk in chunks):  # it is in all of them at once
            raise PlanError(f"worker {worker} has {free[worker]} bytes left for activations, one micro-batch needs"
                            f" {sum(max(before_b[chunk], after_b[chunk]) for chunk in chunks)}: lower the"
                            " micro-batch size")
    return cap, before, after, tuple(-(-size // unit) for size in message)
