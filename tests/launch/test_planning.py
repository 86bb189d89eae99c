"""What the coordinator asks the planner."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from megatron_recycle.control.lending_costs import copy_price, with_lending
from megatron_recycle.control.plan_folder import PlanFolder
from megatron_recycle.control.planning import Planning, problem_of
from megatron_recycle.control.searches import Plans, make_redo
from megatron_recycle.measure.measurements import Measured, Memory
from megatron_recycle.membership.decisions import MakeRedo
from megatron_recycle.membership.description import Description, Job, Lendable, Lending
from megatron_recycle.membership.inputs import Redone
from megatron_recycle.membership.lendable import lending
from megatron_recycle.plan import Costs, Grid, Plan, PlanError, Worker, violations
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.planner import recosted

DESCRIPTION = Job.from_json({
    "grid": {"stages": 2, "microbatches": [4, 4, 4]},
    "block": 2,
    "cap": None,
    "planner_budget": 0.0,
})


def changed(job: Job, **facts: Any) -> Job:
    """The same job but for these, as JSON has them."""
    return Job.from_json({**job.to_json(), **facts})


def test_a_legal_plan_for_every_membership_that_training_survives() -> None:
    planning = Planning()
    for failed in (frozenset(), frozenset({"1:1"}), frozenset({"1:1", "0:0"})):
        plan = Plan.from_file(planning.plan(DESCRIPTION, failed))
        assert violations(plan) == []
        assert {str(worker) for worker in plan.problem.failed} == failed


def test_every_plan_is_kept_as_a_file_that_its_digest_finds(tmp_path: Path) -> None:
    planning = Planning(PlanFolder(tmp_path / "plans").keep)
    made = Plan.from_file(planning.plan(DESCRIPTION, frozenset({"1:1"})))
    assert PlanFolder(tmp_path / "plans").load(made.digest) == made.to_file()
    file, = (tmp_path / "plans").iterdir()
    file.write_text(file.read_text().replace('"block": 2', '"block": 1'))  # by hand
    assert PlanFolder(tmp_path / "plans").load(made.digest) is None
    (tmp_path / "file").write_text("")
    assert Planning(PlanFolder(tmp_path / "file").keep).plan(DESCRIPTION, frozenset({"1:1"})).digest == made.digest


def test_a_stage_without_workers_is_an_error_that_names_it() -> None:
    with pytest.raises(PlanError, match="stage 1"):
        Planning().plan(DESCRIPTION, frozenset({"0:1", "1:1", "2:1"}))


def test_a_cap_for_all_or_for_each() -> None:
    assert set(problem_of(DESCRIPTION, frozenset()).cap.values()) == {4}
    assert set(problem_of(changed(DESCRIPTION, cap=6), frozenset()).cap.values()) == {6}
    each = problem_of(changed(DESCRIPTION, cap={"0:0": 3, "1:1": 5}), frozenset({"1:1"}))
    assert each.cap == {Worker(0, 0): 3}


def test_a_plan_is_made_once_for_each_membership() -> None:
    planning = Planning()
    first = planning.plan(DESCRIPTION, frozenset({"1:1"}))
    planning._best[frozenset({"1:1"})] = replace(Plan.from_file(first), source="cpsat")
    assert planning.plan(DESCRIPTION, frozenset({"1:1"})).source == "cpsat"


def test_no_search_without_a_budget_or_after_it_was_cancelled() -> None:
    planning = Planning()
    plan = planning.plan(DESCRIPTION, frozenset())
    cancelled = threading.Event()
    assert planning.improve(DESCRIPTION, frozenset(), plan, cancelled) is None
    cancelled.set()
    assert planning.improve(changed(DESCRIPTION, planner_budget=60.0), frozenset(), plan, cancelled) is None


def test_the_plans_of_what_may_fail_next_are_made_ahead() -> None:
    planning, cancelled = Planning(), threading.Event()
    description = changed(DESCRIPTION, planner_budget=0.3)
    planning.improve(description, frozenset(), planning.plan(description, frozenset()), cancelled)
    assert planning.ahead is not None
    planning.ahead.join(60)
    assert not planning.ahead.is_alive()
    for stage in range(2):
        for pipeline in range(3):
            failed = frozenset({f"{pipeline}:{stage}"})
            plan = Plan.from_file(planning.plan(description, failed))
            assert plan.stats.get("cached") and violations(plan) == []
            assert {str(worker) for worker in plan.problem.failed} == failed


def test_a_plan_made_ahead_is_not_lost_because_durations_were_measured_anew() -> None:
    planning, cancelled, failed = Planning(), threading.Event(), frozenset({"1:1"})
    description = changed(DESCRIPTION, cap=3, planner_budget=1.0)
    planning.improve(description, frozenset(), planning.plan(description, frozenset()), cancelled)
    assert planning.ahead is not None
    planning.ahead.join(60)
    for name in [f"{pipeline}:{stage}" for pipeline in range(3) for stage in range(2)]:
        planning.measured(profile(name, 0.022))
    other = Planning()
    other._measurements.known = planning._measurements.known
    plan = Plan.from_file(planning.plan(description, failed))
    assert plan.problem.costs.forward == (22000, 22000) and violations(plan) == []
    assert plan.objective_value <= Plan.from_file(other.plan(description, failed)).objective_value


def profile(worker: str, forward: float) -> dict[str, object]:
    return {"worker": worker, "iterations": [{"F": forward, "B": 0.022, "W": 0.018}] * 3}


def test_measured_durations_replace_equal_costs_and_a_slow_worker_gets_less_work() -> None:
    planning = Planning()
    equal = Plan.from_file(planning.plan(DESCRIPTION, frozenset({"1:1"})))
    assert equal.problem.costs.forward == (1, 1)
    names = [f"{pipeline}:{stage}" for pipeline in range(3) for stage in range(2)]
    *before, costs = [planning.measured(profile(name, 0.02)) for name in names if name != "1:1"]
    assert before == [None] * 4, "only when all live workers have been heard"
    assert costs is not None and costs.costs.forward == (20000, 20000) and costs.costs.backward_weight == (18000, 18000)
    assert [planning.measured(profile(name, 0.021)) for name in names] == [None] * 6, "that is noise"
    plan = Plan.from_file(planning.plan(DESCRIPTION, frozenset({"1:1"})))
    assert plan.problem.costs == costs.costs and violations(plan) == []
    again = [profile(name, 0.02) for name in names if name not in ("1:1", "2:0")]
    hurt = {"worker": "2:0", "iterations": [{"F": 0.08, "B": 0.09, "W": 0.07}] * 3}
    *_, slow = [planning.measured(one) for one in [*again, hurt]]
    assert slow is not None and slow.costs.speed[Worker(2, 0)] > 3
    given = changed(DESCRIPTION, costs=equal.problem.costs.to_json())
    assert problem_of(given, frozenset(), slow).costs == equal.problem.costs, "what the user says comes first"


V = changed(DESCRIPTION, block=0, placement=[0, 1, 1, 0])


def known_of_v(planning: Planning, failed: frozenset[str] = frozenset()) -> Measured:
    """What follows from 12 iterations: the last chunk, which has the loss, takes three times as long as the others."""
    found = []
    for _ in range(12):
        for name in [f"{pipeline}:{stage}" for pipeline in range(3) for stage in range(2)]:
            last = 3.0 if name.endswith(":0") else 1.0
            one = {"F": 0.02, "B": 0.022, "W": 0.018, "F/1": 0.02 * last, "B/1": 0.022 * last, "W/1": 0.018 * last,
                   "gap": 0.001, "messages": 0.01}
            if name not in failed:
                found.append(planning.measured({"worker": name, "iterations": [one], "lags": []}))
    known, = filter(None, found)
    return known


def test_chunks_of_a_stage_are_planned_with_their_own_costs() -> None:
    planning = Planning()
    planning.plan(V, frozenset())
    known = known_of_v(planning)
    assert known.costs.forward == (21000, 21000, 21000, 61000)
    told = planning.spent()
    assert told is not None and told["costs"] == known.costs.to_json()
    assert told["seconds"]["0:0"] == {"messages": 0.01}, "actions are told as costs"
    plan = Plan.from_file(planning.plan(V, frozenset({"1:1"})))
    assert plan.problem.costs == known.costs and violations(plan) == []
    again = Planning()
    again.resume(V, frozenset(), [{"event": "profiled", **known.to_json()}])
    assert again.plan(V, frozenset({"1:1"})).digest == plan.digest, "another coordinator goes on with them"


def test_what_an_earlier_release_has_measured_of_a_stage_holds_for_each_of_its_chunks() -> None:
    planning = Planning()
    planning.resume(V, frozenset(), [{"event": "profiled", "costs": Costs.uniform(2, 20, 22, 18, 1, 5).to_json()}])
    costs = Plan.from_file(planning.plan(V, frozenset({"1:1"}))).problem.costs
    assert costs == Costs((20,) * 4, (22,) * 4, (18,) * 4, 1, (5, 5))
    known = known_of_v(planning, frozenset({"1:1"}))
    assert known.costs.forward[3] == 61000, "and is compared with what is measured by chunk"


LENDING = changed(
    DESCRIPTION, block=0, planner_budget=0.5,
    costs={"forward": [80, 80], "backward_input": [88, 88], "backward_weight": [72, 72], "hop": 0, "step": [0, 0],
           "speed": {}},
    lending={"layers": [4, 4], "lend": [[2, 2]], "share": [0.25, 0.25], "bytes": [1 << 20, 1 << 20]})


def test_a_job_goes_on_with_its_own_layers_and_lends_them_when_that_is_found_to_pay() -> None:
    planning, one, cancelled = Planning(), frozenset({"1:1"}), threading.Event()
    at_once = planning.plan(LENDING, one)
    assert not at_once.crossings
    told = planning.improve(LENDING, one, at_once, cancelled)
    assert told is not None
    lends = Plan.from_file(told)
    assert violations(lends) == [] and lends.crossings and lends.period < at_once.period
    assert lends.stats["lending"].startswith(("lends 1 layer at", "lends 2 layers at boundary 0-1"))
    assert "; copies" in lends.stats["lending"]
    assert not planning.plan(LENDING, one).crossings, "the next time it goes on with its own layers at once, too"
    assert planning.improve(LENDING, one, at_once, cancelled) == told or planning.improve(
        LENDING, one, at_once, cancelled).period <= told.period, "what was found is remembered"
    assert not planning.plan(LENDING, frozenset()).crossings, "a rejoin takes lending back"
    cancelled.set()


def test_what_is_lent_for_a_slow_worker_goes_home_once_it_is_fast_again() -> None:
    slow = changed(LENDING, costs={**LENDING.costs, "speed": {"1:1": 2.0}})
    planning, nobody, cancelled = Planning(), frozenset[str](), threading.Event()
    lends = planning.improve(slow, nobody, planning.plan(slow, nobody), cancelled)
    assert lends is not None and lends.crossings
    now = with_lending(problem_of(LENDING, nobody), LENDING, None)
    told = planning.improve(LENDING, nobody, lends, cancelled)
    assert told is not None and not told.crossings
    assert told.period < recosted(now, Plan.from_file(lends)).period
    unlent = changed(LENDING, lending=None)
    assert not (planning.improve(unlent, nobody, lends, cancelled) or lends).crossings
    cancelled.set()


def test_costs_of_one_unit_each_are_counted_finer_so_that_a_layer_costs_something() -> None:
    tiny = changed(LENDING, lending=structs.replace(LENDING.lending, bytes=(64, 64)), costs={**LENDING.costs, **{
        kind: [1, 1] for kind in ("forward", "backward_input", "backward_weight")}})
    planning, one, cancelled = Planning(), frozenset({"1:1"}), threading.Event()
    at_once = planning.plan(tiny, one)
    told = planning.improve(tiny, one, at_once, cancelled)
    cancelled.set()
    assert told is not None and told.crossings and violations(Plan.from_file(told)) == []
    problem = with_lending(problem_of(tiny, one), tiny, None)
    assert problem.costs.forward == (40, 40) and problem.costs.layer == ((10, 10, 10),) * 2
    assert told.period < 40 * at_once.period
    assert copy_price(tiny, None).unit == 1e-6 / 40 and copy_price(LENDING, None).unit == 1e-6


def test_a_job_does_not_lend_where_the_copies_cost_more_than_that_gains(caplog) -> None:
    dear = changed(LENDING, horizon=1.0, lending=structs.replace(LENDING.lending, bytes=(1 << 40,) * 2))
    planning, cancelled = Planning(), threading.Event()
    at_once = planning.plan(dear, frozenset({"1:1"}))
    with caplog.at_level("INFO", "megatron_recycle.control.planning"):
        told = planning.improve(dear, frozenset({"1:1"}), at_once, cancelled)
    cancelled.set()
    assert told is None or not told.crossings
    assert "does not lend" in caplog.text and "copying" in caplog.text


def test_nothing_is_lent_before_costs_are_known_or_where_the_user_does_not_want_it() -> None:
    unknown = changed(LENDING, costs=None)
    assert not with_lending(problem_of(unknown, frozenset({"1:1"})), unknown, None).lends
    able = Lendable(head=2, tail=3, layers=4, share=0.2, bytes=9)
    one = Description(grid=Grid(3, (1, 1)), lendable=(able,), lend="auto")
    none, twos = structs.replace(one, lendable=None), ((2, 2), (0, 0))
    told = {f"{d}:{s}": one for d in range(2) for s in range(3)}
    assert lending(told, 3) == Lending(((2, 2), (2, 2)), (4,) * 3, (0.2,) * 3, (9,) * 3)
    assert lending({**told, "1:1": none}, 3) is None
    assert lending({**told, "1:2": none}, 3).lend == twos
    kinds = [structs.replace(one, lendable=(structs.replace(able, like=kind),)) for kind in (7, 7, 8)]
    unlike = {name: kinds[int(name[2])] for name in told}
    assert lending(unlike, 3).lend == twos
    assert lending({name: structs.replace(each, lend_layers=1) for name, each in told.items()}, 3).lend == ((1, 1),) * 2
    assert lending({name: structs.replace(each, lend="off") for name, each in told.items()}, 3) is None
    assert lending({"0:0": one}, 1) is None


def test_a_helper_keeps_room_for_what_it_borrows() -> None:
    """A micro-batch of 800 bytes is 8 units of memory: a layer's 150 bytes of parameters and their gradients are 3."""
    measured = Measured(Costs.uniform(2, 80, 88, 72, 5), Memory({}, (8, 8), (4, 4), (1, 1)),
                        {"held": {"before_b": [800, 800], "after_b": [400, 400], "message": [100, 100]}})
    description = changed(LENDING, costs=None, lending=structs.replace(LENDING.lending, bytes=(150, 150)))
    problem = with_lending(problem_of(description, frozenset({"1:1"}), measured), description, measured)
    assert problem.layer_parameters == (3, 3) and problem.layer_held == ((2, 1), (2, 1))
    assert problem.costs.layer == ((20, 22, 18),) * 2
    assert problem.costs.lent == (15, 15)  # 300 bytes, at 100 in 5 microseconds


