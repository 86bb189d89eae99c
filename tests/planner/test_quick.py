"""Any membership of any grid gets a legal plan at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from megatron_recycle.plan import Costs, Grid, PlanError, Problem, Worker, lower_bound, replay, violations
from megatron_recycle.planner import quick
from tests.planner.problems import problems
from tests.seeds import examples


@settings(max_examples=examples(150), deadline=None)
@given(problems())
def test_any_problem_gets_a_legal_plan(problem):
    plan = quick(problem)
    assert violations(plan) == []
    assert plan.lower_bound == lower_bound(problem) <= plan.objective_value
    assert replay(plan).period == plan.period
    assert quick(problem).digest == plan.digest


def test_stage_without_a_worker_is_named():
    grid = Grid(2, (2, 2))
    problem = Problem(grid, Costs.uniform(2, 1, 1, 1), (Worker(0, 1), Worker(1, 1)))
    with pytest.raises(PlanError, match="stage 1 has no live worker"):
        quick(problem)


def test_without_failures_every_worker_keeps_micro_batch_order():
    grid = Grid(4, (8, 8, 8))
    plan = quick(Problem(grid, Costs.uniform(4, 20, 22, 18, 1, 15), cap=dict.fromkeys(grid.workers(), 6)))
    for worker, actions in plan.workers.items():
        for kind in "FBW":
            mine = [a.microbatch for a in actions if a.kind == kind]
            assert mine == sorted(mine) and len(mine) == 8
            assert all(a.pipeline == worker.pipeline for a in actions if a.kind == kind)


def test_orders_that_would_block_each_other_fall_back_to_one_global_order():
    """Blocks of several pipelines on crossing routes, with room for one micro-batch each."""
    grid = Grid(4, (6, 6, 6, 6))
    for failed in (("0:1", "1:2"), ("0:1", "1:1", "2:2", "3:2"), ("0:0", "1:1", "2:2", "3:3")):
        for block in (1, 2):
            problem = Problem(grid, Costs.uniform(4, 3, 2, 1, 1, 0), tuple(map(Worker.parse, failed)),
                              cap=dict.fromkeys(grid.workers(), 1), block=block)
            assert violations(quick(problem)) == []
