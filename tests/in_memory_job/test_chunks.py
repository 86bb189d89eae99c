"""Stages with several chunks. V-shaped: first down the stages and then up again; interleaved: down each time.

Training ends with the bits of the same layers' job in which each chunk is a stage of its own.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from megatron_recycle.runtime.compute.random_state import Generators
from tests.in_memory_job.job import Job, Shape, check, undisturbed
from tests.in_memory_job.scenes import PER_MICROBATCH, PHASES, Draw
from tests.moments import Moment
from tests.seeds import by_day, seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(3, 2, 4, 3, blocks=6, chunks=2)
SHAPES = {
    "3x2": SHAPE, "2x3": Shape(2, 3, 3, 3, chunks=2),
    "3x3": Shape(3, 3, 3, 3, chunks=2), "long blocks": Shape(3, 2, 6, 3, chunks=2).with_settings(block=2),
    "waits": SHAPE.with_settings(step="barrier"), "clipped": Shape(3, 2, 2, 4, chunks=2, clipping=0.05),
    "evaluates": Shape(3, 2, 2, 3, chunks=2, evaluate=(1, 2)),
    "saves": Shape(3, 2, 2, 3, chunks=2, evaluate=(1,), save=(0, 1, 2)),
    "interleaved": Shape(3, 2, 4, 3, blocks=6, chunks=2, interleaved=True),
    "interleaved, 2x3": Shape(2, 3, 3, 3, chunks=2, interleaved=True, evaluate=(1, 2)),
    "interleaved thrice": Shape(3, 2, 4, 3, blocks=6, chunks=3, interleaved=True),
    "shards": Shape(3, 2, 2, 3, chunks=2, sharded=True, clipping=0.05).with_settings(state_copies=3),
    "shards, interleaved": Shape(3, 2, 4, 3, blocks=6, chunks=2, interleaved=True, sharded=True).with_settings(
        state_copies=3),
    "shards, tied": Shape(3, 2, 3, 3, chunks=2, tied=True, sharded=True).with_settings(state_copies=3),
    "W-shaped": Shape(3, 2, 4, 3, blocks=6, chunks=3, evaluate=(1, 2)),
    "tied": Shape(3, 2, 3, 3, chunks=2, tied=True), "one stage, tied": Shape(2, 1, 3, 3, chunks=2, tied=True),
    "interleaved, tied": Shape(3, 2, 3, 3, chunks=2, interleaved=True, tied=True),
}


def flat(shape: Shape) -> Shape:
    """The same layers, each chunk on a stage of its own."""
    return replace(shape, stages=shape.chunks * shape.stages, chunks=1).with_settings(lend="off", step="barrier")


@pytest.mark.parametrize("seed", by_day(1, range(2)))
@pytest.mark.parametrize("name", ["3x2", "2x3", "one stage", "long blocks", "evaluates", "interleaved",
                                  "tied", "interleaved, tied", *(
    pytest.param(name, marks=pytest.mark.night) for name in ("interleaved, 2x3", "interleaved thrice", "W-shaped"))])
def test_without_failures_it_trains_what_each_chunk_on_a_stage_of_its_own_does(name, seed):
    shape = {**SHAPES, "one stage": Shape(2, 1, 3, 3, chunks=2)}[name]
    job = Job(shape, seed=seed, slow=0.1)
    with job:
        results = job.wait()
        check(job, results)
    pipelines, others = shape.pipelines * shape.parts, undisturbed(flat(shape))
    for rank, result in results.items():
        stage, pipeline = divmod(rank, pipelines)
        assert result.losses == others[0].losses and result.evaluated == others[0].evaluated
        own = [chunk for chunk, at in enumerate(shape.placement) if at == stage]
        theirs = {prefixed(name, place): tensor for place, chunk in enumerate(own)
                  for name, tensor in others[chunk * pipelines + pipeline].state.items()}
        if shape.tied and {shape.placement[0], shape.placement[-1]} == {stage}:  # one tensor in two chunks
            theirs = {name: tensor for name, tensor in theirs.items() if not name.endswith("out.weight")}
        assert result.state.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in result.state.items())


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("name", ["shards", "shards, interleaved", "shards, tied"])
def test_without_failures_shards_train_what_a_whole_optimizer_does(name, reduction):
    shape = replace(SHAPES[name], clipping=0).with_settings(step="barrier", reduction=reduction)
    within = 0.0 if reduction == "exact" else 1e-5
    sharded, whole = undisturbed(shape), undisturbed(replace(shape, sharded=False))
    for rank, result in sharded.items():
        assert result.losses == pytest.approx(whole[rank].losses, abs=within)
        for name, tensor in result.state.items():
            assert (tensor - whole[rank].state[name]).abs().max() <= within, name


def prefixed(name: str, place: int) -> str:
    """The name that a chunk's tensor has in its stage."""
    kind, _, name = name.partition(" ")
    return f"{kind} {place}.{name}"


