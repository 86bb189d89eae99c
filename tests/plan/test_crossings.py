"""Chunks and lent layers in the plan: what a span takes and weighs, who waits for whom, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_recycle.plan import (
    Action,
    Costs,
    Grid,
    Lent,
    Message,
    Plan,
    PlanError,
    Problem,
    Worker,
    borrowed,
    channels,
    lent,
    lower_bound,
    peak,
    pieces,
    read_by,
    reads,
    replay,
    tied_pairs,
    transfers,
    violations,
)
from tests.plan.times import end, start

ABOVE, BELOW = Worker(0, 0), Worker(0, 1)


def lending(**changes) -> Problem:
    """One pipeline of two stages of four layers, 4, 8 and 4 a layer-and-a-quarter; two micro-batches."""
    given = {"lend": ((2, 2),), "layers": (4, 4), "layer_held": ((1, 1), (1, 1)), "layer_parameters": (2, 3)}
    return Problem(Grid(2, (2,)), Costs((8, 8), (12, 12), (4, 4), 1, (5, 6), layer=((2, 3, 1), (2, 3, 1)), lent=(7, 9)),
                   before_b=(4, 4), after_b=(4, 4), **{**given, **changes})


def timed(problem: Problem, orders: dict[Worker, str], crossings=None) -> Plan:
    """The plan of these orders, with its own figures."""
    plan = Plan(problem, {worker: tuple(map(Action.parse, names.split())) for worker, names in orders.items()}, 0, 0, 0,
                "greedy", crossings=crossings or {})
    timeline = replay(plan)
    return replace(plan, period=timeline.period, makespan=timeline.makespan, lower_bound=lower_bound(problem))


ORDERS = {ABOVE: "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1 S", BELOW: "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1 S"}


def test_a_span_takes_the_time_of_its_layers():
    problem = lending()
    plan = timed(problem, ORDERS, {(0, 1): (2,)})
    assert violations(plan) == []
    assert [plan.duration(ABOVE, Action(kind, 0, 1)) for kind in ("F", "B", "W", "FB")] == [12, 18, 6, 24]
    assert [plan.duration(BELOW, Action(kind, 0, 1)) for kind in ("F", "B", "W", "FB")] == [4, 6, 2, 8]
    assert plan.duration(ABOVE, Action("F", 0, 0)) == 8 and plan.duration(ABOVE, Action("S")) == 5
    assert plan.span(0, 1, 0) == (0, 6) and plan.span(0, 1, 1) == (6, 8) and plan.span(0, 0, 1) == (4, 8)
    slow = replace(problem, costs=replace(problem.costs, speed={BELOW: 1.5}))
    assert slow.duration("F", BELOW, 0, (1,)) == 9 and slow.duration("W", ABOVE, 0, (-2,)) == 2
    assert replace(problem, split_backward=False).duration("B", ABOVE, 0, (1,)) == 12 + 4 + 3 + 1


def test_who_helps_whom():
    plan = timed(lending(), ORDERS, {(0, 0): (-1,), (0, 1): (2,)})
    assert list(lent(plan)) == [Lent(BELOW, ABOVE, 0, True, 1, 0, 0, 1), Lent(ABOVE, BELOW, 1, False, 2, 0, 1, 0)]
    assert borrowed(plan, ABOVE) == {(1, False): 2} and borrowed(plan, BELOW) == {(0, True): 1}
    assert pieces(plan, 0) == {ABOVE: ((0, 0, 0),)}


def test_a_helper_has_parameters_after_the_step_and_is_done_with_its_actions_before_it():
    plan = timed(lending(), ORDERS, {(0, 0): (2,)})
    timeline = replay(plan)
    done = start(plan, ABOVE, Action("S"))  # its sums leave when it has run everything
    last = end(plan, BELOW, Action("W", 0, 1))
    assert start(plan, BELOW, Action("S")) == max(done + 9, last)
    # Steady state: stage 1's step is 6 long, and its parameters are 7 later with the helper, which begins with F0.0.
    rest = start(plan, BELOW, Action("S")) - start(plan, ABOVE, Action("F", 0, 0))
    assert timeline.period == plan.period == rest + 6 + 7


def test_memory_counts_spans_and_lent_parameters():
    problem = lending()
    plan = timed(problem, ORDERS, {(0, 1): (2,)})
    assert (peak(plan, ABOVE), peak(plan, BELOW)) == (2 * 3 + 4 + 6, 4)
    tight = replace(plan, problem=replace(problem, cap={ABOVE: 15}), lower_bound=0)
    assert [text for text in violations(tight) if text.startswith("memory")] == [
        "memory: worker 0:0 holds 16 at F0.1, 6 of it for parameters of lent layers, its cap is 15"]


@pytest.mark.parametrize(("crossings", "block", "fault"), [
    ({(0, 1): (3,)}, 0, "crossing: micro-batch 1 of pipeline 0 crosses boundary 0 3 layers later than at home, 2 are"),
    ({(0, 1): (-3,)}, 0, "3 layers earlier"),
    ({(0, 2): (1,)}, 0, "crossing: micro-batch 2 of pipeline 0 is outside the grid"),
    ({(0, 1): (1, 1)}, 0, "lists 2 boundaries, there are 1"),
    ({(0, 1): (1,)}, 2, "block: block 0 of pipeline 0 crosses in several places"),
    ({(0, 0): (1,)}, 2, "block: block 0 of pipeline 0 crosses in several places"),
    ({(0, 0): (2,), (0, 1): (1,)}, 2, "block: block 0 of pipeline 0 crosses in several places"),
])
def test_crossings_that_are_refused(crossings, block, fault):
    plan = replace(timed(lending(block=block), ORDERS), crossings=crossings)
    assert any(fault in text for text in violations(plan)), violations(plan)


def test_a_chunk_keeps_a_layer_of_its_own():
    problem = lending(lend=((4, 4),))
    found = violations(timed(problem, ORDERS, {(0, 1): (4,)}))
    assert found == [
        "crossing: micro-batch 1 of pipeline 0 leaves chunk 1 none of its 4 layers; one at least stays at home"]


def test_nothing_is_lent_where_nothing_may_be():
    plan = replace(timed(lending(lend=()), ORDERS), crossings={(0, 0): (1,)})
    assert violations(plan) == [
        "crossing: micro-batch 0 of pipeline 0 crosses a boundary elsewhere, but nothing may be lent"]


def test_the_bound_holds_for_every_crossing():
    problem = replace(lending(), costs=replace(lending().costs, lent=(0, 0), step=(0, 0)))
    assert lower_bound(problem) == 2 * 2 * 24 // 2
    one = replace(problem, lend=((0, 1),))  # the earlier stage may help with one of eight layers, and no more
    assert lower_bound(one) == 2 * 24
    uneven = replace(one, costs=replace(one.costs, forward=(8, 80), layer=((2, 3, 1), (20, 3, 1))))
    assert lower_bound(uneven) == 2 * (96 - 24)


def test_the_file_keeps_chunks_and_lent_layers(tmp_path):
    plan = timed(lending(), ORDERS, {(0, 1): (2,), (0, 0): (0,)})
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.digest == plan.digest == again.stated and again.crossings == {(0, 1): (2,)}
    value = json.loads((tmp_path / "plan.json").read_text())
    assert value["crossings"] == {"0.1": [2]}
    assert value["lending"] == {"layers": [4, 4], "lend": [[2, 2]], "held": [[1, 1], [1, 1]], "parameters": [2, 3]}
    assert any(text.startswith("digest") for text in violations(
        Plan.from_json({**value, "crossings": {"0.1": [1]}})))
    for change, fault in (({"crossings": {"0.1": [1, 1]}}, "1 integers"), ({"crossings": {"x": [1]}}, "'x'"),
                          ({"crossings": []}, "crossings"), ({"placement": [0, 2]}, "stage 2"),
                          ({"placement": [0, 0]}, "stage 1 has no chunk"), ({"lending": {"lend": [1]}}, "lend"),
                          ({"lending": {**value["lending"], "lend": [[0, 5]]}}, "cannot move by 5 layers")):
        with pytest.raises(PlanError, match=fault):
            Plan.from_json({**value, **change})


VEE = (0, 1, 1, 0)


def vee(**changes) -> Problem:
    """Two stages, two chunks each: down and up again."""
    given = {"costs": Costs((1, 2, 3, 4), (1, 1, 1, 1), (1, 1, 1, 1), hop=10), "placement": VEE, "failed": ()}
    return Problem(Grid(2, (1, 1)), **{**given, **changes})


def orders(d: int) -> dict[Worker, str]:
    item = f"{d}.0"
    return {Worker(d, 0): f"F{item} F{item}/1 B{item}/1 W{item}/1 B{item} W{item} S",
            Worker(d, 1): f"F{item} F{item}/1 B{item}/1 W{item}/1 B{item} W{item} S"}


def test_a_worker_hands_over_to_itself_without_a_hop():
    plan = timed(vee(), {**orders(0), **orders(1)})
    assert violations(plan) == []
    timeline = replay(plan)
    assert start(plan, Worker(0, 1), Action("F", 0, 0, 1)) == end(plan, Worker(0, 1), Action("F", 0, 0)) == 13
    assert start(plan, Worker(0, 0), Action("F", 0, 0, 1)) == 13 + 3 + 10
    assert start(plan, Worker(0, 0), Action("B", 0, 0, 1)) == end(plan, Worker(0, 0), Action("F", 0, 0, 1)) == 30
    assert timeline.makespan == 30 + 1 + 10 + 1 + 1 + 1 + 10 + 2
    assert plan.route()[0, 0, 3] == Worker(0, 0) and pieces(plan, 3) == {Worker(0, 0): ((0, 0, 0),),
                                                                         Worker(1, 0): ((1, 0, 0),)}


def test_messages_are_called_as_their_readers_are():
    plan = timed(vee(), {**orders(0), **orders(1)})
    assert channels(plan)[Worker(0, 0), Worker(0, 1)] == (Message("F", 0, 0), Message("B", 0, 0, 1))
    assert channels(plan)[Worker(0, 1), Worker(0, 0)] == (Message("F", 0, 0, 1), Message("B", 0, 0))
    assert reads(plan, Worker(0, 0)) == ((Worker(0, 1), Message("F", 0, 0, 1)), (Worker(0, 1), Message("B", 0, 0)))
    assert read_by(plan, Worker(0, 0)) == {Message("F", 0, 0, 1): (), Message("B", 0, 0): (Message("F", 0, 0),)}
    assert str(Message("F", 0, 0, 1)) == "F0.0/1" and len(transfers(plan)) == 8


def test_peers_share_the_chunks_of_a_micro_batch():
    """At the turn the two chunks of a stage may be on two peers: then there is a message."""
    listed = {Worker(0, 0): "F0.0 F1.0 F0.0/1 F1.0/1 B0.0/1 W0.0/1 B1.0/1 W1.0/1 B0.0 W0.0 B1.0 W1.0 S",
              Worker(0, 1): "F0.0 F0.0/1 F1.0 B0.0/1 W0.0/1 B0.0 W0.0 B1.0 W1.0 S",
              Worker(1, 1): "F1.0/1 B1.0/1 W1.0/1 S"}
    plan = timed(vee(failed=(Worker(1, 0),)), listed)
    assert violations(plan) == []
    assert channels(plan)[Worker(0, 1), Worker(1, 1)] == (Message("F", 1, 0, 1),)
    assert channels(plan)[Worker(1, 1), Worker(0, 1)] == (Message("B", 1, 0),)


def test_rules_name_the_chunk():
    plan = timed(vee(), {**orders(0), **orders(1)})

    def broken(name: str) -> list[str]:
        return violations(replace(plan, workers={**plan.workers, Worker(0, 1): tuple(map(Action.parse, name.split()))}))

    assert "once: F0.0 is missing at chunk 2" in broken("F0.0 B0.0/1 W0.0/1 B0.0 W0.0 S")
    assert broken("F0.0/2 S") == ["chunk: F0.0/2 of worker 0:1, whose stage has 2 chunks"]
    assert any("order: B0.0/1 of worker 0:1 comes before its F0.0/1" in text
               for text in broken("F0.0 B0.0/1 F0.0/1 W0.0/1 B0.0 W0.0 S"))
    with pytest.raises(PlanError, match="F0.0/2 of worker 0:0, whose stage has 2 chunks"):
        Plan.from_json({**plan.to_json(), "workers": {**plan.to_json()["workers"], "0:0": ["F0.0/2", "S"]}})


def test_tied_chunks_of_one_stage_need_no_exchange():
    plan = timed(vee(tied=((0, 3),)), {**orders(0), **orders(1)})
    assert tied_pairs(plan) == frozenset() and plan.problem.group == (0, 1)
    plan = timed(vee(tied=((0, 2), (1, 3))), {**orders(0), **orders(1)})
    assert plan.problem.group == (0, 0) and len(tied_pairs(plan)) == 2


def test_the_usual_placement_has_one_spelling():
    problem = vee(costs=Costs.uniform(2, 1, 1, 1), placement=(0, 1))
    assert problem.placement == () and "placement" not in problem.to_json()
    with pytest.raises(PlanError, match="on stage 1, whose workers hold both"):
        vee(costs=replace(vee().costs, layer=((1, 1, 1),) * 4), layers=(2,) * 4, lend=((1, 1), (1, 1), (0, 0)))