def test_small_messages_that_take_long_do_not_make_copies_slow_where_gradients_travel_fast() -> None:
    """Four layers of 1 MiB are added up within 4 ms: a layer that is lent takes 1 ms, and not 10 s."""
    uniform = Costs.uniform(2, 20_000, 22_000, 18_000, hop=1000)
    measured = Measured(replace(uniform, step=(4000, 4000)), None, {"held": {"message": [100, 100]}})
    description = changed(LENDING, costs=None, lending=Lending(((1, 1),), (4, 4), (0.25, 0.25), (1 << 20,) * 2))
    problem = with_lending(problem_of(description, frozenset({"1:1"}), measured), description, measured)
    assert problem.costs.lent == (1000, 1000)
    assert copy_price(description, measured).bandwidth == 1e6 * (4 << 20) / 4000


def test_what_copies_cost_is_in_the_unit_of_the_costs_that_the_user_gives() -> None:
    """Of 80, 88 and 72 units the same work takes 250 times as many microseconds: a lag of 500 of those is 2 units."""
    measured = Measured(Costs.uniform(2, 20_000, 22_000, 18_000, 500), None, {"held": {"message": [1 << 21, 1 << 21]}})
    problem = with_lending(problem_of(LENDING, frozenset({"1:1"}), measured), LENDING, measured)
    assert problem.costs.lent == (2, 2)
    assert copy_price(LENDING, measured).unit == 250e-6
    assert copy_price(changed(LENDING, costs=None), measured).unit == 1e-6


