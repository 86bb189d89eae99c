"""Several chunks per stage, and crossings: what the planner returns is legal, with the figures of a slow replay."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_recycle.plan import Costs, Grid, Plan, PlanError, Problem, Worker, lent, lower_bound, replay, violations
from megatron_recycle.planner import plan_for, quick
from megatron_recycle.planner.alignment import aligned
from megatron_recycle.planner.greedy import schedule
from megatron_recycle.planner.instance import Schedule, build, plan_of, roomy, schedule_of, spanned
from megatron_recycle.planner.portfolio import TEMPLATES, filled, templates
from megatron_recycle.planner.routing import route
from megatron_recycle.planner.timing import timed
from tests.planner.problems import placed
from tests.seeds import examples


def slow(plan: Plan, iterations: int = 1) -> dict[tuple[int, Worker, int], tuple[int, int]]:
    """Start and end of every action, by iteration, worker and place, from a cold start: each after all that it waits
    for, by recursion."""
    problem, helps = plan.problem, list(lent(plan))
    given, summed = problem.costs.lent
    group = {stage: [s for s, g in enumerate(problem.group) if g == of] for stage, of in enumerate(problem.group)}
    last = {worker: len(actions) - 1 for worker, actions in plan.workers.items()}
    place = {(half, action.pipeline, action.microbatch, plan.chunk(worker, action)): (worker, i)
             for worker, actions in plan.workers.items() for i, action in enumerate(actions) if action.kind != "S"
             for half in {"FB": "BW"}.get(action.kind, action.kind)}

    def waits(worker: Worker, i: int):
        """(iterations before, worker, place, lag)"""
        action = plan.workers[worker][i]
        yield (0, worker, i - 1, 0) if i else (1, worker, last[worker], 0)
        if action.kind == "S":
            peers = [w for w in plan.workers if w.stage in group[worker.stage]]
            yield from ((0, w, last[w] - 1, 0) if last[w] else (1, w, last[w], 0) for w in peers)
            for x in helps:
                if problem.stage_of(x.chunk) in group[worker.stage]:
                    yield 0, x.helper, last[x.helper] - 1, summed
            return
        d, m, chunk = action.pipeline, action.microbatch, plan.chunk(worker, action)
        if action.kind == "F":
            needs = place["F", d, m, chunk - 1] if chunk else None
            yield from ((1, w, last[w], given) for x in helps if (x.pipeline, x.microbatch, x.by) == (d, m, chunk)
                        for w in plan.workers if w.stage in group[problem.stage_of(x.chunk)])
        elif action.kind == "W":
            needs = place["B", d, m, chunk]
        else:
            needs = place["B", d, m, chunk + 1] if chunk + 1 < problem.chunks else place["F", d, m, chunk]
        if needs is not None:
            yield 0, *needs, problem.costs.hop if needs[0] != worker else 0

    known = {(worker, i): list(waits(worker, i)) for worker in plan.workers for i in range(last[worker] + 1)}
    times: dict[tuple[int, Worker, int], tuple[int, int]] = {}

    def time(k: int, worker: Worker, i: int) -> int:
        if k < 0:
            return -10 ** 9
        if (k, worker, i) not in times:
            start = max(0, *(time(k - back, *other) + lag for back, *other, lag in known[worker, i]))
            times[k, worker, i] = start, start + plan.duration(worker, plan.workers[worker][i])
        return times[k, worker, i][1]

    for k in range(iterations):
        for worker, i in known:
            time(k, worker, i)
    return times


def same(plan: Plan) -> None:
    """The plan's figures are those of the slow replay."""
    timeline = replay(plan)
    times = slow(plan)
    assert all(timeline.times[worker][i] == span for (_, worker, i), span in times.items())
    assert plan.makespan == max(end for _, end in times.values())
    times = slow(plan, 30)
    last = [max(end for (k, *_), (_, end) in times.items() if k == at) for at in (9, 29)]
    assert abs(last[1] - last[0] - 20 * plan.period) <= 2 * plan.makespan + 50


@settings(max_examples=examples(50), deadline=None)
@given(placed())
def test_what_the_planner_returns_is_legal(problem):
    plan = quick(problem)
    assert violations(plan) == [] and plan.lower_bound <= plan.objective_value
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.digest == plan.digest == again.stated
    instance = build(problem)
    table, trace = schedule_of(instance, plan)
    assert plan_of(instance, Schedule(table, trace, plan.period, plan.makespan), 0, "greedy").workers == plan.workers