def test_chunks_share_no_random_numbers(monkeypatch):
    """Nor do their backwards, nor passes of an evaluation."""
    seeds, seed = [], Generators.seed

    def noted(self, number, first=None):
        seeds.append((threading.current_thread().name, first is None, number if first is None else first))
        seed(self, number, first)

    monkeypatch.setattr(Generators, "seed", noted)
    Job(Shape(2, 1, 2, 2, chunks=2, evaluate=(1,))).run()
    forwards, backwards = (len({number for name, forward, number in seeds if (name, forward) == ("worker-0:0", kind)})
                           for kind in (True, False))
    # A second pass is of some of the same micro-batches; a step has numbers too.
    assert backwards == 2 * 2 * 2 and forwards == backwards + 2 * 2 + 2


@pytest.mark.parametrize(("phase", "worker"), [
    pytest.param(phase, worker, marks=[] if (number + place) % 3 == 0 else pytest.mark.night)
    for number, phase in enumerate(PHASES) for place, worker in enumerate(SHAPE.workers)])
def test_each_worker_killed_at_each_moment(phase, worker):
    """By day every third of them."""
    number = SHAPE.workers.index(worker)
    job = Job(SHAPE, [Moment(worker, phase, number % 3, number % 4 if phase in PER_MICROBATCH else 0)], seed=number)
    with job:
        check(job, job.wait(), {worker})


@pytest.mark.night
def test_a_worker_tells_its_losses_once_though_forwards_of_other_chunks_still_come():
    """As they do where failures have dealt a stage's micro-batches otherwise in each of its chunks."""
    shape = Shape(4, 4, 4, 3, blocks=30, chunks=4, interleaved=True, tied=True)
    job = Job(shape, [Moment("1:1", "backward", 1, 1), Moment("2:3", "forward", 2)], seed=1)
    with job:
        check(job, job.wait(), {"1:1", "2:3"})


def test_the_fast_reduction_agrees_to_rounding():
    shape = SHAPE.with_settings(reduction="fast")
    job = Job(shape, [Moment("1:1", "backward", 1, 1)], slow=0.1)
    with job:
        check(job, job.wait(), {"1:1"}, within=1e-5)


def test_parts_of_a_worker_have_the_equal_parts_of_both_chunks():
    job = Job(Shape(3, 2, 2, 3, chunks=2, parts=2), [Moment("1:1.1", "backward", 1)])
    with job:
        check(job, job.wait(), {"1:1.0", "1:1.1"})


def test_what_chunks_cannot_have_is_refused_by_name_when_the_worker_begins():
    for shape, what in ((SHAPE.with_settings(moves=True), "moves"),
                        (SHAPE.with_settings(policy="rollback", reduction="fast"), "policy rollback")):
        job = Job(shape)
        with job:
            assert all("stages with several chunks cannot have" in result.error and what in result.error
                       for result in job.wait().values())


@pytest.mark.parametrize("seed", seeds(3))
def test_random_campaign(seed):
    """As that of jobs whose stages have one chunk."""
    Draw(seed, SHAPES).scene().run(seed)
