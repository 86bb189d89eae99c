"""The plan file is read and written without loss, and every malformed one is refused with its fault."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_recycle.plan import Action, Costs, Grid, Plan, PlanError, Problem, Worker, violations
from megatron_recycle.planner import quick

VERSION_1 = Path(__file__).parent / "version-1.json"
VERSION_2 = Path(__file__).parent / "version-2.json"
VERSION_3 = Path(__file__).parent / "version-3.json"


def small(**changes) -> Problem:
    grid = Grid(2, (2, 2))
    return Problem(grid, Costs.uniform(2, 20, 22, 18, 1, 15, {Worker(0, 1): 1.5}), (Worker(1, 1),),
                   cap=dict.fromkeys(grid.workers(), 2), **changes)


def test_a_file_of_version_1_is_read_and_its_digest_counts(tmp_path):
    """It knew no full backwards, and had workers that were moved to another stage, which no job did."""
    plan = Plan.load(VERSION_1)
    assert violations(plan) == [] and plan.problem.full_backward == ()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    value = json.loads(VERSION_1.read_text())
    value["workers"]["0:0"][:2] = reversed(value["workers"]["0:0"][:2])
    assert any(text.startswith("digest") for text in violations(Plan.from_json(value)))
    value["workers"]["0:0"] = [action for action in value["workers"]["0:0"] if action != "W0.1"]
    value["workers"]["0:0"][value["workers"]["0:0"].index("B0.1")] = "FB0.1"
    found = violations(Plan.from_json({**value, "full_backward": [0]}))
    assert any(text.startswith("full: FB0.1") for text in found), "it knows no full backwards"
    with pytest.raises(PlanError, match="worker 1:0 is moved to another stage"):
        Plan.from_json({**value, "stage_of": {"1:0": 2}})


def test_a_file_of_version_2_has_the_digest_that_it_came_with(tmp_path):
    """It knew neither chunks nor lent layers: a plan without them is called as before."""
    plan = Plan.load(VERSION_2)
    assert violations(plan) == [] and plan.digest == plan.stated
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.digest == plan.digest


def test_a_file_of_version_3_has_the_digest_that_it_came_with(tmp_path):
    """It knew no done actions: what is said of any is nothing that it said."""
    plan = Plan.load(VERSION_3)
    assert violations(plan) == [] and plan.digest == plan.stated and plan.crossings
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.digest == plan.digest
    assert Plan.from_json({**json.loads(VERSION_3.read_text()), "done": {"0:0": 1}}) == plan


def test_round_trip_keeps_everything(tmp_path):
    plan = quick(small(block=1, tied=((0, 1),)))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.digest == plan.digest and again.stated == plan.digest
    assert again.to_json() == plan.to_json()


def test_done_actions_are_of_the_plan_and_of_its_digest():
    plan = quick(small())
    begun = replace(plan, done={Worker(0, 0): 2, Worker(0, 1): 0})
    value = json.loads(json.dumps(begun.to_json()))
    assert value["done"] == {"0:0": 2} and "done" not in plan.to_json()
    assert Plan.from_json(value) == begun and Plan.from_json(value).digest == begun.digest != plan.digest
    assert replace(plan, done={Worker(0, 0): 0}).digest == plan.digest
    assert begun.rest(Worker(0, 0)) == plan.workers[Worker(0, 0)][2:]
    without = begun.without([plan.workers[Worker(0, 0)][0][1:3]])
    assert without.done == {Worker(0, 0): 1}


def test_digest_is_the_hash_of_the_documented_parts():
    value = quick(small()).to_json()
    names = ["grid", "failed", "costs", "cap", "held", "block", "tied", "split_backward", "full_backward", "workers"]
    text = json.dumps({name: value[name] for name in names}, sort_keys=True, separators=(",", ":"))
    assert value["digest"] == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_file_has_the_documented_form():
    value = quick(small()).to_json()
    assert value["format"] == "recycle-plan" and value["version"] == 4
    assert value["grid"] == {"stages": 2, "microbatches": [2, 2]}
    assert value["failed"] == ["1:1"] and value["costs"]["speed"] == {"0:1": 1.5}
    assert value["held"] == {"before_b": [1, 1], "after_b": [1, 1], "message": [0, 0]}
    assert set(value["workers"]) == {"0:0", "0:1", "1:0"}
    assert all(orders[-1] == "S" for orders in value["workers"].values())


@pytest.mark.parametrize(("change", "fault"), [
    ({"version": 5}, "version"),
    ({"format": "x"}, "format"),
    ({"failed": ["7:0"]}, "7:0"),
    ({"failed": ["a"]}, "'a'"),
    ({"cap": {"0:0": 0}}, "cap"),
    ({"workers": {"0:0": ["G0.0"]}}, "G0.0"),
    ({"workers": None}, "workers"),
    ({"grid": {"stages": 2, "microbatches": []}}, "pipeline"),
    ({"source": "magic"}, "magic"),
    ({"period": -1}, "period"),
    ({"period": float("nan")}, "period"),
    ({"period": float("inf")}, "period"),
    ({"makespan": None}, "makespan"),
    ({"objective": "speed"}, "objective"),
    ({"tied": [[0, 0]]}, "tied"),
    ({"tied": [0]}, "tied"),
    ({"full_backward": [2]}, "full_backward: stage 2 is outside"),
    ({"full_backward": 0}, "full_backward"),
    ({"stage_of": {"0:1": 0}}, "stage_of: worker 0:1 is moved"),
    ({"workers": {"0:0": [f"F{'9' * 5000}.0"]}}, "F9"),
    ({"done": ["0:0"]}, r"\$.done"),
    ({"done": {"0:0": True}}, r"`int`, got `bool` - at `\$.done"),
    ({"done": {"0:0": 1.0}}, r"`int`, got `float` - at `\$.done"),
    ({"done": {"0:0": -1}}, "done: -1 actions of worker 0:0, which has 6 before its step"),
    ({"done": {"0:0": 7}}, "done: 7 actions of worker 0:0"),
    ({"done": {"0:0": 10 ** 30}}, "done: 10+ actions of worker 0:0"),
    ({"done": {"1:1": 1}}, "worker 1:1 has no orders"),
    ({"done": {"0": 1}}, "worker '0' is not"),
])
def test_malformed_file_is_refused_with_its_fault(change, fault):
    value = {**quick(small()).to_json(), **change}
    with pytest.raises(PlanError, match=fault):
        Plan.from_json(value)


@pytest.mark.parametrize("bad", [-1, 1.5, "3", True, None])
def test_costs_must_be_non_negative_integers(bad):
    value = quick(small()).to_json()
    value["costs"]["forward"][1] = bad
    with pytest.raises(PlanError, match=r"costs: .*forward\[1\]"):
        Plan.from_json(value)


def test_workers_and_actions_print_and_parse():
    assert Worker.parse("1:2") == Worker(1, 2) and str(Worker(1, 2)) == "1:2"
    assert all(str(Action.parse(text)) == text for text in ("W10.3", "FB0.1", "F0.1", "B0.1", "S"))
    assert Action.parse("FB0.1") == Action("FB", 0, 1)


def test_a_slow_worker_takes_the_exact_decimal_rounded_up():
    costs = Costs.uniform(1, 20, 22, 18, speed={Worker(0, 0): 1.1})
    assert [costs.scaled(costs.cost(kind, 0), Worker(0, 0)) for kind in "FBW"] == [22, 25, 20]
    assert costs.scaled(costs.cost("B", 0, split=False), Worker(1, 0)) == 40


def test_orders_without_a_micro_batch_are_the_plan_s_for_the_others():
    plan = quick(small())
    without = plan.without([(1, 1)])
    assert all([a for a in actions if (a.pipeline, a.microbatch) != (1, 1)] == list(without.actions(worker))
               for worker, actions in plan.workers.items())
    assert without.digest != plan.digest and all(actions[-1].kind == "S" for actions in without.workers.values())
