"""Weight gradients of the first stage move up to their B where that costs nothing."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings

from megatron_recycle.plan import Costs, Grid, Problem, Worker, replay, violations
from megatron_recycle.planner import quick
from megatron_recycle.planner.adjoin import adjoined
from megatron_recycle.planner.greedy import Rules
from megatron_recycle.planner.instance import build, plan_of
from megatron_recycle.planner.portfolio import Template, run
from tests.planner.problems import problems


def apart(plan):
    """B's of the first stage that something else than their W follows, by worker."""
    return {worker: [str(b) for b, after in pairwise(actions) if b.kind == "B" and after != b._replace(kind="W")]
            for worker, actions in plan.workers.items() if plan.problem.stage(worker) == 0}


@settings(max_examples=150, deadline=None)
@given(problems())
def test_nothing_gets_worse(problem):
    instance = build(problem)
    before = run(instance, Template(Rules()))
    after = adjoined(instance, before)
    old, new = (plan_of(instance, schedule, 0, "greedy") for schedule in (before, after))
    assert new.period <= old.period and new.makespan <= old.makespan
    assert not [text for text in violations(new) if not text.startswith("bound")]
    held, more = replay(new).peak, replay(old).peak
    assert all(held[worker] <= more[worker] for worker in held)
    for worker in new.workers:
        if problem.stage(worker):
            assert new.workers[worker] == old.workers[worker]
        elif problem.split_backward and new.workers != old.workers:
            assert not apart(new)[worker]


def test_without_failures_all_of_them_do():
    """Where a worker may hold as many micro-batches as it has."""
    for stages, microbatches in ((2, 4), (4, 6), (4, 8), (8, 12)):
        grid = Grid(stages, (microbatches,) * 2)
        plan = quick(Problem(grid, Costs.uniform(stages, 20, 22, 18), cap=dict.fromkeys(grid.workers(), microbatches)))
        assert apart(plan) == {Worker(0, 0): [], Worker(1, 0): []}, (stages, microbatches)


def test_a_worker_that_the_others_wait_for_keeps_its_w_for_later():
    """Its peer has died: B in good time lets the stages behind it go on."""
    grid = Grid(2, (4, 4))
    plan = quick(Problem(grid, Costs.uniform(2, 1, 1, 1), (Worker(1, 0),), cap=dict.fromkeys(grid.workers(), 3)))
    assert plan.period == plan.lower_bound and any(apart(plan).values())
