"""Entry points for the job: ``quick`` for a legal plan at once, ``improve`` for a better one within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_recycle.planner import lent_schedules, search_process
from megatron_recycle.planner.alignment import aligned
from megatron_recycle.planner.routing import route
from megatron_recycle.planner.timing import timed

from ..plan import Plan, PlanError, Problem, Worker, figured, lower_bound, overfull, surplus, violations
from .adjoin import adjoined
from .cache import Cache
from .canonical import canonical
from .greedy import guests
from .greedy import schedule as listed
from .instance import Instance, Schedule, build, crossings_of, plan_of, schedule_of
from .portfolio import TEMPLATES, Found, Template, filled, goal, one_by_one, search, templates

#: plans of at most so many actions are scheduled by two templates, and the better one is taken
TWICE = 30_000
#: work limit of a first plan's search for lent layers, in scheduled actions
LENDING = 50_000
#: most actions for which a first plan lends layers: beyond, levelling takes seconds, and only background searches lend
LENDING_MOST = 100_000


def quick(problem: Problem, seed: int = 0) -> Plan:
    """A legal plan at once (``source`` "greedy"); ``stats.first_seconds`` is the time to its orders.

    Planned in the membership's canonical form, so that memberships that are the same up to names get the same plan, and
    a search (`plan_for`) that begins with it is never worse. Deterministic; the seed is only recorded. Raises
    PlanError, naming the stage, if a stage has no worker left.
    """
    form = canonical(problem)
    return form.back(_quick(form.problem, seed), problem)


def _quick(problem: Problem, seed: int) -> Plan:
    """The quick plan of a canonical form."""
    begin = time.perf_counter()
    plan = _listed(problem, {}, begin, seed)
    if not (any(problem.message) and overfull(plan)):
        return plan
    found = [*_sparing(plan, begin, seed, lend=True)]
    if lent_schedules.helps(problem):  # plans with lending must be no worse than without, here too
        found += _sparing(_listed(problem, {}, begin, seed, lend=False), begin, seed, lend=False)
    return min(found, key=lambda plan: plan.objective_value) if found else _one_by_one(problem, begin, seed)


def _sparing(plan: Plan, begin: float, seed: int, lend: bool) -> Iterator[Plan]:
    """Plans within the caps, to replace ``plan``, which sends some messages before they are needed: memory is reserved
    for these, or nothing is done ahead at all."""
    problem = plan.problem
    if (cautious := _cautious(problem, begin, seed, lend)) is not None:
        yield cautious
    kept: dict[Worker, int] = {}
    while overfull(plan):
        more = {worker: max(count, kept.get(worker, 0)) for worker, count in {**kept, **surplus(plan)}.items()}
        if more == kept or not _roomy(problem, more):
            return
        kept = more
        plan = _listed(problem, kept, begin, seed, lend)
    yield plan


def _roomy(problem: Problem, kept: Mapping[Worker, int]) -> bool:
    """Whether every worker has memory for a micro-batch besides the memory ``kept`` for early messages."""
    return all(problem.cap[worker] - count * problem.message_weight(worker.stage) >= problem.weight(worker.stage)
               for worker, count in kept.items() if worker in problem.cap)


def _cautious(problem: Problem, begin: float, seed: int, lend: bool) -> Plan | None:
    """Plan in which all workers reserve memory for the same number of early messages, as few as suffice: the larger the
    reserve, the fewer messages are sent early. None where memory is too short for that."""
    count, live = 1, [worker for worker in problem.live_workers() if worker in problem.cap]
    while _roomy(problem, kept := dict.fromkeys(live, count)):
        plan = _listed(problem, kept, begin, seed, lend)
        if not overfull(plan):
            return plan
        count += max(1, count // 2)
    return None


def _one_by_one(problem: Problem, begin: float, seed: int) -> Plan:
    instance = build(problem)
    found = one_by_one(instance)
    plan = _quick_plan(instance, found, time.perf_counter() - begin, seed)
    if problem.placement and overfull(plan):
        raise PlanError("caps: micro-batches that run one after the other do not fit, with the messages that chunks of"
                        " one stage read in another order than they are sent; raise the cap, or use fewer chunks")
    return plan


def _listed(problem: Problem, kept: Mapping[Worker, int], begin: float, seed: int, lend: bool = True) -> Plan:
    """The best of a few greedy schedules, with memory ``kept`` for messages that are sent early; with ``lend`` also of
    some that lend layers, where these may be lent."""
    instance = build(problem, kept)
    alignment = aligned(instance)
    table = route(instance, alignment)
    found: list[Schedule] = []
    for template in _first(instance, bool(guests(instance, alignment, table))):
        trace = listed(instance, table, filled(instance, alignment, table, template))
        if not found:
            first = time.perf_counter() - begin
        found.append(timed(instance, table, trace))
    if lend and lent_schedules.helps(problem) and instance.actions <= LENDING_MOST:
        found += filter(None, [lent_schedules.first(instance, LENDING).best])
    best = min(found, key=partial(goal, problem))
    return _quick_plan(instance, adjoined(instance, best), first, seed)


def _first(instance: Instance, rerouted: bool) -> tuple[Template, ...]:
    """The templates that a first plan tries; ``rerouted``: whether some micro-batch is a guest."""
    known = templates(instance.problem)
    if instance.actions > TWICE:
        return known[:1]
    if instance.problem.placement:
        return known[:len(known) - len(TEMPLATES) if 4 * instance.actions <= TWICE else 2]
    return known[:2 if rerouted else 1]


def _quick_plan(instance: Instance, schedule: Schedule, first: float, seed: int) -> Plan:
    return plan_of(instance, schedule, lower_bound(instance.problem), "greedy",
                   {"first_seconds": round(first, 6), "seed": seed})


def improve(problem: Problem, incumbent: Plan, budget_s: float, seed: int = 0,
            cancelled: Callable[[], bool] = lambda: False) -> Plan | None:
    """A better legal plan, found within ``budget_s`` seconds by a niced process that is then killed; else None.

    Portfolio first, then CP-SAT where the plan is small and OR-Tools is there. The search is limited by work that
    follows from the budget, so the same call gives the same plan; ``stats.cut`` is true where the clock ended it.
    ``cancelled`` is polled, so that a newer membership can end the search early.
    """
    begin = time.monotonic()
    if incumbent.objective_value <= lower_bound(problem):
        return None
    instance = build(problem)
    table, trace = schedule_of(instance, incumbent)
    request = {"problem": problem.to_json(), "route": table, "trace": trace, "budget": budget_s, "seed": seed,
               "crossings": crossings_of(instance, incumbent)}
    found, stats = search_process.run(request, instance.actions, budget_s, cancelled)
    schedule = None if found is None else _received(instance, found)
    if found is None or schedule is None:
        return None
    stats = {**incumbent.stats, **stats, "best_seconds": round(time.monotonic() - begin, 3), "seed": seed}
    plan = plan_of(instance, adjoined(instance, schedule), incumbent.lower_bound, str(found["source"]), stats)
    return plan if plan.objective_value < incumbent.objective_value and not violations(plan) else None


def recosted(problem: Problem, plan: Plan) -> Plan:
    """The same orders under ``problem``'s costs and memory, which have changed since the plan was made. Does not check
    the new caps."""
    measured = ("costs", "cap", "before_b", "after_b", "message", "layer_held", "layer_parameters")
    if all(getattr(problem, name) == getattr(plan.problem, name) for name in measured):
        return plan
    return figured(replace(plan, problem=problem, done={}, stats={}))


def _received(instance: Instance, found: dict[str, Any]) -> Schedule | None:
    """A schedule received from another process; None if its numbers do not even name actions and workers."""
    table, trace, crossings = found.get("route"), found.get("trace"), found.get("crossings") or ()
    nodes, boundaries = instance.chunks * len(instance.jobs), instance.problem.chunks - 1
    if (not isinstance(table, list) or len(table) != nodes or sorted(trace or ()) != list(range(instance.actions))
            or not all(isinstance(w, int) and 0 <= w < len(instance.workers) for w in table)
            or (crossings and (not instance.problem.lends or len(crossings) != boundaries))
            or not all(isinstance(row, list) and len(row) == len(instance.jobs)
                       and all(isinstance(by, int) for by in row) for row in crossings)):
        return None
    return timed(instance, table, list(trace or ()), tuple(map(tuple, crossings)))


def plan_for(problem: Problem, cache: Cache | None = None, work: int = 100_000, budget_s: float = 0.0,
             seed: int = 0, cancelled: Callable[[], bool] = lambda: False) -> Plan:
    """The plan of a membership's canonical form: from the cache, or searched and then cached.

    ``work`` actions are scheduled per cap level in this process; with a budget, improve follows. All memberships that
    are the same up to names get the same plan under their own names, cached or not. It is never worse than quick's,
    unless the cache was given a worse one.
    """
    known = cache.get(problem) if cache is not None else None
    if known is not None:
        return replace(known, stats={**known.stats, "cached": True})
    form = canonical(problem)
    plan = _quick(form.problem, seed)
    if plan.objective_value > plan.lower_bound and work:
        instance = build(form.problem)
        found = search(instance, work, seed, cancelled)
        if lent_schedules.helps(form.problem):
            lending = lent_schedules.search(instance, work, seed, cancelled)
            best = min((one.best for one in (found, lending) if one.best is not None),
                       key=partial(goal, form.problem), default=None)
            found = Found(best, found.trials + lending.trials, found.cut or lending.cut)
        stats = {**plan.stats, "trials": found.trials, "cut": found.cut}
        better = found.best is not None and goal(form.problem, found.best) < plan.objective_value
        searched = plan if found.best is None or not better else plan_of(
            instance, adjoined(instance, found.best), plan.lower_bound, "portfolio", stats)
        plan = replace(plan, stats=stats) if overfull(searched) else replace(searched, stats=stats)
    if budget_s and plan.objective_value > plan.lower_bound:
        plan = improve(form.problem, plan, budget_s, seed, cancelled) or plan
    if cache is not None:
        cache.put(form.problem, plan)
    return form.back(plan, problem)
