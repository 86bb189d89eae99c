"""Exact makespan and period of a trace, fast: one pass times every action as early as its order allows."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.cycles import cycle_mean
from .instance import Instance


def times(instance: Instance, route: list[int], trace: list[int], release: Sequence[int],
          scale: int = 1) -> tuple[list[int], list[int]]:
    """End of every action (by code) and of every stage's work, with stage ``s`` free from ``release[s]``
    on."""
    count, last = len(instance.jobs), instance.stages - 1
    nodes = count * instance.stages
    two, edge = 2 * nodes, last * count
    hop = instance.problem.costs.hop * scale
    forward = [x * scale for x in instance.forward]
    backward = [x * scale for x in instance.backward]
    weight = [x * scale for x in instance.weight]
    end = [0] * (3 * nodes)
    free = [release[s] for s in instance.stage]
    for code in trace:
        if code < nodes:
            w = route[code]
            t = free[w]
            if code >= count:
                u = end[code - count] + hop
                if u > t:
                    t = u
            t += forward[w]
        elif code < two:
            node = code - nodes
            w = route[node]
            t = free[w]
            u = end[code + count] + hop if node < edge else end[node]
            if u > t:
                t = u
            t += backward[w]
        else:
            w = route[code - two]
            t = free[w] + weight[w]  # its B came earlier on the same worker
        end[code] = t
        free[w] = t
    done = list(release)
    for w, s in enumerate(instance.stage):
        if free[w] > done[s]:
            done[s] = free[w]
    return end, done


def figures(instance: Instance, route: list[int], trace: list[int]) -> tuple[float, int]:
    """Period and makespan of a trace."""
    step = instance.problem.costs.step
    group, size = instance.group, instance.groups
    longest = [0] * size
    for s, g in enumerate(group):
        longest[g] = max(longest[g], step[s])
    makespan = 0

    def once(release: Sequence[int], scale: int) -> tuple[list[int], list[int]]:
        nonlocal makespan
        coded = [release[g] * size + g for g in group]
        _, done = times(instance, route, trace, coded, scale * size)
        ready = [0] * size
        for s, g in enumerate(group):
            ready[g] = max(ready[g], done[s])
        if not any(release) and scale == 1:
            makespan = max(ready[g] // size + longest[g] for g in range(size))
        return [ready[g] // size + longest[g] * scale for g in range(size)], [r % size for r in ready]

    once([0] * size, 1)
    mean = cycle_mean(size, once)
    return (int(mean) if mean.denominator == 1 else float(mean)), makespan


