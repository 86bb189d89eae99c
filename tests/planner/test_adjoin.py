"""Weight gradients of the first stage move up to their B where that costs nothing, and may be one with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings

from megatron_recycle.plan import Action, Costs, Grid, Problem, Worker, replay, violations
from megatron_recycle.planner import plan_for, quick
from megatron_recycle.planner.adjoin import adjoined
from megatron_recycle.planner.greedy import Rules
from megatron_recycle.planner.instance import build, orders_of, plan_of, schedule_of
from megatron_recycle.planner.merge import merged
from megatron_recycle.planner.portfolio import Template, run
from tests.planner.problems import problems


def apart(plan):
    """B's of the first stage that something else than their W follows, by worker."""
    return {worker: [str(b) for b, after in pairwise(actions) if b.kind == "B" and after != b._replace(kind="W")]
            for worker, actions in plan.workers.items() if worker.stage == 0}


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
        if worker.stage:
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


@pytest.mark.parametrize(("listed", "merged_"), [
    ("F0.0 F0.1 F0.2 F1.0 B0.0 W0.0 B0.1 F1.1 W0.1 B0.2 W0.2 B1.0 B1.1 W1.1 W1.0",
     "F0.0 F0.1 F0.2 F1.0 B0.0 W0.0 B0.1 F1.1 W0.1 FB0.2 B1.0 FB1.1 W1.0"),
    ("B0.1 F1.1 W0.1 B0.2 W0.2 B1.0 B1.1 W1.1 W1.0", "B0.1 F1.1 W0.1 FB0.2 B1.0 FB1.1 W1.0"),
    ("", ""),
])
def test_a_w_that_follows_its_b_is_one_with_it_but_for_the_first(listed, merged_):
    problem = Problem(Grid(2, (3, 2)), Costs.uniform(2, 1, 1, 1), full_backward=(0, 1))
    order = [Action.parse(name) for name in listed.split()]
    assert " ".join(map(str, merged(problem, Worker(0, 0), order))) == merged_
    assert merged(problem, Worker(0, 1), order) == tuple(order), "others wait for its B"
    assert merged(replace(problem, full_backward=()), Worker(0, 0), order) == tuple(order)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_full_backwards_change_no_figure_and_are_read_back(problem):
    """What the search is given is what the plan says, B by B and W by W."""
    split, full = (quick(replace(problem, full_backward=stages)) for stages in ((), (0,)))
    assert (full.period, full.makespan) == (split.period, split.makespan)
    assert violations(full) == []
    instance = build(full.problem)
    assert orders_of(instance, *schedule_of(instance, full)) == full.workers
    later = [action for worker, actions in full.workers.items() if worker.stage for action in actions]
    assert not any(action.kind == "FB" for action in later)


def test_most_backwards_of_the_first_stage_are_full_without_failures():
    grid = Grid(4, (6, 6))
    for plan in (quick, partial(plan_for, work=1000)):
        found = plan(Problem(grid, Costs.uniform(4, 20, 22, 18), cap=dict.fromkeys(grid.workers(), 6),
                             full_backward=(0, 1, 2, 3)))
        for d in range(2):
            listed = [str(action) for action in found.workers[Worker(d, 0)] if action.kind == "FB"]
            assert listed == [f"FB{d}.{m}" for m in range(1, 6)]