def test_the_rest_of_an_iteration_is_planned_where_that_takes_less_than_the_whole(monkeypatch) -> None:
    handed_out: list[Plan] = []
    made = Planning(handed_out.append)
    whole = made.plan(DESCRIPTION, frozenset({"1:1"}))
    first = next(action for action in whole.workers["0:0"] if action != "S")
    order = MakeRedo(2, whole, {"0:0": [first]}, _size(whole))
    rest = made.redo(DESCRIPTION, order)
    assert rest is not None and rest.done == {"0:0": 1} and rest.makespan <= whole.makespan
    assert handed_out[-1].digest == rest.digest

    longer = replace(Plan.from_file(rest), makespan=whole.makespan + 1)
    monkeypatch.setattr("megatron_recycle.control.planning.redo", lambda base, done, closed, lent: longer)
    assert made.redo(DESCRIPTION, order) is None and handed_out[-1].digest == rest.digest


def test_the_rest_of_an_iteration_with_lent_layers_is_planned_from_the_plan_that_lent_them() -> None:
    """As long as that is known here, and its layers may still be lent."""
    made = Planning()
    whole = made.plan(LENDING, frozenset({"1:1"}))
    better = made.improve(changed(LENDING, planner_budget=0.2, horizon=1e9), frozenset({"1:1"}), whole,
                          threading.Event())
    assert better is not None and better.crossings
    orders = {name: better.workers[name] for name in ("0:0", "1:0", "2:0")}
    done = {name: listed[:next(place for place, action in enumerate(listed) if not action.startswith("F"))]
            for name, listed in orders.items()}
    order = MakeRedo(3, made.plan(LENDING, frozenset({"1:1", "0:1"})), done, _size(whole), lent=better.digest)
    rest = made.redo(LENDING, order)
    assert rest is not None and rest.crossings == better.crossings
    assert rest.done == {name: len(actions) for name, actions in done.items()}
    taken_back = changed(LENDING, lending=structs.replace(LENDING.lending, lend=((0, 0),)))
    assert made.redo(taken_back, order) is None and Planning().redo(LENDING, order) is None


