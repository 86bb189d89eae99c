"""Steady-state period: the maximum cycle mean of a max-plus system that is given by its step function alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

Step = Callable[[Sequence[int], int], tuple[Sequence[int], Sequence[int]]]
"""``step(times, scale) -> (ends, origins)``: the end of each group's step, and the group whose release decided it.

Group ``g`` is released at ``times[g]``, and every duration is multiplied by ``scale``."""


def cycle_mean(groups: int, step: Step) -> Fraction:
    """Time per iteration of the system ``x(k+1) = A x(k)`` over max-plus, exactly.

    Potentials are raised until no release comes earlier than the current mean allows; a cycle in the graph of
    the deciding releases gives a larger mean. Each mean found is that of a real cycle, so the last one is the
    largest (the certificate is a feasible potential). See Baccelli et al., Synchronization and Linearity,
    chapter 3; the search is Bellman and Ford's with a graph of parents.
    """
    if groups == 1:
        ends, _ = step([0], 1)
        return Fraction(ends[0])
    ends, parent = step([0] * groups, 1)
    weight: list[Fraction] = [Fraction(end) for end in ends]
    parents = list(parent)
    mean = _best_cycle(parents, weight)
    assert mean is not None  # every group has a parent, so a cycle exists
    potential = [Fraction(end) - mean for end in ends]
    low = min(potential)
    potential = [max(Fraction(0), p - low) for p in potential]
    parents = [-1] * groups
    while True:
        scale = math.lcm(mean.denominator, *(p.denominator for p in potential))
        ends, origin = step([int(p * scale) for p in potential], scale)
        fresh = [Fraction(end, scale) - mean for end in ends]
        moved = [g for g in range(groups) if fresh[g] > potential[g]]
        if not moved:
            return mean
        before = list(potential)
        for g in moved:
            parents[g] = origin[g]
            weight[g] = fresh[g] + mean - before[origin[g]]
            potential[g] = fresh[g]
        found = _best_cycle(parents, weight)
        if found is not None and found > mean:
            mean = found
            parents = [-1] * groups


def _best_cycle(parents: Sequence[int], weight: Sequence[Fraction]) -> Fraction | None:
    """The largest mean of a cycle in the graph of parents (-1: none), or None if there is no cycle."""
    best: Fraction | None = None
    done: set[int] = set()
    for first in range(len(parents)):
        path: list[int] = []
        at = first
        while at >= 0 and at not in done:
            done.add(at)
            path.append(at)
            at = parents[at]
        if at in path:
            ring = path[path.index(at):]
            mean = sum((weight[g] for g in ring), Fraction(0)) / len(ring)
            if best is None or mean > best:
                best = mean
    return best
