"""Exact makespan and period of a trace, fast: one pass times every action as early as its order allows."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.clock import Clock
from .crossing_flow import Crossings
from .instance import Instance, Schedule, spanned


def clock(instance: Instance, route: Sequence[int], trace: Sequence[int]) -> Clock:
    """The clock of a trace; its actions are the codes of the trace."""
    nodes, count = len(route), len(instance.jobs)
    lag, none = instance.lags(route), [0] * nodes
    needs = [*[-1] * count, *range(nodes - count), *range(nodes + count, 2 * nodes), *range(nodes - count, nodes),
             *range(nodes, 2 * nodes)]
    forward, backward, weight = instance.lengths(route)
    gates = instance.spans.gates if instance.spans else {}
    helpers: dict[int, set[int]] = {}
    for node, groups in gates.items():
        for g in groups:
            helpers.setdefault(g, set()).add(route[node])
    return Clock(instance.problem, instance.workers, trace, [*route, *route, *route], needs,
                 [*lag, *lag[count:], *none[:count], *none], [*forward, *backward, *weight], gates, helpers)


def objective(instance: Instance, route: Sequence[int], trace: Sequence[int]) -> float:
    """The problem's objective for a trace: period or makespan."""
    of = clock(instance, route, trace)
    return of.makespan() if instance.problem.objective == "makespan" else of.period()


def timed(instance: Instance, route: list[int], trace: list[int], crossings: Crossings = ()) -> Schedule:
    """The schedule of a trace, with its figures."""
    of = clock(spanned(instance, route, crossings), route, trace)
    return Schedule(route, trace, of.period(), of.makespan(), crossings)
