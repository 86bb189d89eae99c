"""Noise of measured durations, and changes that are more than noise. docs/slowness.md explains both.

Durations scatter in proportion to their length, so the statistics use logarithms. The spread is a robust standard
deviation of one measurement, pooled over workers: a minority that has really changed does not widen it. A change counts
if it exceeds a notable share and several spreads: more spreads in three measurements, fewer in twelve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

RECENT, LONG = 3, 12
"""Lengths of the windows (measurements, one an iteration) in which a change is sought: the short window finds large
changes soon, the long one finds small changes."""

_SPREADS = {RECENT: 4.0, LONG: 3.0}
_NORMAL = 1.4826  # standard deviation of a normal distribution, in its median absolute deviations
_MOST, _MOST_IS = 0.8, 1.2816  # this share of a normal distribution's deviations is below so many standard deviations


def spread(series: Iterable[Sequence[float]]) -> float:
    """Relative spread of one measurement; infinite where no series has two.

    Args:
        series: each the measurements of one quantity, in order.
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
    # Three estimates, and the largest counts. Deviations from the median alone show slow changes, but are too small for
    # few measurements, one of which is the median. Steps between neighbours are right for few. Large steps show a busy
    # machine, where most steps are small and many are huge. A lasting change is a single step and widens none.
    steps.sort()
    late = steps[int(_MOST * (len(steps) - 1))]
    return max(_NORMAL * median(apart), _NORMAL * median(steps) / math.sqrt(2), late / _MOST_IS / math.sqrt(2))


def notable(value: float, usual: float, share: float, noise: float, window: int = RECENT) -> bool:
    """Whether ``value`` differs from ``usual`` by more than ``share`` and more than chance.

    Args:
        noise: `spread` of one measurement.
        window: the number of measurements whose median ``value`` is, RECENT or LONG.
    """
    if value <= 0 or usual <= 0:
        return value != usual
    return abs(math.log(value / usual)) > max(math.log1p(share), _SPREADS[window] * noise)
