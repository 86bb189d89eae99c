"""Layers next to a stage boundary are run by a neighbouring stage's workers, as crossings that are given by hand say.

Training ends with the bits of a job without failures in which every layer stays at home.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs
from torch import nn

from megatron_recycle.control.planning import Planning
from megatron_recycle.membership.decisions import MakeRedo
from megatron_recycle.membership.description import Job as Described
from megatron_recycle.plan import Costs, Microbatch, Plan, violations
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.runtime.lent.layers import offer
from tests.in_memory_job import control
from tests.in_memory_job.job import Job, Shape, check, undisturbed
from tests.in_memory_job.model import SmallStage
from tests.in_memory_job.scenes import PER_MICROBATCH, PHASES, Draw
from tests.in_memory_job.scenes import SHAPES as JOBS
from tests.moments import Moment
from tests.planner.crossings import crossing
from tests.seeds import by_day, rows, seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(3, 2, 4, 3, blocks=4).with_settings(lend="auto")
DEEP = Shape(3, 3, 4, 3, blocks=7).with_settings(lend="auto")
SHAPES = {name: shape.with_settings(lend="auto") for name, shape in {
    **{name: replace(shape, blocks=3 * shape.stages - 2) for name, shape in JOBS.items()},
    "sharded": Shape(3, 2, 2, 3, blocks=4, sharded=True), "two layers": Shape(3, 3, 3, 3, blocks=4),
    "long blocks": Shape(3, 3, 6, 3, blocks=7).with_settings(block=2),
}.items()}
V = Shape(3, 2, 4, 3, blocks=10, chunks=2).with_settings(lend="auto")
CHUNKED = {name: shape.with_settings(lend="auto") for name, shape in {
    "V": V, "V, 3x3": Shape(3, 3, 3, 3, blocks=13, chunks=2),
    "V, long blocks": replace(V, microbatches=6).with_settings(block=2), "V, tied": replace(V, tied=True),
    "V, evaluates": replace(V, evaluate=(1, 2), save=(1, 2)),
    "interleaved": replace(V, interleaved=True), "W": Shape(3, 2, 4, 3, blocks=13, chunks=3),
    "V, sharded": replace(V, sharded=True, tied=True).with_settings(state_copies=3),
    "interleaved, sharded": replace(V, interleaved=True, sharded=True).with_settings(state_copies=3),
    "interleaved, tied": replace(V, interleaved=True, tied=True), "V, waits": V.with_settings(step="barrier"),
    "V, clipped": replace(V, clipping=0.05), "V, 2x3": Shape(2, 3, 3, 3, blocks=13, chunks=2),
}.items()}


def limits(shape: Shape) -> list[tuple[int, int]]:
    """How many layers at its head and its tail each chunk lends."""
    found = {}
    for stage in range(shape.stages):
        made = SmallStage(stages=shape.stages, stage=stage, pipelines=1, microbatches=1, blocks=shape.blocks,
                          placement=shape.placement)
        own = [chunk for chunk, at in enumerate(shape.placement or range(shape.stages)) if at == stage]
        found.update(zip(own, [chunk.lending for chunk in made.chunks], strict=True))
    return [found[chunk].lendable for chunk in range(len(found))]


def crossings(plan: Plan, seed: int) -> dict[Microbatch, tuple[int, ...]]:
    """Any that the job may have, drawn by the plan's digest: the same for all micro-batches of a block."""
    grid, found = plan.problem.grid, {}
    for d, m in grid.items():
        draw = random.Random(f"{seed} {plan.digest} {d} {m // plan.problem.block if plan.problem.block else m}")
        found[d, m] = tuple(draw.randint(-earlier, later) for earlier, later in plan.stats["may lend"])
    return {microbatch: each for microbatch, each in found.items() if any(each)}


@pytest.fixture
def lends(monkeypatch):
    """The plans of a job lend layers, always or once somebody has failed."""
    def lend(shape: Shape, seed: int, always: bool = False) -> None:
        undisturbed(shape.with_settings(step="barrier"))
        monkeypatch.setattr("megatron_recycle.runtime.lent.terms.crossings_of",
                            lambda plan: crossings(plan, seed) if not plan.done and (
                                always or plan.problem.failed) else {})

    return lend


