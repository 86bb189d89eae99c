"""Each rule of the plan file is broken on purpose, and the validator names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_recycle.plan import (
    Action,
    Costs,
    DeadlockError,
    Grid,
    Message,
    PlanError,
    Problem,
    Worker,
    bound_of,
    channels,
    check,
    peak,
    pieces,
    reads,
    replay,
    surplus,
    violations,
)
from megatron_recycle.planner import quick
from tests.plan.times import end, start


def problem(failed=("1:1",), block=0, cap=3, **changes) -> Problem:
    grid = Grid(2, (4, 4, 4))
    return Problem(grid, Costs.uniform(2, 2, 2, 1, 1, 3), tuple(map(Worker.parse, failed)),
                   cap=dict.fromkeys(grid.workers(), cap), block=block, **changes)


def rewritten(plan, worker, change):
    """The plan with one worker's orders changed and its figures left as they were."""
    worker = Worker.parse(worker)
    return replace(plan, workers={**plan.workers, worker: tuple(change(list(plan.workers[worker])))})


def swap(first, second):
    def change(actions):
        i, j = actions.index(Action.parse(first)), actions.index(Action.parse(second))
        actions[i], actions[j] = actions[j], actions[i]
        return actions
    return change


@pytest.fixture
def plan():
    return quick(problem())


def names(plan):
    return " | ".join(violations(plan))


def test_a_legal_plan_has_no_violations(plan):
    assert violations(plan) == [] and check(plan) is plan


def test_missing_action_is_named(plan):
    broken = rewritten(plan, "0:0", lambda a: [x for x in a if str(x) != "W0.2"])
    assert "W0.2 is missing at stage 0" in names(broken)
    with pytest.raises(PlanError, match=r"W0\.2"):
        check(broken)


def test_action_listed_twice_is_named(plan):
    assert "F0.0 is listed 2 times" in names(rewritten(plan, "0:0", lambda a: [a[0], *a]))


def test_backward_on_another_worker_than_its_forward_is_named(plan):
    broken = rewritten(plan, "0:0", lambda a: [x for x in a if str(x) != "W0.3"])
    broken = rewritten(broken, "2:0", lambda a: [*a[:-1], Action.parse("W0.3"), a[-1]])
    assert "spread over workers 0:0 and 2:0" in names(broken)


def test_failed_worker_with_orders_and_live_one_without_are_named(plan):
    broken = replace(plan, workers={**plan.workers, Worker(1, 1): (Action("S"),)})
    assert "worker 1:1 is failed but has orders" in names(broken)
    workers = dict(plan.workers)
    del workers[Worker(0, 0)]
    assert "live worker 0:0 has no orders" in names(replace(plan, workers=workers))


def test_step_must_be_last_and_once(plan):
    assert "S 0 times" in names(rewritten(plan, "0:0", lambda a: a[:-1]))
    assert "not the last" in names(rewritten(plan, "0:0", lambda a: [a[-1], *a[:-1]]))


def test_weight_gradient_before_its_backward_is_named(plan):
    assert "comes before its B0.0" in names(rewritten(plan, "0:0", swap("B0.0", "W0.0")))


def test_memory_above_the_cap_is_named(plan):
    tight = replace(plan, problem=replace(plan.problem, cap={Worker(0, 0): 1}))
    assert "memory: worker 0:0 holds 2" in names(tight)


def test_held_units_count_before_and_after_the_backward():
    plan = quick(problem(before_b=(3, 3), after_b=(1, 1), cap=4))
    assert violations(plan) == []
    assert max(peak(plan, worker) for worker in plan.workers) <= 4


def test_messages_that_are_sent_early_need_room_too():
    """Those that the usual receives take have theirs before caps are derived."""
    names_of = {"0:0": "F0.0 F0.1 F0.2 F0.3 B0.2 W0.2 B0.3 W0.3 B0.0 W0.0 B0.1 W0.1 S",
                "0:1": "F0.2 B0.2 W0.2 F0.3 B0.3 W0.3 F0.0 B0.0 W0.0 F0.1 B0.1 W0.1 S"}
    orders = {Worker.parse(name): tuple(map(Action.parse, text.split())) for name, text in names_of.items()}
    asked = Problem(Grid(2, (4,)), Costs.uniform(2, 1, 1, 1), cap={Worker(0, 1): 4}, message=(2, 2))
    early = replace(quick(asked), workers=orders)
    early = replace(early, period=replay(early).period, makespan=replay(early).makespan)
    assert surplus(early) == {Worker(0, 1): 2}
    told = "memory: worker 0:1 holds 5 at F0.2, 4 of it for messages that are sent early, its cap is 4"
    assert names(early) == told
    assert violations(replace(early, problem=replace(asked, message=(2, 1)))) == []


