"""The optimizer is cut into shards, each held by some workers of its stage: they die, are replaced, and the bits stay.

The job is in memory, see `tests.in_memory_job.job`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_recycle.runtime.comm import sharded_reduction
from tests.in_memory_job import test_policies as policies
from tests.in_memory_job.job import Job, Shape, check, undisturbed
from tests.in_memory_job.scenes import PER_MICROBATCH, PHASES, SHAPES, Draw, Scene
from tests.moments import Moment
from tests.seeds import by_day

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(3, 2, 2, 3, sharded=True, clipping=0.05)
"""Stages guess, and are wrong: steps are undone."""
BARRIER = Shape(3, 2, 2, 3, sharded=True).with_settings(step="barrier")
WHOLE = Shape(3, 2, 2, 3).with_settings(step="barrier")


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """These stages are small: a shard would be reduced at once."""
    monkeypatch.setattr(sharded_reduction, "_AT_ONCE", 384)
    monkeypatch.setattr(sharded_reduction, "_SHARE", 2**20)


def test_without_failures_the_model_is_the_one_of_a_whole_optimizer():
    sharded, whole = undisturbed(BARRIER), undisturbed(WHOLE)
    for rank, result in sharded.items():
        assert result.losses == whole[rank].losses
        for name, tensor in result.state.items():
            assert tensor.equal(whole[rank].state[name]), name
        assert len(result.shards) == 2
        ours, theirs = (of[rank].memory.kept for of in (sharded, whole))
        assert theirs.gradient * 0.5 < ours.gradient < theirs.gradient * 0.8, "two of three shards"
        assert ours.sums == theirs.sums


def test_a_stage_with_fewer_workers_than_copies_has_as_many_as_it_has_workers():
    """One pipeline, as a job may be started again with."""
    shape = Shape(1, 2, 2, 3, sharded=True, clipping=0.05)
    whole = undisturbed(replace(shape, sharded=False))
    for rank, result in undisturbed(shape).items():
        assert result.losses == whole[rank].losses


@pytest.mark.parametrize("phase", PHASES)
def test_workers_killed_at_each_moment(phase):
    """Each worker at three moments or four."""
    for number, worker in [*enumerate(SHAPE.workers)][PHASES.index(phase) % 2::2]:
        shape = BARRIER if number == PHASES.index(phase) % len(SHAPE.workers) else SHAPE
        iteration = (PHASES.index(phase) + number) % shape.iterations
        nth = number % shape.microbatches if phase in PER_MICROBATCH else 0
        Scene("shards", shape, [Moment(worker, phase, iteration, nth)], out={worker}, sure=True).run(seed=number)


CLIPPED = Shape(4, 2, 2, 4, sharded=True, clipping=0.05, evaluate=(1, 2), save=(2,))
TIED = Shape(3, 2, 2, 3, sharded=True, tied=True, clipping=0.05)
HOSTS = tuple((f"{pipeline}:{stage}", str(pipeline // 2)) for pipeline in range(4) for stage in range(2))
"""Two pipelines on each."""


@pytest.mark.parametrize("turn", range(4))
def test_two_that_die_one_after_the_other(turn):
    """Also twins of each other: what the first has held is adopted before the second dies."""
    other = (turn + 1 + turn // 2) % 4
    stage = turn % 2
    kills = [Moment(f"{turn}:{stage}", "backward", 1), Moment(f"{other}:{stage}", "reduced", 2)]
    Scene("one after the other", CLIPPED, kills, out={kill.worker for kill in kills}, sure=True).run(seed=turn)


@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_a_shared_parameter(seed):
    for worker in TIED.workers:
        Scene("tied", TIED, [Moment(worker, PHASES[seed + 3], 1)], out={worker}, sure=True).run(seed=seed)


@pytest.mark.parametrize("pipelines", [(0, 1), (2, 3)])
def test_a_host_with_half_of_all_copies_dies(pipelines):
    """Twins lie on different hosts: what one host has, the other has too."""
    out = {f"{pipeline}:{stage}" for pipeline in pipelines for stage in range(2)}
    with Job(replace(CLIPPED, hosts=HOSTS), holds=[Moment(worker, "forward", 1) for worker in out]) as job:
        _die_together(job)
        check(job, job.wait(), out)


def test_twins_that_die_at_once_end_the_job_by_name():
    """Nobody can adopt what nobody has."""
    with Job(CLIPPED, holds=[Moment("1:0", "forward", 1), Moment("2:0", "forward", 1)]) as job:
        _die_together(job)
        results = job.wait()
    told = {result.error for result in results.values() if result.status == 1}
    assert len(told) == 1 and "stage 0 has lost shard 1 of its optimizer state" in told.pop()


def test_one_that_comes_back_gets_shards_again():
    """Its peers, which had adopted them, let go of theirs."""
    job = Draw(3).comes_back(CLIPPED).run(seed=4)
    assert all(process.result.shards for process in job.processes.values())


def test_what_a_script_does_to_shards_while_it_catches_up_does_not_count():
    """Its peers had done so before: it has what they have."""
    Draw(3).comes_back(replace(CLIPPED, edit=(0, 2))).run(seed=4)


@pytest.mark.parametrize("policy", ["rollback", "lossy_forward"])
def test_policies_that_leave_micro_batches_out(policy):
    """On a network with NCCL's rules: peers have connected before they send shards to each other."""
    shape = replace(SHAPES["3x2, four"], sharded=True).with_settings(reduction="fast", policy=policy)
    with Job(shape, [Moment("1:1", "weight", 1)], seed=1) as job:
        policies.check(job, job.wait(), {"1:1"})


