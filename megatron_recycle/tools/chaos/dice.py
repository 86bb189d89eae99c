"""Random acts, determined by the seed and the job's progress."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from megatron_recycle.membership.names import Process, workers_of
from megatron_recycle.tools.chaos.orders import Order
from megatron_recycle.tools.chaos.target_job import TargetJob

KINDS = ("kill", "freeze", "stall", "coordinator")
_TIMES = {"forward": 4, "backward": 4, "weight": 4}
_PHASES = ("forward", "backward", "weight", "reduce", "reduced", "step", "stepped")


class Dice:
    """Draws orders, `rate` a minute on average.

    A stage keeps one process that was not hit: without it the job could only end. A worker that has come back is
    another process, and may be hit again. Half of the freezes are short, and must not get a worker declared out.

    Args:
        kinds: of KINDS.
        observed: whether workers can be held at precise moments.
        last: whether the last worker of a stage may be hit too.
    """

    def __init__(self, seed: int, rate: float, kinds: Sequence[str], observed: bool, last: bool = False) -> None:
        self._draw = random.Random(seed)
        self._rate = rate
        self._kinds = tuple(kinds)
        self._observed = observed
        self._last = last
        self._hit: set[tuple[str, int]] = set()
        """(worker, pid)"""

    def pause(self) -> float:
        """Seconds until the next act."""
        return self._draw.expovariate(self._rate / 60.0)

    def order(self, job: TargetJob) -> Order | None:
        """The next act; None if every act would end the job."""
        kinds = self._kinds if self.victims(job) else tuple(set(self._kinds) & {"coordinator"})
        if not kinds:
            return None
        kind = self._draw.choice(sorted(kinds))
        if kind == "coordinator":
            return Order(kind)
        worker = self._draw.choice(self.victims(job))
        brief = kind == "freeze" and self._draw.random() < 0.5
        if not brief:
            self._hit.add((worker, job.workers[worker].pid))
        seconds = round(self._draw.uniform(0.1, 1.0), 2) if brief else None
        phase, nth = self._moment(worker)
        return Order(kind, (worker,), phase=phase, nth=nth, seconds=seconds)

    def victims(self, job: TargetJob) -> list[str]:
        """Workers that may be hit, each by its processes."""
        hit = workers_of(worker for worker, process in job.workers.items()
                         if worker in job.out or (worker, process.pid) in self._hit)  # in one part: as a whole
        live = set(workers_of(job.workers)).difference(hit)
        stages = Counter(worker.stage for worker in live)
        may = {worker for worker in live if self._last or stages[worker.stage] > 1}
        return [name for name in sorted(job.workers) if Process.parse(name).worker in may]

    def spared(self, order: Order) -> None:
        """Undo the hit: the moment of the order never came."""
        self._hit = {(worker, pid) for worker, pid in self._hit if worker not in order.workers}

    def _moment(self, worker: str) -> tuple[str | None, int]:
        if not self._observed:
            return None, 0
        phase = self._draw.choice(_PHASES)
        times = _TIMES.get(phase, 1)
        if phase == "weight" and Process.parse(worker).worker.stage == 0:
            times = 1  # the backwards that follow may be full ones
        return phase, self._draw.randrange(times)