@pytest.fixture
def plans_lend(monkeypatch):
    """The coordinator's plans lend layers, as plan files say it: any that may be lent."""
    made, plan, redo = dict[str, Plan](), control._plan, Planning.redo

    def planned(described: Described, failed: frozenset[str]) -> PlanFile:
        found, lending = Plan.from_file(plan(described, failed)), described.lending
        if lending is None:
            return found.to_file()
        problem, chunks = found.problem, found.problem.chunks
        problem = replace(problem, layers=lending.layers, lend=lending.lend,
                          layer_held=((0, 0),) * chunks, layer_parameters=(0,) * chunks, objective="makespan",
                          costs=replace(problem.costs, layer=((0, 0, 0),) * chunks, lent=(0, 0)))
        better = crossing(replace(found, problem=problem), random.Random(found.digest))
        made[better.digest] = better
        return better.to_file()

    def rest(self: Planning, described: Described, order: MakeRedo) -> PlanFile | None:
        self._lent.update(made)
        return redo(self, described, order)

    monkeypatch.setattr(control, "_plan", planned)
    monkeypatch.setattr(Planning, "redo", rest)
    return made


def borrows(job: Job) -> bool:
    """Whether some worker has run a layer of another stage in its last iteration."""
    workers = [process.worker for process in job.processes.values()]
    return any(worker is not None and worker.site.trainable.neighbours.parameters for worker in workers)


def play(shape: Shape, seed: int, *kills: Moment, within: float = 0.0, slow: float = 0.0) -> None:
    job = Job(shape, kills, seed=seed, slow=slow)
    with job:
        check(job, job.wait(), {kill.worker for kill in kills}, within=within)
        assert borrows(job)


@pytest.mark.parametrize("shape", [SHAPE, DEEP, SHAPES["long blocks"]], ids=["3x2", "3x3", "three blocks"])
@pytest.mark.parametrize("step", ["staggered", "barrier"])
@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_without_failures_it_makes_no_difference_who_runs_a_layer(shape, step, seed, lends):
    lends(shape, seed, always=True)
    play(shape.with_settings(step=step), seed, slow=0.1)


@pytest.mark.parametrize("seed", by_day(1, range(2)))
@pytest.mark.parametrize("name", by_day(2, ["V", "interleaved, tied", "V, long blocks"]))
def test_chunks_of_stages_that_have_several_borrow_and_lend_too(name, seed, lends):
    """But not beside each other: boundaries between two chunks of one stage stay where they are."""
    lends(CHUNKED[name], seed, always=True)
    assert limits(V) == [(0, 2), (2, 0), (0, 2), (2, 0)]
    play(CHUNKED[name], seed, *[Moment("1:1", "backward", 1, 1)] * seed, slow=0.1)


@pytest.mark.parametrize(("worker", "phase"), [
    pytest.param(worker, phase, marks=[pytest.mark.night] * ((which + turn) % 3 > 0))
    for which, worker in enumerate(SHAPE.workers) for turn, phase in enumerate(PHASES)])
def test_each_worker_killed_at_each_moment_while_layers_are_lent(worker, phase, lends):
    """A helper, or a principal; in the first iteration, and another one in the second, when it is a plan for one less
    that lends. By day each moment of two of the workers."""
    lends(SHAPE, 0)
    number = SHAPE.workers.index(worker)
    first = Moment(SHAPE.workers[(number + 3) % 6], "forward", 0)
    play(SHAPE, number % 2, first, Moment(worker, phase, 1, number % 2 if phase in PER_MICROBATCH else 0))


@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_the_fast_reduction_agrees_to_rounding(seed, lends):
    lends(DEEP.with_settings(reduction="fast"), seed)
    play(DEEP.with_settings(reduction="fast"), seed, Moment("1:1", "backward", 0, 1), within=1e-5)


