"""Plans that need new partners have to pay for connecting them, where that costs something."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from megatron_recycle.control import planning as planning_module
from megatron_recycle.control.planning import Planning, partner_price
from megatron_recycle.membership.description import Job
from megatron_recycle.plan import Costs, Grid, Plan, Problem, Worker, pairs
from megatron_recycle.planner import ConnectionPrice, quick
from megatron_recycle.planner.baselines import drop
from megatron_recycle.runtime.comm.backend import BACKENDS

GRID = Grid(3, (6, 6, 6))
COSTS = Costs.uniform(3, 20_000, 22_000, 18_000)
WHOLE, LOST = Problem(GRID, COSTS), Problem(GRID, COSTS, (Worker(1, 1),))
TWO_LOST = Problem(GRID, COSTS, (Worker(1, 1), Worker(2, 2)))


def test_without_failures_a_worker_talks_to_its_own_pipeline_and_guests_bring_partners():
    assert pairs(quick(WHOLE)) == {(Worker(d, s), Worker(d, s + 1)) for d in range(3) for s in range(2)}
    assert pairs(quick(LOST)) > {pair for pair in pairs(quick(WHOLE)) if Worker(1, 1) not in pair}


def test_partners_of_one_worker_are_connected_one_after_the_other_and_those_of_others_beside_them():
    price, plan, before = ConnectionPrice(1000), quick(LOST), pairs(quick(WHOLE))
    new = pairs(plan) - before
    hosts = [(Worker(0, 1), Worker(1, 0)), (Worker(0, 1), Worker(1, 2)),
             (Worker(1, 0), Worker(2, 1)), (Worker(1, 2), Worker(2, 1))]
    assert sorted(new) == hosts
    assert price.of(plan, before) == 2000, "each of these workers has two of the four"
    assert price.of(plan, pairs(plan)) == 0 == ConnectionPrice().of(plan, frozenset())


def test_a_plan_that_keeps_its_partners_is_better_than_one_that_is_as_good():
    plan = quick(LOST)
    assert ConnectionPrice(1000).total(plan, pairs(plan)) < ConnectionPrice(1000).total(plan, frozenset())
    assert ConnectionPrice(0).total(plan, pairs(plan)) == ConnectionPrice(0).total(plan, frozenset())


def test_the_price_is_nothing_on_gloo_and_where_plans_durations_are_no_seconds():
    assert BACKENDS["gloo"].partner_cost == 0 < BACKENDS["nccl"].partner_cost
    nccl = Job(grid=Grid(1, (1,)), partner_cost=0.15, horizon=7.0)
    assert partner_price(nccl, measured := object()) == ConnectionPrice(150_000, 7.0)  # type: ignore[arg-type]
    assert partner_price(replace(nccl, partner_cost=0.0), measured).first == 0  # type: ignore[arg-type]
    assert partner_price(nccl, None).first == 0 == partner_price(replace(nccl, costs={"hop": 1}), None).first


@pytest.mark.parametrize(("seconds", "horizon", "changes"), [
    (0.0, 1.0, True), (0.0, 0.0, True), (0.15, 100.0, True), (0.3, 1.0, False)],
    ids=["on gloo", "on gloo without a horizon", "a hundred iterations pay", "one does not"])
def test_a_better_plan_is_taken_if_its_new_partners_pay_off(seconds, horizon, changes, monkeypatch):
    """From leaving two pipelines out to guests at two stages. What does not pay now is kept for the next time."""
    description = Job(grid=Grid(3, (6, 6, 6)), planner_budget=1.0, partner_cost=seconds, horizon=horizon)
    failed, planning = frozenset(map(str, TWO_LOST.failed)), Planning()
    planning.plan(description, failed)
    for worker in TWO_LOST.live_workers():
        planning.measured({"worker": str(worker), "iterations": [{"F": 0.02, "B": 0.022, "W": 0.018}] * 3,
                           "room": None, "held": {"before_b": 0, "after_b": 0, "message": 0}})
    problem = planning_module.problem_of(description, failed, planning._measurements.known)
    used, better = drop(problem), quick(problem)
    assert better.objective_value < 0.9 * used.objective_value
    monkeypatch.setattr(planning_module, "improve", lambda *given: better)
    in_use = replace(used.to_file(), source="greedy")
    found = planning.improve(description, failed, in_use, stop := threading.Event())
    stop.set()
    assert (found is not None) == changes
    assert Plan.from_file(planning.plan(description, failed)).objective_value == better.objective_value