def test_deadlock_is_found_and_named():
    plan = quick(problem(failed=()))
    order = sorted(plan.workers[Worker(0, 0)], key=lambda x: (x.kind == "S", x.microbatch, "FBW".find(x.kind)))
    other = sorted(plan.workers[Worker(0, 1)], key=lambda x: (x.kind == "S", -x.microbatch, "FBW".find(x.kind)))
    broken = replace(plan, workers={**plan.workers, Worker(0, 0): tuple(order), Worker(0, 1): tuple(other)})
    with pytest.raises(DeadlockError, match="can never start"):
        replay(broken)
    assert "deadlock" in names(broken)


def test_blocks_stay_together_and_in_order():
    plan = quick(problem(block=2))
    assert violations(plan) == []
    broken = rewritten(plan, "0:0", swap("W0.0", "W0.1"))
    assert "block: W0.0" in names(broken)
    assert "block" not in names(rewritten(plan, "0:0", swap("W0.1", "W0.2"))), "blocks may come in any order"
    single = quick(problem(block=1))
    coarse = replace(single, problem=replace(single.problem, block=4))
    assert "block 0 of pipeline 1 is on workers" in names(coarse)


def test_stated_figures_and_digest_are_checked(plan):
    assert "period" in names(replace(plan, period=plan.period - 1))
    assert "makespan" in names(replace(plan, makespan=plan.makespan + 1))
    assert "bound" in names(replace(plan, lower_bound=plan.period + 1))
    assert "digest" in names(replace(plan, stated="sha256:0"))


def test_unsplit_plan_has_no_weight_actions():
    plan = quick(problem(split_backward=False))
    assert violations(plan) == []
    assert not any(a.kind == "W" for actions in plan.workers.values() for a in actions)


def test_a_full_backward_is_its_b_and_its_w():
    """Here on the last stage, where 0:0 and its successors wait for what it passes on."""
    plan = quick(problem(failed=(), full_backward=(1,)))
    b, w = Action.parse("B0.3"), Action.parse("W0.3")

    def full(actions):
        return [Action("FB", 0, 3) if action == b else action for action in actions if action != w]

    changed = rewritten(plan, "0:1", full)
    merged = replay(changed)
    last, first = Worker(0, 1), Worker(0, 0)
    begun, ended = start(changed, last, Action("FB", 0, 3)), end(changed, last, Action("FB", 0, 3))
    assert ended - begun == plan.problem.duration("B", last) + plan.problem.duration("W", last)
    assert start(changed, first, b) >= ended + plan.problem.costs.hop, "its message leaves at its end"
    assert peak(changed, last) <= peak(plan, last)
    figures = replace(changed, period=merged.period, makespan=merged.makespan)
    assert violations(figures) == [] and channels(figures) == channels(plan)


def test_full_backwards_stand_only_where_they_may():
    plan = quick(problem(failed=(), full_backward=(0,)))
    assert any(action.kind == "FB" for action in plan.workers[Worker(0, 0)])
    elsewhere = replace(plan, problem=replace(plan.problem, full_backward=(1,)))
    assert "full: FB0.1 of worker 0:0, but workers of stage 0 run B and W apart" in names(elsewhere)
    first = rewritten(plan, "0:0", lambda a: [Action("FB", 0, 0) if str(x) == "B0.0" else x for x in a
                                             if str(x) != "W0.0"])
    assert "full: FB0.0 of worker 0:0 comes before any W" in names(first)
    twice = rewritten(plan, "0:0", lambda a: [*a[:-1], Action("W", 0, 1), a[-1]])
    assert "W0.1 is listed 2 times" in names(twice)
    assert "comes before its F0.1" in names(rewritten(plan, "0:0", swap("F0.1", "FB0.1")))
    unsplit = replace(plan, problem=replace(plan.problem, split_backward=False))
    assert "FB0.1 of worker 0:0, but this plan does not split" in names(unsplit)


def test_full_backwards_of_a_block_come_in_order():
    plan = quick(problem(failed=(), block=2, full_backward=(0,)))
    assert violations(plan) == []
    assert "block: FB0.2" in names(rewritten(plan, "0:0", swap("FB0.2", "FB0.3")))