@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_parts_of_a_worker_borrow_the_equal_parts_of_a_layer(seed, lends):
    shape = Shape(3, 2, 2, 3, blocks=4, parts=2).with_settings(lend="auto")
    lends(shape, seed, always=bool(seed))
    job = Job(shape, [Moment(f"1:{seed}.1", "backward", 1)], seed=seed)
    with job:
        check(job, job.wait(), {f"1:{seed}.0", f"1:{seed}.1"})
        assert borrows(job)


@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_what_the_script_sets_in_a_layer_its_copies_get_too(seed, lends):
    """Before the failure, and after it; in the iteration that is made again as well."""
    shape = replace(SHAPE, drops=(0, 1), iterations=4)
    lends(shape, seed)
    play(shape, seed, Moment("1:1", "backward", 1, 1))


@pytest.mark.parametrize(("second", "reduction"), rows([
    ("0:0", "forward", 2), ("2:0", "backward", 1), ("2:1", "backward", 3), ("1:2", "weight", 2), ("2:2", "forward", 3),
    ("0:2", "reduce", 0), ("1:0", "reduced", 0)], ["exact", "fast"], every=3))
def test_survivors_of_a_second_failure_lose_nothing_while_layers_are_lent(second, reduction, plans_lend):
    """Micro-batches go on to cross where they did, and so helpers and those that lend to them change."""
    shape = replace(DEEP, microbatches=4).with_settings(reduction=reduction)
    worker, phase, nth = second
    job = Job(shape, [Moment("1:1", "backward", 0, 1), Moment(worker, phase, 1, nth)])
    with job:
        check(job, job.wait(), {"1:1", worker}, within=0.0 if reduction == "exact" else 1e-5)
        assert borrows(job)
    lost = [event["redone"] for event in job.control.events if event["event"] == "reconciled"]
    assert lost == [0, 0], lost


