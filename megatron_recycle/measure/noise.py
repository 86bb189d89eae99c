"""What of a change in measured durations is more than noise.

Durations scatter in proportion to their length, so all is done with logarithms. The spread is a robust standard
deviation of one measurement, pooled over workers: a minority that has really changed does not widen it. What differs
must do so by a notable share, and by several spreads: many where three measurements say so, fewer where twelve do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

RECENT, LONG = 3, 12
"""Measurements (one an iteration) that a change is looked for in: found soon, or in more noise."""

_SPREADS = {RECENT: 4.0, LONG: 3.0}
_NORMAL = 1.4826  # a normal distribution's standard deviation in its median absolute deviations
_MOST, _MOST_IS = 0.8, 1.2816  # so many of its deviations are below so many standard deviations


def spread(series: Iterable[Sequence[float]]) -> float:
    """Relative spread of one measurement; infinite where no series has two.

    Args:
        series: measurements of one thing each, in order.
    """
    apart, steps = [], []
    for values in series:
        logs = [math.log(value) for value in values if value > 0]
        if len(logs) > 1:
            middle = median(logs)
            apart += [abs(value - middle) for value in logs]
            steps += [abs(after - before) for before, after in pairwise(logs)]
    if not steps:
        return math.inf
    # Slow changes show in the first only; of few measurements the middle one is itself, and the others are right. On a
    # busy machine most steps are small and many are huge: the last tells; a change for good is but one step.
    steps.sort()
    late = steps[int(_MOST * (len(steps) - 1))]
    return max(_NORMAL * median(apart), _NORMAL * median(steps) / math.sqrt(2), late / _MOST_IS / math.sqrt(2))


def notable(value: float, usual: float, share: float, noise: float, window: int = RECENT) -> bool:
    """Whether ``value`` differs from ``usual`` by more than ``share`` and more than chance.

    Args:
        noise: `spread` of a measurement.
        window: of how many measurements ``value`` is the median.
    """
    if value <= 0 or usual <= 0:
        return value != usual
    return abs(math.log(value / usual)) > max(math.log1p(share), _SPREADS[window] * noise)
