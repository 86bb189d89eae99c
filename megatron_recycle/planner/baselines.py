"""Ablation of the paper as plans: 1F1B, adaptive, decoupled, staggered, and leaving the hit pipelines out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron_recycle.planner.alignment import Alignment, aligned, dropped

from ..plan import Plan, Problem, lower_bound, overfull
from .adjoin import adjoined
from .api import improve, quick
from .greedy import Rules
from .instance import Instance, Schedule, build, plan_of
from .portfolio import Template, goal, one_by_one, run, templates

TECHNIQUES = ("none", "adaptive", "decoupled", "staggered", "drop")


def shaped(problem: Problem, technique: str, objective: str | None = None) -> Problem:
    """A technique's form of the problem: backward split or not, its objective, and for ``none`` no failed worker."""
    default = "period" if technique in ("staggered", "drop") else "makespan"
    split = technique in ("decoupled", "staggered", "drop")
    failed = () if technique == "none" else problem.failed
    return replace(problem, failed=failed, split_backward=split, objective=objective or default)


def one_f_one_b(problem: Problem) -> Plan:
    """1F1B without failures: each worker runs at most ``stages - stage`` micro-batches at a time, backward first."""
    stages = problem.grid.stages
    cap = {}
    for worker in problem.grid.workers():
        usual = (stages - worker.stage) * problem.weight(worker.stage)
        cap[worker] = min(problem.cap.get(worker, usual), usual)
    tight = build(replace(problem, cap=cap))
    instance = replace(tight, problem=problem)
    return _within_caps(instance, aligned(instance), run(tight, Template(Rules())), "1f1b")


def drop(problem: Problem) -> Plan:
    """Baseline that leaves every hit pipeline out and deals its micro-batches to the others.

    Raises PlanError if no pipeline is whole.
    """
    instance = build(problem)
    alignment = dropped(instance)
    # The baseline is scheduled as well as our own plans are.
    best = min((run(instance, template, alignment) for template in templates(problem)[:8]), key=partial(goal, problem))
    return _within_caps(instance, alignment, adjoined(instance, best), "drop")


def _within_caps(instance: Instance, alignment: Alignment, schedule: Schedule, source: str) -> Plan:
    """The schedule as a plan; micro-batches one by one if its early messages exceed a cap, as they may where a slow
    worker's micro-batches are guests elsewhere."""
    bound = lower_bound(instance.problem)
    plan = plan_of(instance, schedule, bound, source)
    return plan_of(instance, one_by_one(instance, alignment), bound, source) if overfull(plan) else plan


def planned(problem: Problem, technique: str, budget_s: float, seed: int,
            first: Callable[[Plan], None] = lambda plan: None) -> Plan:
    """The plan of a technique; ``first`` is called with the quick plan. Raises PlanError."""
    if technique == "none":
        return one_f_one_b(problem)
    if technique == "drop":
        return drop(problem)
    plan = quick(problem, seed)
    first(plan)
    return improve(problem, plan, budget_s, seed) or plan if budget_s > 0 else plan
