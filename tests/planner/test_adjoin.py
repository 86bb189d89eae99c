"""Weight gradients of the first stage move up to their B where that costs nothing, and may be one with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given, settings

from megatron_recycle.plan import Action, Costs, Grid, Problem, Worker, peak, violations
from megatron_recycle.planner import plan_for, quick
from megatron_recycle.planner.adjoin import adjoined
from megatron_recycle.planner.baselines import drop, one_f_one_b
from megatron_recycle.planner.greedy import Rules
from megatron_recycle.planner.instance import build, orders_of, plan_of, schedule_of
from megatron_recycle.planner.merge_bw import merged
from megatron_recycle.planner.portfolio import Template, run
from tests.planner.problems import problems
from tests.seeds import examples


def apart(plan):
    """B's of the first stage that something else than their W follows, by worker."""
    return {worker: [str(b) for b, after in pairwise(actions) if b.kind == "B" and after != b._replace(kind="W")]
            for worker, actions in plan.workers.items() if worker.stage == 0}


def faults(plan):
    """What is wrong with a plan, worker by worker; a bound is none of its orders."""
    return {text.split(" holds ")[0] for text in violations(plan) if not text.startswith("bound")}


GRID = Grid(4, (0, 5))
SENT_EARLY = Problem(
    GRID, Costs((0, 0, 0, 1), (0,) * 4, (0, 0, 1, 0), hop=0, step=(0,) * 4, speed={Worker(0, 2): 1.5}),
    failed=(Worker(0, 3),), cap={worker: 4 if worker == Worker(1, 1) else 2 for worker in GRID.workers()},
    before_b=(1, 2, 1, 1), after_b=(0,) * 4, message=(0, 0, 0, 2), split_backward=False)
"""A single greedy schedule of it has messages sent early that the last stage has no memory for."""


@settings(max_examples=examples(150), deadline=None)
@given(problems())
@example(SENT_EARLY)
@example(replace(SENT_EARLY, split_backward=True))
def test_nothing_gets_worse(problem):
    instance = build(problem)
    before = run(instance, Template(Rules()))
    after = adjoined(instance, before)
    old, new = (plan_of(instance, schedule, 0, "greedy") for schedule in (before, after))
    assert new.period <= old.period and new.makespan <= old.makespan
    # One greedy schedule keeps no memory for messages that are sent early; the planner's calls see to that.
    assert faults(new) <= faults(old) and all(text.startswith("memory") for text in faults(old))
    assert all(peak(new, worker) <= peak(old, worker) for worker in new.workers)
    for worker in new.workers:
        if worker.stage:
            assert new.workers[worker] == old.workers[worker]
        elif problem.split_backward and new.workers != old.workers:
            assert not apart(new)[worker]


@pytest.mark.parametrize("call", [quick, partial(plan_for, work=500), drop, one_f_one_b])
def test_no_call_hands_out_what_messages_sent_early_have_no_memory_for(call):
    slow = Problem(
        Grid(3, (6, 2)), Costs((27, 29, 1), (6, 5, 14), (19, 0, 0), hop=5, step=(25, 26, 24),
                               speed={Worker(0, 2): 3.25, Worker(0, 1): 1.1}),
        cap={Worker(0, 0): 2, Worker(0, 1): 8, Worker(0, 2): 2, Worker(1, 0): 3, Worker(1, 1): 4, Worker(1, 2): 2},
        before_b=(1, 2, 2), after_b=(0, 1, 1), message=(1, 0, 1), block=3, split_backward=False)
    for problem in (SENT_EARLY, slow):
        assert violations(call(problem)) == []


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


@settings(max_examples=examples(60), deadline=None)
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