def test_tied_stages_step_together():
    timeline = replay(quick(problem(tied=((0, 1),))))
    starts = {spans[-1][0] for spans in timeline.times.values()}
    assert len(starts) == 1


def test_idle_worker_has_a_step_alone():
    grid = Grid(1, (1, 1))
    plan = quick(Problem(grid, Costs.uniform(1, 1, 1, 1), (), {Worker(1, 0): 1}, before_b=(2,)))
    assert plan.actions(Worker(1, 0)) == (Action("S"),) and violations(plan) == []


def test_channels_follow_the_senders_order_and_somebody_reads_them(plan):
    route, talk = plan.route(), channels(plan)
    assert sum(len(messages) for messages in talk.values()) == 2 * plan.problem.grid.total
    for (source, to), messages in talk.items():
        listed = [Message(*a) for a in plan.workers[source]]
        places = [listed.index(tuple(message)) for message in messages]
        assert places == sorted(places)
        assert all(route[m.pipeline, m.microbatch, to.stage] == to for m in messages)
    assert {(source, me) for me in plan.workers for source, _ in reads(plan, me)} == set(talk)


def test_pieces_fold_only_an_unbroken_prefix():
    plan = quick(problem(block=1))
    for worker, mine in pieces(plan, 1).items():
        own = {m for (d, m, s), w in plan.route().items() if s == 1 and d == 1 and w == worker}
        covered = [b for d, first, last in mine if d == 1 for b in range(first, last + 1)]
        assert sorted(own) == covered
        assert all(first == last or first == 0 for _, first, last in mine)
    assert pieces(plan, 0)[Worker(0, 0)] == ((0, 0, 3),)


def begun(done, failed=("1:1",)):
    """A plan of which workers have done so many actions, with its figures."""
    plan = replace(quick(problem(failed)), done={Worker.parse(name): count for name, count in done.items()})
    timeline = replay(plan)
    return replace(plan, period=timeline.period, makespan=timeline.makespan, lower_bound=bound_of(plan))


def test_figures_of_a_plan_that_begins_with_done_actions_are_of_the_rest():
    plan = begun({str(worker): 2 for worker in quick(problem()).workers})
    assert violations(plan) == [] and plan.period == plan.makespan < quick(problem()).makespan
    assert "period" in names(replace(plan, period=plan.period + 1))
    assert "bound" in names(replace(plan, lower_bound=plan.lower_bound - 1))
    every = begun({str(worker): len(actions) - 1 for worker, actions in plan.workers.items()})
    assert every.makespan == every.lower_bound == 3, "the step is left"


def test_a_done_action_waits_for_nothing_and_its_result_is_there():
    """As written 0:1 has it from 0:0, whose forward is behind a backward that waits for 0:1."""
    plan = quick(problem(failed=("1:0", "1:1", "2:0", "2:1")))
    late = rewritten(plan, "0:0", lambda a: [x for x in a if str(x) not in ("F0.0", "B0.0", "W0.0")][:-1]
                     + [Action.parse(x) for x in ("F0.0", "B0.0", "W0.0", "S")])
    late = rewritten(late, "0:1", lambda a: sorted(a, key=lambda x: (x.kind == "S", x[1:3] != (0, 0))))
    assert "deadlock" in names(late)
    assert "deadlock" not in names(replace(late, done={Worker(0, 1): 2}))


def test_memory_is_checked_from_where_a_worker_stands():
    plan = begun({"0:0": 3})
    tight = replace(plan, problem=replace(plan.problem, cap={Worker(0, 0): peak(plan, Worker(0, 0)) - 1}))
    assert "memory: worker 0:0" in names(replace(tight, done={}))
    full = replace(tight, done={Worker(0, 0): len(tight.workers[Worker(0, 0)]) - 1})
    assert "memory" not in names(full)


def test_a_worker_outside_the_grid_is_named_also_where_messages_weigh_something():
    plan = quick(problem(message=(1, 1)))
    strange = replace(plan, workers={**plan.workers, Worker(9, 9): (Action("F", 0, 0), Action("S"))})
    assert names(strange) == "listed: worker 9:9 is outside the grid but has orders"


def test_a_message_that_nobody_sends_is_named_also_where_messages_weigh_something():
    plan = rewritten(quick(problem(message=(1, 1))), "0:0", lambda a: [x for x in a if str(x) != "F0.1"])
    assert "F0.1 is missing at stage 0" in names(plan)
