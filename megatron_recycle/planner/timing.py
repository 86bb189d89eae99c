"""Exact makespan and period of a trace, fast: one pass times every action as early as its order allows."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.cycles import cycle_mean
from .instance import Instance


def times(instance: Instance, route: list[int], trace: list[int], release: Sequence[int],
          scale: int = 1, cold: bool = False) -> tuple[list[int], list[int]]:
    """End of every action (by code) and of every stage's work, with stage ``s`` free from ``release[s]`` on.

    ``cold``: helpers have the parameters of lent layers from the beginning, not some time after a step."""
    count, nodes = len(instance.jobs), len(route)
    two, edge = 2 * nodes, nodes - count
    lag = instance.lags(route)
    forward, backward, weight = instance.lengths(route)
    if scale != 1:
        forward, backward, weight, lag = ([x * scale for x in each] for each in (forward, backward, weight, lag))
    gates, (given, summed) = instance.spans.gates if instance.spans else {}, instance.problem.costs.lent
    given = 0 if cold else given
    opens = {node: max(release[s] for s, g in enumerate(instance.group) if g in groups) + given * scale
             for node, groups in gates.items()}
    end = [0] * (3 * nodes)
    free = [release[s] for s in instance.stage]
    for code in trace:
        if code < nodes:
            w = route[code]
            t = free[w]
            if code >= count:
                u = end[code - count] + lag[code]
                if u > t:
                    t = u
            if code in opens and opens[code] > t:
                t = opens[code]
            t += forward[code]
        elif code < two:
            node = code - nodes
            w = route[node]
            t = free[w]
            u = end[code + count] + lag[node + count] if node < edge else end[node]
            if u > t:
                t = u
            t += backward[node]
        else:
            w = route[code - two]
            t = free[w] + weight[code - two]  # its B came earlier on the same worker
        end[code] = t
        free[w] = t
    done = list(release)
    for w, s in enumerate(instance.stage):
        if free[w] > done[s]:
            done[s] = free[w]
    for node, groups in gates.items():
        ready = free[route[node]] + summed * scale  # a helper's sums leave after all its actions
        for s, g in enumerate(instance.group):
            if g in groups and ready > done[s]:
                done[s] = ready
    return end, done


def stepping(instance: Instance, route: list[int], trace: list[int], begin: Sequence[int],
             scale: int = 1) -> list[int]:
    """When each group of stages begins its next step, if it began the one before at ``begin[g]``."""
    step, group = instance.problem.costs.step, instance.group
    _, done = times(instance, route, trace, [begin[g] + step[s] * scale for s, g in enumerate(group)], scale)
    ready = [0] * instance.groups
    for s, g in enumerate(group):
        ready[g] = max(ready[g], done[s])
    return ready


def period_of(instance: Instance, route: list[int], trace: list[int]) -> float:
    """Steady-state time of an iteration: the maximum cycle mean of the steps' begins."""
    size = instance.groups

    def once(begin: Sequence[int], scale: int) -> tuple[list[int], list[int]]:
        coded = stepping(instance, route, trace, [t * size + g for g, t in enumerate(begin)], scale * size)
        return [t // size for t in coded], [t % size for t in coded]

    mean = cycle_mean(size, once)
    return int(mean) if mean.denominator == 1 else float(mean)


def makespan_of(instance: Instance, route: list[int], trace: list[int]) -> int:
    """End of the last step from a cold start."""
    _, done = times(instance, route, trace, [0] * instance.stages, cold=True)
    step, group = instance.problem.costs.step, instance.group
    ready = [0] * instance.groups
    for s, g in enumerate(group):
        ready[g] = max(ready[g], done[s])
    return max(ready[g] + step[s] for s, g in enumerate(group))


def phases(instance: Instance, route: list[int], trace: list[int], period: int) -> list[int]:
    """From when on each stage is free in a strictly periodic run; ``period`` must not be below the true one."""
    begin = [0] * instance.groups
    while True:
        fresh = stepping(instance, route, trace, begin)
        later = [max(old, new - period) for old, new in zip(begin, fresh)]
        if later == begin:
            return [begin[g] + instance.problem.costs.step[s] for s, g in enumerate(instance.group)]
        begin = later


def figures(instance: Instance, route: list[int], trace: list[int]) -> tuple[float, int]:
    """Period and makespan of a trace."""
    return period_of(instance, route, trace), makespan_of(instance, route, trace)


