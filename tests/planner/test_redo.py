"""After a failure survivors go on from where they stand, and peers do what the dead worker was to do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_recycle.plan import (
    PASSES_ON,
    Action,
    Costs,
    Grid,
    Message,
    Plan,
    Problem,
    Transfer,
    Worker,
    channels,
    needs,
    passes_on,
    peak,
    pieces,
    reads,
    replay,
    surplus,
    transfers,
    violations,
)
from megatron_recycle.planner import quick, redo
from megatron_recycle.planner.terminal import bubbles, drawing, table
from tests.plan.queues import Queues, Rules
from tests.plan.times import start
from tests.planner.crossings import crossing
from tests.planner.problems import placed, problems
from tests.seeds import examples

Done = Mapping[Worker, tuple[Action, ...]]
"""What each worker has done."""


def cut(plan: Plan, steps: int, draw: random.Random) -> Done:
    """What all workers have done, done actions of the plan included, after so many more actions: each comes after its
    inputs, and which comes next is chance."""
    chunks = plan.problem.chunks
    done = {worker: list(actions[:plan.done.get(worker, 0)]) for worker, actions in plan.workers.items()}
    made = {(PASSES_ON[a.kind], a.pipeline, a.microbatch, plan.chunk(worker, a))
            for worker, actions in done.items() for a in actions if a.kind in PASSES_ON}

    def ready(worker: Worker) -> bool:
        kind, d, m, _ = action = plan.workers[worker][len(done[worker])]
        chunk = 0 if kind == "S" else plan.chunk(worker, action)
        if kind in ("F", "W", "S"):
            return kind == "W" or (kind == "F" and (not chunk or ("F", d, m, chunk - 1) in made))
        return chunk == chunks - 1 or ("B", d, m, chunk + 1) in made

    for _ in range(steps):
        able = [worker for worker in plan.workers if ready(worker)]
        if not able:
            break
        worker = draw.choice(able)
        action = plan.workers[worker][len(done[worker])]
        done[worker].append(action)
        if action.kind in PASSES_ON:
            made.add((PASSES_ON[action.kind], action.pipeline, action.microbatch, plan.chunk(worker, action)))
    return {worker: tuple(actions) for worker, actions in done.items()}


def killed(problem: Problem, draw: random.Random, most: int = 2) -> Problem | None:
    """The problem after one more death, or two at once; None if a stage would have nobody left."""
    for _ in range(draw.randint(1, most)):
        may = [worker for worker in problem.live_workers()
               if any(problem.fits(peer) for peer in problem.live(worker.stage) if peer != worker)]
        if not may:
            return None
        problem = problem.without([draw.choice(may)])
    return problem


def after_a_failure(plan: Plan, draw: random.Random) -> tuple[Plan, Done, Plan | None] | None:
    """A plan is run up to some moment, and some die: the plan for the new membership, what its workers have done, and
    the rest of the iteration."""
    actions = sum(map(len, plan.workers.values()))
    done = cut(plan, draw.randrange(actions + 1), draw)
    problem = killed(plan.problem, draw)
    if problem is None:
        return None
    base = quick(problem)
    kept = {worker: done[worker] for worker in problem.live_workers()}
    return base, kept, redo(base, kept)


def holds(base: Plan, done: Done, rest: Plan) -> None:
    """The rest of the iteration is a legal plan, begins with what was done, and is the same for all who ask."""
    assert violations(rest) == []
    assert Plan.from_json(rest.to_json()) == rest and rest.problem == base.problem
    for worker, actions in rest.workers.items():
        assert actions[:len(done.get(worker, ()))] == done.get(worker, ())
        assert rest.done.get(worker, 0) == len(done.get(worker, ()))
        assert rest.rest(worker)[-1] == Action("S")
    assert redo(base, done) == rest


def grid_of(pipelines: int, stages: int, microbatches: int, failed: tuple[str, ...] = (), **changes) -> Problem:
    grid = Grid(stages, (microbatches,) * pipelines)
    usual = {"cap": dict.fromkeys(grid.workers(), stages), "costs": Costs.uniform(stages, 20, 22, 18, 1, 15)}
    return Problem(grid, failed=tuple(map(Worker.parse, failed)), **{**usual, **changes})


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


@settings(max_examples=examples(60), deadline=None)
@given(problem=placed(), seed=st.integers(0, 10 ** 6))
def test_micro_batches_with_lent_layers_go_on_to_cross_where_they_did(problem, seed):
    """After each of several failures; the plan for the members that are left lends nothing."""
    draw = random.Random(seed)
    assume(problem.lends)
    plan = crossing(quick(problem), draw)
    assume(plan.crossings and not violations(plan))
    for _ in range(3):
        done = cut(plan, draw.randrange(sum(map(len, plan.workers.values())) + 1), draw)
        now = killed(plan.problem, draw)
        if now is None:
            return
        base = quick(replace(now, lend=(), layers=(), layer_held=(), layer_parameters=(),
                             costs=replace(now.costs, layer=(), lent=(0, 0))))
        kept = {worker: done[worker] for worker in now.live_workers()}
        rest = redo(base, kept, lent=plan)
        if rest is None:
            assert problem.cap or problem.block
            return
        assert violations(rest) == [] and Plan.from_json(rest.to_json()) == rest
        assert rest.crossings == plan.crossings and rest.problem.failed == now.failed
        assert all(rest.workers[worker][:rest.done.get(worker, 0)] == actions for worker, actions in kept.items())
        plan = rest


def test_the_rest_of_a_plan_that_lends_is_not_planned_for_another_grid():
    plan = quick(grid_of(2, 2, 3))
    other = replace(plan, problem=replace(plan.problem, grid=Grid(2, (4, 4))))
    assert redo(plan, {Worker(0, 0): actions("F0.0")}, lent=other) is None
    assert redo(plan, {Worker(0, 0): actions("F0.0")}, closed=[1], lent=plan) is None


@settings(max_examples=examples(80), deadline=None)
@given(problem=st.one_of(problems(), placed(lending=False)), seed=st.integers(0, 10 ** 6))
def test_the_rest_of_any_iteration_is_a_legal_plan_after_each_of_several_failures(problem, seed):
    """Of random grids, chunks, blocks and caps, and from any moment of the plan of the failure before."""
    draw = random.Random(seed)
    plan = quick(problem)
    for _ in range(3):
        found = after_a_failure(plan, draw)
        if found is None:
            return
        base, done, rest = found
        if rest is None:  # memories are full of what was done
            assert problem.cap
            return
        holds(base, done, rest)
        plan = rest


def test_the_rest_takes_about_its_share_of_the_time():
    """By share of the iteration that was done, the rest against the whole iteration by the plan from scratch."""
    ratios: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for shape in ((3, 4, 6), (4, 2, 8), (2, 3, 5), (5, 4, 8)):
        for block in (0, 2):
            for seed in range(6):
                plan, draw = quick(grid_of(*shape, block=block)), random.Random(seed)
                total = sum(len(listed) - 1 for listed in plan.workers.values())
                for third in ratios:
                    done = cut(plan, total * third // 3, draw)
                    problem = killed(plan.problem, draw, most=1)
                    base = quick(problem)
                    rest = redo(base, {worker: done[worker] for worker in problem.live_workers()})
                    ratios[third].append(rest.makespan / base.makespan)
    assert max(ratios[0]) == 1 and max(ratios[1]) < 1 and max(ratios[2]) < 0.8
    assert median(ratios[1]) < 0.8 and median(ratios[2]) < 0.6


def test_a_micro_batch_stays_where_it_was_begun_and_the_dead_workers_go_to_peers():
    plan = quick(grid_of(3, 2, 4))
    done = {worker: tuple(listed[:5]) for worker, listed in plan.workers.items() if worker != Worker(1, 1)}
    rest = redo(quick(grid_of(3, 2, 4, ("1:1",))), done)
    route = rest.route()
    for worker, listed in done.items():
        assert all(route[action.pipeline, action.microbatch, worker.stage] == worker for action in listed)
    taken = [route[1, m, 1] for m in range(4)]
    assert {taken.count(Worker(d, 1)) for d in (0, 2)} == {2}, "both peers take the same share"


def test_what_a_dead_worker_had_made_is_made_again_for_its_own_backward_alone():
    """The last stage has come back already: its gradient waits for the forward that is run again."""
    problem = grid_of(2, 2, 1, ("1:0",))
    done = {Worker(1, 1): actions("F1.0 B1.0")}
    rest = redo(quick(problem), done)
    again = actions("F1.0 B1.0 W1.0")
    assert [action for action in rest.workers[Worker(0, 0)] if action.pipeline == 1] == [*again]
    assert {message for messages in channels(rest).values() for message in messages if message.pipeline == 1} == {
        Message("B", 1, 0)}
    assert reads(rest, Worker(1, 1)) == ()
    assert replay(rest).times[Worker(1, 1)][:2] == ((0, 0), (0, 0))
    assert start(rest, Worker(0, 0), Action("B", 1, 0)) >= 20, "after its own forward"


def test_whatever_was_sent_is_there_a_hop_after_the_beginning():
    problem = grid_of(2, 2, 2, ("1:1",))
    rest = redo(quick(problem), {Worker(1, 0): actions("F1.1 F1.0")})
    assert start(rest, Worker(0, 1), Action("F", 1, 0)) == problem.costs.hop
    assert channels(rest)[Worker(1, 0), Worker(0, 1)] == (Message("F", 1, 1), Message("F", 1, 0))


def test_with_the_same_members_everybody_goes_on_by_the_same_plan():
    plan = quick(grid_of(3, 4, 6, ("1:2",)))
    done = cut(plan, 80, random.Random(1))
    rest = redo(plan, done)
    assert rest.workers == plan.workers and violations(rest) == [] and rest.makespan < plan.makespan
    assert redo(plan, {}) == plan == redo(plan, {Worker(0, 0): ()})
    assert redo(rest, done) == rest, "nothing has been done since"
    later = redo(rest, cut(rest, 20, random.Random(1)))
    assert violations(later) == [] and later.workers == plan.workers and later.makespan < rest.makespan


def test_a_plan_that_begins_later_than_its_workers_stand_is_not_followed():
    rest = redo(quick(grid_of(2, 2, 2, ("1:0",))), {Worker(1, 1): actions("F1.0 B1.0")})
    fresh = redo(rest, {})
    assert violations(fresh) == [] and not fresh.done


def test_full_backwards_that_were_done_stay():
    plan = quick(grid_of(3, 2, 8, full_backward=(0,)))
    first, place = Worker(0, 0), [action.kind for action in plan.workers[Worker(0, 0)]].index("FB")
    done = {worker: listed[:place + 1] if worker.stage == 0 else listed[:-1]
            for worker, listed in plan.workers.items() if worker != Worker(1, 1)}
    rest = redo(quick(grid_of(3, 2, 8, ("1:1",), full_backward=(0,))), done)
    assert violations(rest) == [] and rest.workers[first][place].kind == "FB"


def test_a_b_and_its_w_are_not_joined_across_what_was_done():
    done = {Worker(0, 0): actions("F0.0 F0.1 B0.0 W0.0 B0.1"), Worker(0, 1): actions("F0.0 B0.0 W0.0 F0.1 B0.1 W0.1")}
    rest = redo(quick(grid_of(2, 2, 3, ("1:1",), full_backward=(0,))), done)
    assert violations(rest) == [] and Action("W", 0, 1) in rest.rest(Worker(0, 0))


def test_a_block_goes_to_who_is_past_it_if_there_is_nobody_else():
    """Peers sum the blocks of a pipeline in order: one that comes after a later one is a piece of its own."""
    problem = grid_of(3, 1, 4, ("1:0",), block=2, cap={})
    past = actions("F1.2 B1.2 W1.2 F1.3 B1.3 W1.3")
    rest = redo(quick(problem), {Worker(0, 0): past})
    assert violations(rest) == [] and rest.route()[1, 0, 0] == rest.route()[1, 1, 0] == Worker(2, 0)
    assert pieces(rest, 0) == {Worker(0, 0): ((0, 0, 1), (1, 1, 1)), Worker(2, 0): ((1, 0, 0), (2, 0, 1))}
    alone = redo(quick(grid_of(3, 1, 4, ("1:0", "2:0"), block=2, cap={})), {Worker(0, 0): past})
    assert violations(alone) == []
    assert pieces(alone, 0) == {Worker(0, 0): ((0, 0, 1), (1, 0, 0), (1, 1, 1), (2, 0, 1))}
    begun = redo(quick(problem), {Worker(0, 0): actions("F1.2"), Worker(2, 0): past[:0]})
    assert {begun.route()[1, m, 0] for m in (2, 3)} == {Worker(0, 0)}, "a block that was begun stays whole"


def test_memory_that_is_full_of_what_was_done_is_freed_first():
    """0:1 holds two micro-batches, all that it may: it comes back from them before it takes those of the dead."""
    problem = grid_of(2, 2, 4, ("1:1",), cap={Worker(0, 1): 2})
    done = {Worker(0, 0): actions("F0.0 F0.1 F0.2"), Worker(0, 1): actions("F0.0 F0.1"),
            Worker(1, 0): actions("F1.0 F1.1")}
    rest = redo(quick(problem), done)
    assert violations(rest) == []
    assert rest.rest(Worker(0, 1))[0].kind == "B"


def test_memory_is_kept_for_messages_that_wait_in_a_log_in_another_order():
    """1:0 has sent its last micro-batch first. 0:1 reads them in order, and has to take in the others before."""
    sent = {Worker(1, 0): actions("F1.3 F1.2 F1.1 F1.0")}
    changes = {"cap": {Worker(0, 1): 4}, "message": (1, 1)}
    rest = redo(quick(grid_of(2, 2, 4, ("1:1",), **changes)), sent)
    assert surplus(rest) and violations(rest) == []
    free = redo(quick(grid_of(2, 2, 4, ("1:1",), cap={Worker(0, 1): 4})), sent)
    assert peak(rest, Worker(0, 1)) < peak(free, Worker(0, 1))


def test_what_nobody_waits_for_comes_last():
    """At half of the iteration the others have come back from most that the dead workers had done: it is lacking in the
    peers' sums alone, and run first it would keep all stages waiting."""
    plan = quick(grid_of(6, 4, 32))
    timeline = replay(plan)
    base = quick(grid_of(6, 4, 32, ("3:1", "5:2")))
    done = {worker: tuple(action for action, (_, end) in zip(plan.workers[worker], timeline.times[worker])
                          if end <= timeline.makespan // 2) for worker in base.workers}
    rest = redo(base, done)
    assert violations(rest) == [] and rest.makespan < 1.1 * rest.lower_bound


@pytest.mark.parametrize("done", [
    {"1:1": "F1.0"}, {"7:0": "F1.0"}, {"0:0": "B0.0"}, {"0:0": "F0.0 F0.0"}, {"0:0": "F0.0", "2:0": "F0.0"},
    {"0:0": "F0.0 W0.0"}, {"0:0": "F0.9"}, {"0:0": "F9.0"}, {"0:0": "F0.0/1"}, {"0:0": "F0.0 FB0.0"}, {"0:0": "S"},
    {"0:0": "F0.0", "2:0": "B0.0"},
], ids=str)
def test_nothing_goes_on_from_what_no_legal_plan_has_done(done):
    base = quick(grid_of(3, 2, 4, ("1:1",)))
    assert redo(base, {Worker.parse(name): actions(text) for name, text in done.items()}) is None


def test_the_rest_lends_nothing_where_the_interrupted_plan_did_not():
    base = quick(grid_of(2, 2, 2, ("1:1",), layers=(2, 2), lend=((1, 1),), layer_held=((0, 0),) * 2,
                         costs=replace(Costs.uniform(2, 20, 22, 18, 1, 15), layer=((5, 5, 5),) * 2)))
    rest = redo(replace(base, crossings={(0, 0): (1,)}), {Worker(0, 0): actions("F0.0")})
    assert rest is not None and not rest.crossings and violations(rest) == []


@pytest.mark.parametrize("rules", [Rules(), Rules(cut="pair", connected=False, host_waits=True, exact=True)], ids=str)
def test_transfers_of_the_rest_come_to_their_end(rules):
    """What done actions have made comes first, and what they have read does not come again."""
    draw = random.Random(1)
    for shape in ((2, 2, 4), (3, 4, 6), (4, 3, 5)):
        plan = quick(grid_of(*shape))
        for _ in range(6):
            _, _, rest = after_a_failure(plan, draw)
            assert not (stuck := Queues(rest, rules, iterations=1).stuck()), "\n".join(stuck)
            assert sorted(transfers(rest)) == sorted(wanted(rest))


def wanted(rest: Plan) -> list[Transfer]:
    """What the actions that are left read from other workers, whoever has made it or will."""
    route, found = rest.route(), []
    for worker in rest.workers:
        for kind, d, m, _ in rest.rest(worker):
            if kind != "W" and (source := route.get((d, m, worker.stage + (-1 if kind == "F" else 1)))):
                found.append(Transfer(source, worker, Message("F" if kind == "F" else "B", d, m)))
    return found


def test_the_table_and_the_drawing_are_of_what_is_left():
    done = {Worker(0, 0): actions("F0.0 F0.1 B0.0 W0.0"), Worker(0, 1): actions("F0.0 B0.0 W0.0")}
    costs = Costs.uniform(2, 1, 1, 1)
    rest = redo(quick(grid_of(2, 2, 2, ("1:1",), costs=costs)), done)
    assert "done before       7 actions; the figures are of the rest" in table(rest, {})
    row = next(line for line in drawing(rest, 80, False).splitlines() if line.startswith("   0:1"))
    assert sorted(row[8:].replace("·", "")) == sorted("FBWffbbww")
    assert bubbles(rest) == 1 - (2 + 6 + 9) / (3 * rest.makespan)


def closed_in(plan: Plan, done: Done) -> list[int]:
    """The stages whose workers have done all that they list, and whose messages are all used."""
    used = {(worker, message) for worker, listed in done.items() for action in listed
            if (read := needs(plan, worker, action)) for message in [read[1]]}
    unused = {worker for worker, listed in plan.workers.items() for action in listed
              if (sent := passes_on(plan, worker, action)) and sent not in used}
    return [stage for stage in range(plan.problem.grid.stages)
            if all(worker not in unused and len(done[worker]) == len(plan.workers[worker]) - 1
                   for worker in plan.problem.live(stage))]


@settings(max_examples=examples(40), deadline=None)
@given(problem=problems(), seed=st.integers(0, 10 ** 6))
def test_nothing_of_a_stage_that_is_closed_is_run_again_after_one_death(problem, seed):
    """Its scripts may have left the iteration."""
    assume(not (problem.block and problem.full_backward))  # blocks are for `exact`, which has no full backwards
    draw, plan = random.Random(seed), quick(problem)
    total = sum(len(listed) - 1 for listed in plan.workers.values())
    done = cut(plan, total - draw.randrange(1 + total // 4), draw)
    closed = closed_in(plan, done)
    after = killed(problem, draw, most=1)
    if after is None:
        return
    kept = {worker: done[worker] for worker in after.live_workers()}
    rest = redo(quick(after), kept, closed)
    if rest is None:
        assert problem.cap
        return
    assert violations(rest) == []
    for worker, listed in rest.workers.items():
        assert set(kept.get(worker, ())) <= set(listed[:rest.done.get(worker, 0)])
        assert worker.stage not in closed or rest.rest(worker) == (Action("S"),)
        for action in rest.rest(worker):
            read = needs(rest, worker, action)
            if read is not None and read[0].stage in closed:
                made = {sent[1] for each in kept[read[0]] if (sent := passes_on(rest, read[0], each))}
                assert read[1] in made, "it is in a live worker's log"


def test_a_message_that_only_the_dead_had_stops_a_closed_stage():
    """1:1 had made the gradient, and 1:0 had used it: the stage would have to run it again."""
    done = {worker: tuple(listed[:-1]) for worker, listed in quick(grid_of(3, 2, 2)).workers.items()}
    both = grid_of(3, 2, 2, ("1:0", "1:1"))
    kept = {worker: done[worker] for worker in both.live_workers()}
    assert redo(quick(both), kept, [1]) is None
    one = grid_of(3, 2, 2, ("1:0",))
    rest = redo(quick(one), {worker: done[worker] for worker in one.live_workers()}, [1])
    assert rest is not None and {worker.stage for worker in rest.workers if len(rest.rest(worker)) > 1} == {0}
