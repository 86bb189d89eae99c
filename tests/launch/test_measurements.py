"""Measured memory limits the plans, after all live workers have told theirs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle.control.planning import Planning, problem_of
from megatron_recycle.membership.description import Job
from megatron_recycle.plan import Grid, Plan, Worker, peak, violations

DESCRIPTION = Job(grid=Grid(2, (6, 6, 6)), planner_budget=0.2)
NAMES = [f"{pipeline}:{stage}" for pipeline in range(3) for stage in range(2)]
MIB = 2**20


def profile(worker: str, room: int | None, before: int = 8 * MIB, after: int = 5 * MIB) -> dict[str, Any]:
    return {"worker": worker, "iterations": [{"F": 0.02, "B": 0.022, "W": 0.018}] * 3, "room": room,
            "held": {"before_b": before, "after_b": after, "message": MIB}}


def heard(planning: Planning, failed: frozenset[str] = frozenset(), **options: Any) -> Any:
    found = [planning.measured(profile(name, **options)) for name in NAMES if name not in failed]
    assert found[:-1] == [None] * (len(found) - 1)
    return found[-1]


@pytest.mark.parametrize(("failed", "budget"), [(frozenset(), 0.2), (frozenset({"1:1"}), 0.2), (frozenset(), 0.0)],
                         ids=["whole", "one lost", "no search"])
def test_the_plan_in_use_is_replaced_if_it_holds_more_than_there_is(failed, budget):
    planning = Planning()
    description = replace(DESCRIPTION, planner_budget=budget)
    plan = planning.plan(description, failed)
    room = 18 * MIB
    known = heard(planning, failed, room=room)
    said = known.to_json()
    assert said["held"]["before_b"] == [8 * MIB] * 2 and said["room"]["0:0"] == room
    better = planning.improve(description, failed, plan, threading.Event())
    assert better is not None
    found = Plan.from_file(better)
    assert violations(found) == []
    unit = 8 * MIB // 8
    assert all(peak(found, worker) * unit <= room for worker in found.workers)
    assert set(map(str, found.problem.failed)) == failed


def test_plenty_of_memory_leaves_the_default_and_a_given_cap_comes_first():
    planning = Planning()
    planning.plan(DESCRIPTION, frozenset())
    known = heard(planning, room=1000 * MIB)
    problem = problem_of(DESCRIPTION, frozenset({"0:0"}), known)
    assert set(problem.cap.values()) == {4 * 8} and problem.before_b == (8, 8) and problem.after_b == (5, 5)
    assert Worker(0, 0) not in problem.cap
    assert set(problem_of(replace(DESCRIPTION, cap=3), frozenset(), known).cap.values()) == {3}


@pytest.mark.parametrize(("room", "before"), [(None, 8 * MIB), (100, 8 * MIB), (100 * MIB, 0)],
                         ids=["nobody knows how much", "less than one micro-batch", "not measured yet"])
def test_without_usable_numbers_the_cap_counts_activations(room, before):
    planning = Planning()
    planning.plan(DESCRIPTION, frozenset())
    known = heard(planning, room=room, before=before)
    assert known.memory is None
    assert set(problem_of(DESCRIPTION, frozenset(), known).cap.values()) == {4}


def test_only_a_notable_change_of_memory_makes_plans_anew():
    planning = Planning()
    planning.plan(DESCRIPTION, frozenset())
    assert heard(planning, room=100 * MIB) is not None
    assert heard(planning, room=500 * MIB) is None, "plenty then, plenty now"
    assert heard(planning, room=20 * MIB).bytes["room"]["2:1"] == 20 * MIB
    assert heard(planning, room=21 * MIB) is None


def test_where_the_time_goes_is_told_after_some_iterations_and_then_now_and_then():
    planning, told = Planning(), []
    planning.plan(DESCRIPTION, frozenset())
    for number in range(1, 40):
        for name in NAMES:
            one = {"F": 0.02, "B": 0.022, "W": 0.018, "gap": 0.001, "reduce": 0.003, "own": 0.004, "script": 0.005,
                   "messages": 0.1 * number}
            planning.measured({"worker": name, "iterations": [one], "lags": []})
            if found := planning.spent():
                told.append((number, name, found))
    assert [(number, name) for number, name, _ in told] == [(12, NAMES[-1]), (37, NAMES[-1])]
    costs, seconds = told[1][2]["costs"], told[1][2]["seconds"]
    assert costs["forward"] == [21000] * 2 and costs["step"] == [12000] * 2, "with what a plan knows no time for"
    assert set(seconds) == set(NAMES)
    assert seconds["1:0"] == {"messages": pytest.approx(3.15), "own": 0.004, "script": 0.005}, "of the latest 12"


def test_a_worker_that_was_not_heard_has_its_peers_memory():
    planning = Planning()
    planning.plan(DESCRIPTION, frozenset({"1:1"}))
    known = heard(planning, frozenset({"1:1"}), room=20 * MIB)
    assert problem_of(DESCRIPTION, frozenset(), known).cap[Worker(1, 1)] == 20


def test_reducing_costs_what_it_takes_whoever_comes_last():
    planning = Planning()
    planning.plan(DESCRIPTION, frozenset())
    for number, name in enumerate(NAMES):
        took = [{"F": 0.02, "B": 0.022, "W": 0.018, "reduce": 0.005 + 0.03 * number, "step": 0.002}]
        known = planning.measured({**profile(name, None), "iterations": took})
    assert known.costs.step == (7000, 37000)


def test_a_worker_without_work_says_nothing_about_what_a_micro_batch_holds():
    planning = Planning()
    planning.plan(DESCRIPTION, frozenset())
    found = [planning.measured(profile(name, 30 * MIB, **({"before": 0, "after": 0} if name[0] == "1" else {})))
             for name in NAMES]
    assert found[-1].memory.before_b == (8, 8)


def test_one_that_has_just_come_in_is_waited_for_before_news_of_the_others_count():
    planning = Planning()
    planning.plan(DESCRIPTION, frozenset({"1:1"}))
    assert heard(planning, frozenset({"1:1"}), room=100 * MIB) is not None
    planning.plan(DESCRIPTION, frozenset())
    assert planning.measured(profile("0:0", 20 * MIB)) is None
    assert heard(planning, room=20 * MIB) is not None


def test_a_coordinator_that_comes_back_knows_what_was_measured_and_whom_to_wait_for():
    first = Planning()
    first.plan(DESCRIPTION, frozenset())
    told = {"event": "profiled", **heard(first, room=18 * MIB).to_json()}
    second = Planning()
    second.resume(DESCRIPTION, frozenset(), [told])
    planned = [planning.plan(DESCRIPTION, frozenset({"1:1"})).digest for planning in (first, second)]
    assert planned[0] == planned[1]
    # Of a stage that was not heard yet, nothing is concluded.
    third = Planning()
    third.resume(DESCRIPTION, frozenset(), [])
    for name in ("0:0", "1:0", "2:0"):
        assert third.measured(profile(name, 18 * MIB)) is None
    assert len(third.plan(DESCRIPTION, frozenset({"1:1"})).costs["forward"]) == 2


V = replace(DESCRIPTION, placement=(0, 1, 1, 0))
LAST = {"before_b": 4, "after_b": 3, "message": 2}
"""MiB in the chunk of the loss; in the others 8, 5 and 1."""


def of_v(worker: str, room: int | None, last: dict[str, int]) -> dict[str, Any]:
    found = profile(worker, room)
    also = {name: last[name] * MIB if worker.endswith(":0") else size for name, size in found["held"].items()}
    one = {name + more: seconds for name, seconds in found["iterations"][0].items() for more in ("", "/1")}
    return {**found, "iterations": [one] * 3,
            "held": {**found["held"], **{f"{name}/1": size for name, size in also.items()}}}


def test_chunks_of_a_stage_are_planned_with_their_own_memory():
    planning = Planning()
    planning.plan(V, frozenset())
    *_, known = [planning.measured(of_v(name, 1000 * MIB, LAST)) for name in NAMES]
    assert known.bytes["held"]["before_b"] == [8 * MIB, 8 * MIB, 8 * MIB, 4 * MIB]
    problem = problem_of(V, frozenset(), known)
    assert problem.before_b == (8, 8, 8, 4) and problem.after_b == (5, 5, 5, 3) and problem.message == (1, 1, 1, 2)
    assert problem.weight(0) == 12 and set(problem.cap.values()) == {8 * 8}
    *_, changed = [planning.measured(of_v(name, 1000 * MIB, {**LAST, "before_b": 7})) for name in NAMES]
    assert changed is not None and changed.memory.before_b == (8, 8, 8, 7), "though its stage's largest is what it was"
    again = Planning()
    again.resume(V, frozenset(), [{"event": "profiled", **changed.to_json()}])
    assert [each.plan(V, frozenset({"1:1"})).digest for each in (again, planning)] == [
        planning.plan(V, frozenset({"1:1"})).digest] * 2


@pytest.mark.parametrize(("room", "last", "usable"), [
    (12, LAST, True), (11, LAST, False), (100, {**LAST, "before_b": 0}, False)],
    ids=["one in both chunks", "not in both at once", "one chunk is not measured yet"])
def test_a_micro_batch_is_in_all_chunks_of_a_stage_at_once(room, last, usable):
    planning = Planning()
    planning.plan(V, frozenset())
    *_, known = [planning.measured(of_v(name, (room if name.endswith(":0") else 100) * MIB, last)) for name in NAMES]
    assert (known.memory is not None) == usable
    plan = Plan.from_file(planning.plan(V, frozenset({"1:1"})))
    assert violations(plan) == []


def test_memory_that_an_earlier_release_has_measured_of_a_stage_holds_for_each_of_its_chunks():
    first = Planning()
    first.plan(DESCRIPTION, frozenset())
    told = {"event": "profiled", **heard(first, room=40 * MIB).to_json()}
    planning = Planning()
    planning.resume(V, frozenset(), [told])
    problem = Plan.from_file(planning.plan(V, frozenset({"1:1"}))).problem
    assert problem.before_b == (8,) * 4 and problem.after_b == (5,) * 4 and problem.cap[Worker(0, 0)] == 40


def test_before_anybody_is_known_to_live_nothing_is_measured():
    assert Planning().measured(profile("0:0", None)) is None