@pytest.mark.parametrize("seed", seeds(4))
def test_random_campaign(seed, lends):
    """As that of jobs that lend nothing, every third of stages with several chunks; and the script does this and that
    between iterations."""
    draw = random.Random(seed)

    def some() -> tuple[int, ...]:
        return tuple(sorted(draw.sample(range(3), draw.choice([0, 0, 1, 2]))))

    # Scenes are of whole workers.
    shapes = [shape for shape in (SHAPES if seed % 3 else CHUNKED).values() if shape.parts == 1]
    shape = replace(draw.choice(shapes), drops=some(), hooks=some(), edit=some(), evaluate=some(), save=some())
    scene = Draw(seed, {"drawn": shape}).scene()
    lends(scene.shape, seed, always=bool(seed // 3 % 3))
    scene.run(seed)


@pytest.mark.parametrize("seed", seeds(3))
def test_random_campaign_of_plans_that_lend(seed, plans_lend):
    """Further failures interrupt iterations with lent layers, of which only lost work is run again."""
    draw = random.Random(seed)
    shapes = [shape for shape in (SHAPES if seed % 3 else CHUNKED).values() if shape.parts == 1]
    Draw(seed, {"drawn": replace(draw.choice(shapes), iterations=4)}).scene().run(seed)


def offered(job: Job, late: Moment) -> Plan:
    """The plan that lends, by the coordinator's planner, once all whom the failure has left have heard of it."""
    job.wait_held(late)
    job.wait_event("decided", generation=2)
    state, found = job.control.state, threading.Event()
    costs = Costs.uniform(job.shape.stages * job.shape.chunks, 300, 300, 300).to_json()
    described = structs.replace(state.job, costs=costs, planner_budget=0.5, horizon=1e9)
    assert state.round.plan is not None
    told = Planning().improve(described, frozenset({"1:1"}), state.round.plan, found)
    found.set()
    assert told is not None
    better = Plan.from_file(told)
    assert better.crossings and not violations(better) and str(better.stats["lending"]).startswith("lends ")
    job.control.call(lambda: job.control.improved(2, better))
    left = [each.worker for each in job.processes.values() if each.thread.is_alive() and each.worker is not None]
    job.wait_for(lambda: all(each.site.agent.offer is not None for each in left), "the offer")
    return better


@pytest.mark.parametrize(("seed", "shape"), [
    pytest.param(0, DEEP, id="gloo's order"), pytest.param(1, DEEP, id="NCCL's", marks=pytest.mark.night),
    pytest.param(1, CHUNKED["V, 3x3"], id="V", marks=pytest.mark.night)])
def test_a_plan_that_lends_is_taken_up_while_training_goes_on(seed, shape):
    """The coordinator's planner finds it, of what the stages say of their layers; that of the failure lends nothing.
    Who comes back ends all loans."""
    shape, late = replace(shape, iterations=11), Moment("0:0", "forward", 1)
    held = Moment("0:0", "forward", 5)
    job = Job(shape, [Moment("1:1", "backward", 0)], holds=[late, held], seed=seed)
    with job:
        better = offered(job, late)
        job.release(late)
        job.wait_event("adopted", digest=better.digest)
        job.wait_held(held)
        assert borrows(job)
        job.start("1:1", joining=True)
        job.wait_event("waiting", worker="1:1")
        job.release(held)
        check(job, job.wait(), came={"1:1"})
        assert not borrows(job)


@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_a_worker_moves_to_the_hit_stage_while_layers_are_lent(seed, lends):
    """Before the move, while both of its processes are there, and after it."""
    shape = Shape(3, 2, 2, 8, blocks=4).with_settings(moves=True, lend="auto")
    lends(shape, seed, always=True)
    late = Moment("0:0", "forward", 4)
    job = Job(shape, [Moment("1:1", "backward", 0, 1)], seed=seed, moves={"2:0": "1:1"}, holds=[late])
    with job:
        job.wait_held(late)
        job.wait_event("waiting", worker="1:1")
        job.release(late)
        check(job, job.wait(), {"2:0"}, {"1:1"})
        assert borrows(job)


def test_a_layer_without_matrices_takes_as_much_as_the_others() -> None:
    lending = SmallStage(stages=2, stage=0, pipelines=1, microbatches=1, blocks=4).chunks[0].lending
    flat = SimpleNamespace(first=0, layers=[nn.LayerNorm(4), nn.LayerNorm(4)], lendable=(0, 1), why="", beside=(),
                           like=0, refused="")
    assert offer(flat, 2).share == 0.5
    assert 0 < offer(lending, 2).share < 1


def changed(job: Job, *names: str) -> None:
    """These workers' scripts put a hook on their last layer, of which no copy can know."""
    for process in job.processes.values():
        if process.worker is not None and process.name in names:
            process.worker.site.stage.module[-1].register_forward_hook(lambda module, inputs, output: None)


def test_a_layer_that_the_script_has_changed_is_not_lent_and_training_goes_on():
    """The coordinator hears that, and what it plans from then on does not lend the stage's layers."""
    shape, late = replace(DEEP, iterations=6), Moment("0:0", "forward", 1)
    job = Job(shape, [Moment("1:1", "backward", 0)], holds=[late])
    with job:
        offered(job, late)
        changed(job, "0:1")
        job.release(late)
        check(job, job.wait(), {"1:1"})
        assert not borrows(job) and not any(event["event"] == "adopted" for event in job.control.events)
        assert job.wait_event("unlent", worker="0:1", stage=1)
        assert job.control.state.job.lending.lend == ((2, 0), (0, 2))


def test_a_layer_that_the_script_changes_while_it_is_lent_goes_home():
    """In a new generation with the same members, whose plan lends nothing."""
    shape, late = replace(DEEP, iterations=9), Moment("0:0", "forward", 1)
    held = Moment("0:0", "forward", 5)
    job = Job(shape, [Moment("1:1", "backward", 0)], holds=[late, held])
    with job:
        better = offered(job, late)
        job.release(late)
        job.wait_event("adopted", digest=better.digest)
        job.wait_held(held)
        assert borrows(job)
        changed(job, "0:1", "2:1")
        job.release(held)
        check(job, job.wait(), {"1:1"})
        assert not borrows(job)
        assert [event["stage"] for event in job.control.events if event["event"] == "unlent"] == [1]
        assert len([event for event in job.control.events if event["event"] == "decided"]) == 2