@settings(max_examples=examples(25), deadline=None)
@given(placed())
def test_what_a_search_returns_is_legal(problem):
    assert violations(plan_for(problem, work=500)) == []


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(placed().filter(lambda problem: problem.lends), st.data())
def test_any_crossings_are_scheduled_within_memory(problem, data):
    """Within what may be lent, given by hand."""
    instance = build(problem)
    known = {}
    for d, m in instance.jobs:
        if problem.block and m % problem.block:
            known[d, m] = known[d, m // problem.block * problem.block]
            continue
        crossing = [data.draw(st.integers(-earlier, later)) for earlier, later in problem.lend]
        for chunk, layers in enumerate(problem.layers):
            if -problem.more(chunk, tuple(crossing)).get(chunk, 0) >= layers:
                crossing = [0] * len(crossing)
        known[d, m] = tuple(crossing)
    crossings = tuple(zip(*(known[item] for item in instance.jobs)))
    alignment = aligned(instance)
    table = route(instance, alignment)
    wide = spanned(instance, table, crossings)
    assume(roomy(wide, table))
    template = data.draw(st.sampled_from(templates(problem)))
    trace = schedule(wide, table, filled(instance, alignment, table, template))
    plan = plan_of(instance, timed(instance, table, trace, crossings), 0, "greedy")
    assert [text for text in violations(plan) if not text.startswith(("bound", "memory"))] == []
    assert lower_bound(problem) <= plan.objective_value
    same(plan)


@settings(max_examples=examples(40), deadline=None)
@given(placed(lending=False))
def test_figures_are_those_of_a_slow_replay(problem):
    same(quick(problem))


def vee(pipelines: int, stages: int, microbatches: int, cap: int, failed=()) -> Problem:
    grid, chunks = Grid(stages, (microbatches,) * pipelines), 2 * stages
    return Problem(grid, Costs((10,) * chunks, (11,) * chunks, (9,) * chunks, step=(0,) * stages), failed,
                   cap=dict.fromkeys(grid.workers(), cap),
                   placement=(*range(stages), *reversed(range(stages))))


@pytest.mark.parametrize(("grid", "cap", "failed", "most"), [
    ((3, 4, 6), 8, (), 377), ((3, 4, 6), 10, (), 370), ((4, 4, 8), 12, (), 482), ((4, 4, 8), 16, (), 480),
    ((3, 4, 6), 12, (Worker(1, 2),), 540), ((4, 4, 8), 12, (Worker(1, 2),), 661),
    ((3, 4, 6), 12, (Worker(0, 2), Worker(0, 3)), 541),
])
def test_a_v_fills_the_bubbles(grid, cap, failed, most):
    """Units as in the benchmark, where 1F1B takes 540 (3x4x6) and 660 (4x4x8), and one chunk per stage 396 and 516. The
    cap counts halves of stages: 8 is what 1F1B holds."""
    plan = quick(vee(*grid, cap, failed))
    assert violations(plan) == [] and plan.period <= most


def test_one_chunk_per_stage_is_planned_as_before():
    assert templates(vee(1, 2, 2, 4)) != TEMPLATES
    grid = Grid(2, (2, 2))
    plain, spelled = (Problem(grid, Costs.uniform(2, 1, 1, 1), placement=placement) for placement in ((), (0, 1)))
    assert quick(plain).digest == quick(spelled).digest and templates(plain) == TEMPLATES


def test_messages_that_fit_no_cap_are_refused():
    """Where chunks begin anew at the first stage a worker reads two activations of a neighbour before a gradient."""
    grid = Grid(2, (4, 0, 0))
    problem = Problem(grid, Costs((20, 7, 20, 2), (19, 29, 14, 11), (0,) * 4), (Worker(1, 1),),
                      cap={Worker(0, 1): 6, Worker(2, 1): 6}, before_b=(1, 3, 2, 3), message=(1,) * 4, block=2,
                      placement=(0, 1, 0, 1))
    with pytest.raises(PlanError, match="raise the cap, or use fewer chunks"):
        quick(problem)


def test_a_cap_that_holds_no_micro_batch_in_all_of_its_chunks_is_refused():
    with pytest.raises(PlanError, match="no live worker's cap holds one micro-batch"):
        quick(vee(1, 2, 2, 1))


@pytest.mark.parametrize("gone, most", [([], 392), ([(0, 2)], 540), ([(0, 0)], 560), ([(0, s) for s in range(4)], 600)])
def test_interleaved_chunks_as_megatron_places_them(gone, most):
    """3x4x6, costs 20, 22, 18 of a stage, two chunks each, 1.5 S micro-batches of memory."""
    plan = quick(interleaved(gone, 12))
    assert violations(plan) == [] and plan.period <= most


@pytest.mark.parametrize("gone", [(0, 2), (0, 3)])
def test_messages_that_come_early_cost_some_time_rather_than_all_that_is_done_ahead(gone):
    plan = quick(interleaved([gone], 8, (1,) * 8))
    assert violations(plan) == [] and plan.period <= 690  # one after the other takes 1489


def interleaved(gone, cap, message=()):
    grid = Grid(4, (6,) * 3)
    return Problem(grid, Costs((10,) * 8, (11,) * 8, (9,) * 8, hop=1, step=(0,) * 4), tuple(Worker(*w) for w in gone),
                   cap=dict.fromkeys(grid.workers(), cap), message=message, placement=(0, 1, 2, 3) * 2)