def test_the_rest_of_an_iteration_of_another_batch_size_is_planned_for_that() -> None:
    made = Planning()
    whole = made.plan(DESCRIPTION, frozenset({"1:1"}))
    first = next(action for action in whole.workers["0:0"] if action != "S")
    rest = made.redo(DESCRIPTION, MakeRedo(2, whole, {"0:0": [first]}, (7, 2)))
    assert rest is not None and rest.done == {"0:0": 1} and Plan.from_file(rest).problem.grid.microbatches == (7, 7, 7)


def _size(plan: PlanFile) -> tuple[int, int]:
    """Of its iterations."""
    problem = Plan.from_file(plan).problem
    return max(problem.grid.microbatches), problem.block


def test_the_rest_of_an_iteration_is_planned_though_that_of_the_next_one_cannot_be():
    def fails(job: Job, order: MakeRedo) -> PlanFile | None:
        if order.size == (1, 1):
            raise PlanError("no plan of this size")
        return order.plan

    plan = PlanFile(digest="sha256:1")
    order = MakeRedo(2, plan, {}, (4, 1), ahead=MakeRedo(2, plan, {}, (1, 1)))
    happened = make_redo(Plans(lambda job, failed: plan, redo=fails), DESCRIPTION, order)
    assert happened == Redone(2, plan, None)
