"""Layers are lent where that levels the load: legally, never to a job's harm, and the same every time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recycle.plan import Costs, Grid, Problem, Worker, borrowings, replay, violations
from megatron_recycle.planner import improve, lent_schedules, plan_for, quick
from megatron_recycle.planner.alignment import aligned
from megatron_recycle.planner.crossing_flow import ORDERS, Flow
from megatron_recycle.planner.instance import build, crossings_of, plan_of
from megatron_recycle.planner.routing import route
from tests.planner.problems import problems
from tests.seeds import examples


def job(pipelines, stages, microbatches, failed, layers=4, lend=2, **more):
    """The benchmark's costs with so many layers a stage, in units of a layer; activation memory 1.5 S micro-batches."""
    grid = Grid(stages, (microbatches,) * pipelines)
    costs = Costs.uniform(stages, 20 * layers, 22 * layers, 18 * layers)
    return Problem(grid, replace(costs, layer=((20, 22, 18),) * stages), tuple(Worker(*w) for w in failed),
                   cap=dict.fromkeys(grid.workers(), stages * 3 // 2 * layers), before_b=(layers,) * stages,
                   after_b=(layers,) * stages, layers=(layers,) * stages, lend=((lend, lend),) * (stages - 1),
                   layer_held=((1, 1),) * stages, layer_parameters=(0,) * stages, **more)


def vee(pipelines, stages, microbatches, failed, layers=4, lend=1):
    """The same with two chunks of half the layers on each worker, down the stages and up again."""
    plain, placement, half = job(pipelines, stages, microbatches, failed), (*range(stages), *reversed(range(stages))), (
        layers // 2)
    return Problem(plain.grid, replace(Costs.uniform(2 * stages, 20 * half, 22 * half, 18 * half), step=(0,) * stages,
                                       layer=((20, 22, 18),) * 2 * stages), plain.failed,
                   cap=dict.fromkeys(plain.grid.workers(), stages * 3 // 2 * layers), before_b=(half,) * 2 * stages,
                   after_b=(half,) * 2 * stages, placement=placement, layers=(half,) * 2 * stages,
                   lend=tuple((0, 0) if c == stages - 1 else (lend, lend) for c in range(2 * stages - 1)),
                   layer_held=((1, 1),) * 2 * stages)


@st.composite
def lending_problems(draw):
    """Any problem, some of whose layers may be lent."""
    problem = draw(problems())
    stages = problem.grid.stages
    layers = tuple(draw(st.integers(0, 4)) for _ in range(stages))
    lend = tuple((draw(st.integers(0, layers[c])), draw(st.integers(0, layers[c + 1]))) for c in range(stages - 1))
    few = st.integers(0, 7)
    costs = replace(problem.costs, layer=tuple((draw(few), draw(few), draw(few)) for _ in range(stages)),
                    lent=(draw(few), draw(few)))
    return replace(problem, costs=costs, layers=layers, lend=lend, message=(),
                   layer_held=tuple((draw(st.integers(0, 1)), draw(st.integers(0, 1))) for _ in range(stages)),
                   layer_parameters=tuple(draw(st.integers(0, 1)) for _ in range(stages)))


@settings(max_examples=examples(150), deadline=None)
@given(lending_problems())
def test_lending_is_legal_never_worse_than_rerouting_and_the_same_every_time(problem):
    plan = quick(problem)
    assert violations(plan) == []
    assert replay(plan).period == plan.period
    assert plan.objective_value <= quick(replace(problem, lend=())).objective_value
    assert quick(problem).digest == plan.digest
    if not (problem.failed or problem.costs.speed):
        assert not plan.crossings, "a healthy job runs every layer at home"


@settings(max_examples=examples(100), deadline=None)
@given(lending_problems(), st.sampled_from(sorted(ORDERS)), st.booleans())
def test_no_work_is_lost_where_layers_cost_the_same_everywhere(problem, order, spread):
    if not problem.lends:
        return
    stages = problem.grid.stages
    costs = replace(problem.costs, speed={}, layer=((3, 2, 1),) * stages, forward=(30,) * stages,
                    backward_input=(20,) * stages, backward_weight=(10,) * stages)
    instance = build(replace(problem, costs=costs))
    lendable = lent_schedules.lendable(instance, route(instance, aligned(instance)))
    flow = Flow(lendable)
    even = sum(flow.base) / len(flow.base)
    flow.levelled([even] * len(flow.base))
    crossings = flow.crossings(order, spread)
    loads = lendable.loads(crossings)
    assert sum(loads) == sum(flow.base)
    assert max(loads) <= max(flow.base)
    for c, (earlier, later) in enumerate(problem.lend):
        assert all(-earlier <= by <= later for by in crossings[c])


def test_a_job_whose_layers_take_no_time_is_planned_too():
    free = job(3, 4, 6, [(1, 2)])
    problem = replace(free, costs=replace(Costs.uniform(4, 0, 0, 0, step=1), layer=free.costs.layer))
    assert violations(quick(problem)) == []


def test_lending_is_no_worse_than_rerouting_where_early_messages_take_the_memory_either():
    caps = {(0, 0): 5, (0, 2): 5, (1, 2): 2, (2, 2): 7}
    problem = Problem(
        Grid(3, (2, 4, 1)), replace(Costs.uniform(6, 20, 20, 20, speed={Worker(0, 0): 10.0}), step=(0, 0, 0),
                                    layer=((1, 1, 1),) * 6),
        tuple(Worker(*w) for w in ((1, 0), (1, 1), (2, 0), (2, 1))), {Worker(*w): cap for w, cap in caps.items()},
        message=(2,) * 6, placement=(0, 1, 2, 2, 1, 0), layers=(4, 3, 2, 4, 1, 3),
        lend=((3, 3), (3, 1), (0, 0), (1, 1), (1, 3)),
        layer_held=((0, 0), (0, 1), (1, 1), (1, 0), (1, 0), (1, 1)))
    plan = quick(problem)
    assert violations(plan) == [] and plan.period <= quick(replace(problem, lend=())).period


def test_eleven_workers_carry_the_load_of_twelve_in_cascade():
    """One of 3x4x6 dead: 288 layers of micro-batches (4 of each of 18 at 4 stages) on 11 workers, 27 at most."""
    instance = build(job(3, 4, 6, [(1, 2)]))
    lendable = lent_schedules.lendable(instance, route(instance, aligned(instance)))
    flow = Flow(lendable)
    assert max(flow.base) == 36 * 60
    assert flow.levelled([27 * 60] * 11)
    assert max(lendable.loads(flow.crossings("middle", True))) == 27 * 60
    assert not flow.levelled([26 * 60] * 11)


def test_a_chunk_that_gives_at_both_ends_keeps_a_layer():
    """Two of one stage's four dead: its two chunks of two layers give one of them to either side, never both. 512
    layers of micro-batches on 14 workers are 37 for each."""
    instance = build(vee(4, 4, 8, [(0, 2), (1, 2)]))
    lendable = lent_schedules.lendable(instance, route(instance, aligned(instance)))
    flow = Flow(lendable)
    assert flow.levelled([37 * 60] * 14)
    assert max(lendable.loads(flow.crossings("even", True))) <= 39 * 60


@pytest.mark.parametrize("job_, most, rerouted", [
    (job(3, 4, 6, [(1, 2)]), 448, 552), (job(3, 4, 6, [(0, 2), (0, 3)]), 498, 576), (job(4, 4, 8, [(1, 2)]), 584, 672),
    (job(4, 4, 8, [(0, 2), (0, 3)]), 634, 696), (job(3, 4, 6, [(1, 2)], 8, block=3), 466, 570),
    (vee(3, 4, 6, [(1, 2)]), 426, 540), (vee(4, 4, 8, [(1, 2)]), 544, 660),
    (vee(4, 4, 8, [(0, 2), (0, 3)], 8, 2), 574, 661), (vee(4, 4, 8, [(0, 2), (1, 2)]), 580, 960)])
def test_at_once_a_dead_worker_costs_little_more_than_its_share(job_, most, rerouted):
    layers = sum(job_.layers) // job_.grid.stages
    plan = quick(job_)
    assert violations(plan) == []
    assert plan.period / layers <= most
    assert quick(replace(job_, lend=())).period / layers >= rerouted


@pytest.mark.night
@pytest.mark.parametrize("job_, most", [
    (vee(3, 4, 6, [(1, 2)]), 421.8), (vee(4, 4, 8, [(1, 2)]), 541), (vee(4, 4, 8, [(0, 2), (0, 3)]), 584),
    (job(3, 4, 6, [(1, 2)]), 445), (job(3, 4, 6, [(1, 2)], 8), 445), (job(3, 4, 6, [(0, 2), (0, 3)]), 495),
    (job(4, 4, 8, [(1, 2)]), 573), (job(4, 4, 8, [(0, 2), (0, 3)]), 621), (job(4, 4, 8, [(0, 2), (0, 3)], 8), 622)])
def test_a_search_of_seconds_meets_the_aims(job_, most):
    """0.89 and 0.80 of 396 units at 3x4x6, 0.90 and 0.83 of 516 at 4x4x8; with V 540 / 1.28 at 3x4x6, 0.95 and 0.88 of
    516 at 4x4x8."""
    instance = build(job_)
    best = lent_schedules.search(instance, 3_000_000).best
    assert best is not None and violations(plan_of(instance, best, 0, "portfolio")) == []
    assert best.period / (sum(job_.layers) // job_.grid.stages) <= most


def test_lent_parameters_weigh_on_the_cap_of_their_helper():
    free = job(3, 4, 6, [(1, 2)])
    problem = replace(free, layer_parameters=(5,) * 4)
    plan = quick(problem)
    assert violations(plan) == [] and plan.crossings
    assert max(sum(held.values()) for held in borrowings(plan).values()) * 5 <= 20  # 24, less one micro-batch's 4
    assert not quick(replace(free, layer_parameters=(30,) * 4)).crossings


def test_a_slow_worker_lends_too():
    free = job(3, 4, 6, [])
    problem = replace(free, costs=replace(free.costs, speed={Worker(1, 2): 1.5}))
    assert quick(problem).period < quick(replace(problem, lend=())).period


def test_crossings_pass_through_cache_file_and_searching_process(tmp_path):
    problem = job(2, 3, 4, [(1, 1)], block=2)
    plan = plan_for(problem, work=20_000)
    assert plan.crossings and violations(plan) == []
    plan.save(tmp_path / "plan.json")
    assert type(plan).load(tmp_path / "plan.json").digest == plan.digest
    better = improve(problem, quick(problem), 1.0)
    assert better is None or violations(better) == []
    instance = build(problem)
    assert crossings_of(instance, plan) and crossings_of(instance, quick(replace(problem, lend=()))) == ()