def test_a_worker_that_moves_takes_shards_of_its_new_stage():
    late = Moment("0:0", "forward", 4)
    shape = Shape(3, 2, 2, 8, sharded=True).with_settings(moves=True)
    with Job(shape, [Moment("1:1", "backward", 0, 1)], moves={"2:0": "1:1"}, holds=[late]) as job:
        job.wait_held(late)
        job.wait_event("waiting", worker="1:1")
        job.release(late)
        results = job.wait()
        check(job, results, {"2:0"}, {"1:1"})
    assert all(results[rank].shards for rank in job.processes if job.names[rank] != "2:0")


@pytest.mark.parametrize(("copies", "seed"), [
    (1, 1), (2, 3), pytest.param(1, 2, marks=pytest.mark.night)])
def test_workers_that_leave_hand_their_shards_over_first(copies, seed):
    """Two at once: with one copy both are the only holders of a shard, with two they are twins. The others have the
    bits of the job without failures."""
    shape = replace(CLIPPED, iterations=12, save=()).with_settings(state_copies=copies)
    early, late, leavers = Moment("0:0", "forward", 1), Moment("0:0", "forward", 7), {"1:0", "2:0"}
    with Job(shape, seed=seed, holds=[early, late]) as job:
        job.wait_held(early)
        job.control.leave(*leavers)
        for name in leavers:
            job.wait_event("leaving", worker=name)
        job.release(early)
        job.wait_held(late)
        job.wait_for(lambda: job.control.state.round.switch or len(job.control.state.members) == 6, "the next boundary")
        job.release(late)
        results = job.wait()
        check(job, results, leavers)
    decided = [event["out"] for event in job.control.events if event["event"] == "decided"]
    assert decided[-1] == dict.fromkeys(leavers, "leave"), "as they were asked to"
    staying = [results[rank] for rank, process in job.processes.items()
               if process.name in ("0:0", "3:0")]
    assert {shard for result in staying for shard in result.shards} == {0, 1, 2, 3}


def _die_together(job: Job) -> None:
    """All that the job holds die where they stand, and do nothing any more."""
    job.wait_held()
    job.kills.update(job.holds)
    for hold in job.holds:
        job.release(hold)
