"""The time between checkpoints: from their measured cost here, and the rate of the job's failures (`mtbf`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_recycle.checkpoint_period import young_daly

_ANOTHER = 1.5
"""Factor of a change after which the period is logged again."""


class CheckpointClock:
    """One worker's knowledge of its job's checkpoints.

    Args:
        mtbf: mean seconds between two failures that end a life of the job; None: not known, and nothing is due.
        now: the time in seconds.
    """

    def __init__(self, mtbf: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._mtbf = mtbf
        self._now = now
        self._last: tuple[float, int] | None = None
        self._logged = 0.0
        self.period: float | None = None
        """Seconds of training between two checkpoints that lose least time; None: none has been written yet."""

    @property
    def due(self) -> bool:
        """Whether to write the next checkpoint now; the first one at once, since only that shows the cost."""
        if self._mtbf is None:
            return False
        return self.period is None or self._last is None or self._now() - self._last[0] >= self.period

    def wrote(self, began: float, iteration: int) -> str | None:
        """A checkpoint of ``iteration`` has been written, from the moment ``began`` until now. Returns a text for the
        log, if there is news."""
        if self._mtbf is None:
            return None
        now, before = self._now(), self._last
        cost, self._last = max(now - began, 1e-6), (now, iteration)
        self.period = young_daly(cost, self._mtbf)
        if before is None or iteration <= before[1]:
            return None  # the time of an iteration is not known
        ratio = self.period / self._logged if self._logged else _ANOTHER
        if max(ratio, 1 / ratio) < _ANOTHER:
            return None
        self._logged, passed = self.period, began - before[0]
        number = max(1, round(self.period * (iteration - before[1]) / max(passed, 1e-6)))
        return (f"a checkpoint takes {cost:.2f} s; with a failure every {self._mtbf:.0f} s (mtbf) least time is lost "
                f"with one every {self.period:.1f} s (Young, Daly), which is {number} iterations; the last two were "
                f"{passed:.1f} s and {iteration - before[1]} iterations apart")
