"""A worker dies, anywhere and at any moment; training goes on and ends with the same bits.

The job is in memory, see `tests.in_memory_job.job`: hundreds of moments instead of a few.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.membership.detectors import ThreadState
from megatron_recycle.runtime.worker import StageWorker
from tests.in_memory_job.job import Job, Shape, check, undisturbed
from tests.in_memory_job.scenes import PER_MICROBATCH, PHASES, SHAPES, Draw, Scene
from tests.in_memory_job.wires import Asked
from tests.moments import Moment
from tests.seeds import by_day, rows, seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = SHAPES["3x2"]  # of three iterations
STAGES = SHAPE.stages
OTHERS = [name for name in SHAPES if name != "3x2"]
MOMENTS = [(phase, nth) for phase in PHASES for nth in range(SHAPE.microbatches if phase in PER_MICROBATCH else 1)]


@pytest.mark.every
@pytest.mark.parametrize("turn", by_day(1, range(6)))
@pytest.mark.parametrize(("phase", "nth"), MOMENTS)
def test_each_worker_killed_at_each_moment_of_an_iteration(phase, nth, turn):
    """In the first iteration, one in the middle and the last: a worker of each pipeline, each in another of these; by
    night each worker in each."""
    for pipeline in range(SHAPE.pipelines):
        worker = f"{pipeline}:{(pipeline + turn) % STAGES}"
        iteration = (MOMENTS.index((phase, nth)) + pipeline + turn // STAGES) % SHAPE.iterations
        Scene("each", SHAPE, [Moment(worker, phase, iteration, nth)], out={worker}, sure=True).run(seed=iteration)


@pytest.mark.every
@pytest.mark.parametrize("turn", by_day(1, range(6)))
@pytest.mark.parametrize("name", OTHERS)
def test_each_worker_of_other_jobs_killed_at_some_moment(name, turn):
    """Other grids, clipping, losses that are scaled, a tied layer, evaluations, stages that wait for each other; by day
    one or two workers of each."""
    shape, draw = SHAPES[name], Draw(turn)
    for worker in shape.workers[(turn + OTHERS.index(name)) % 6::6]:
        Scene(name, shape, [draw.moment(shape, worker)], out={worker}, sure=True).run(seed=1)


@pytest.mark.parametrize("worker", SHAPES["evaluates"].workers)
def test_a_worker_killed_in_an_evaluation(worker):
    for nth in range(2):
        Scene("evaluates", SHAPES["evaluates"], [Moment(worker, "evaluate", 1, nth)], out={worker}, sure=True).run(nth)


@pytest.mark.parametrize(("gone", "dies"), [
    (("0:1", "2:0"), "1:2"), (("0:0", "1:1"), "0:2"), (("3:2", "0:0"), "2:0"), (("1:1", "2:1"), "3:1")])
def test_an_evaluation_on_an_irregular_grid_and_a_kill_inside(gone, dies):
    """Two pipelines are hit at different stages, or at the same; all micro-batches, and a number that does not
    divide."""
    # What is kept may leave the second one nothing more to run in that iteration.
    shape = Shape(4, 3, 2, 2, evaluate=(1,)).with_settings(keep_messages="none")
    kills = [*(Moment(worker, "forward", 0, nth) for nth, worker in enumerate(gone)), Moment(dies, "evaluate", 0, 1)]
    Scene("evaluates", shape, kills, out={*gone, dies}, sure=True).run(seed=len(dies))


def test_an_evaluation_right_after_a_worker_has_come_back():
    shape, late = Shape(3, 2, 2, 5, evaluate=(1, 2, 3, 4)), Moment("0:0", "evaluate", 1)
    job = Job(shape, [Moment("1:1", "backward", 0)], holds=[late], seed=3)
    with job:
        job.comes_back("1:1", late)
        check(job, job.wait(), came={"1:1"})


@pytest.mark.parametrize(("phase", "worker"), rows(["save", "saved"], SHAPES["saves"].workers, every=3))
def test_a_worker_killed_in_a_checkpoint(phase, worker):
    """Before its part is written, and when all parts are there but not the name, which the first worker gives."""
    for iteration in range(1, 3):
        Scene("saves", SHAPES["saves"], [Moment(worker, phase, iteration - 1)], out={worker},
              sure=phase == "save" or worker == "0:0").run(iteration)


@pytest.mark.parametrize("phase", ["save", "saved"])
def test_another_worker_killed_while_the_checkpoint_is_written_again(phase):
    """The second one has written all of its stage: the third writes it."""
    shape = SHAPES["saves"]
    first = [Moment(worker, phase, 0) for worker in ("0:0",)]
    second = [Moment("1:0", "save", 0, 1), Moment("1:0", "recovering", 0)]
    for later in second:
        Scene("saves", shape, [*first, later], out={"0:0", "1:0"}).run(0)


def test_an_iteration_is_made_with_what_the_script_had_set_for_it():
    """Nobody can see what the loss reads, a module's attribute say. The workers of the last stage have stepped, and one
    of the first is killed in its last backward: nobody has left the iteration, which is made again."""
    dies, last = Moment("0:0", "backward", 2, 1), [f"{pipeline}:1" for pipeline in range(2)]
    shape = Shape(2, 2, 2, 4, anneals=True).with_settings(keep_messages="none")
    job = Job(shape, holds=[dies])

    def stands(name: str) -> bool:
        """Wherever it gets to, with all that others have sent."""
        worker = next(process.worker for process in job.processes.values() if process.name == name)
        return (worker is not None and worker.standing.stepped == dies.iteration
                and worker.site.phases.activity.told()["state"] == ThreadState.WAITING)

    with job:
        job.wait_held()
        job.wait_for(lambda: all(map(stands, last)), "the last stage's step")
        job.release(dies, die=True)
        check(job, job.wait(), {"0:0"})
    assert job.wait_event("reconciled")["target"] == dies.iteration - 1


def test_the_fast_reduction_agrees_to_rounding():
    shape = SHAPE.with_settings(reduction="fast")
    for worker in shape.workers:
        job = Job(shape, [Moment(worker, "backward", 1, 1)], slow=0.1)
        with job:
            check(job, job.wait(), {worker}, within=1e-5)


@pytest.mark.parametrize("seed", seeds(10))
def test_random_campaign(seed):
    """One or two deaths, at once, one in the recovery from the other, or while another stands elsewhere; deaths of the
    coordinator; processes that come back, or are declared out and do not know; messages that take a while."""
    Draw(seed).scene().run(seed)


@pytest.mark.parametrize(("dies", "phase"), [
    ("2:0", "boundary"), ("2:0", "recovering"), ("0:1", "joining"), ("1:1", "joining"), ("2:1", "joined")])
@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_another_worker_dies_while_one_comes_in(dies, phase, seed):
    """At the boundary that it waits for, in the recovery that takes it in, while it gives or gets the state: the one
    that comes in may be that one. Then the first iteration with it is at risk."""
    shape, late = replace(SHAPE, iterations=7), Moment("0:0", "forward", 1)
    deaths = [Moment(dies, phase, iteration) for iteration in range(2, 7)]
    if phase == "joined":
        deaths = []
    job = Job(shape, [Moment("1:1", "backward", 0, 1), *deaths], holds=[late], seed=seed)
    with job:
        job.comes_back("1:1", late)
        if phase == "joined":
            job.wait_event("joined", worker="1:1")
            job.control.lost(dies)
        results = job.wait()
        check(job, results, out={dies}, came={"1:1"})
        assert {dies} >= {job.processes[rank].name for rank, result in results.items() if result.status != 0}


@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_who_comes_back_costs_the_stages_that_lost_nobody_no_communicator(seed):
    """All others stand at a boundary then, and nothing is under way."""
    shape, late = replace(SHAPE, iterations=7), Moment("0:0", "forward", 1)
    job = Job(shape, [Moment("1:1", "backward", 0, 1)], holds=[late], seed=seed)
    with job:
        job.comes_back("1:1", late)
        check(job, job.wait(), came={"1:1"})
    made = [name for prefix, name in job.fabric.communicators if prefix.startswith("g3")]
    assert "stage0.0" not in made and {"stage1.0", "world.0", "control"} <= set(made)


@pytest.mark.parametrize("seed", by_day(2, range(4)))
def test_who_dies_costs_the_stages_that_lost_nobody_no_communicator(seed, monkeypatch):
    """All are in the middle of an iteration. Its own stage, and that of all, are made again; the others'
    stay, with a sum in them that all have begun."""
    monkeypatch.setattr("megatron_recycle.runtime.comm.abort._LONGEST_LEAVE", 60.0)  # however slow this machine is
    each = {name: Moment(name, "forward", 1) for name in SHAPE.workers}
    job = Job(SHAPE, holds=list(each.values()), seed=seed)
    with job:
        job.wait_held()
        job.release(each["1:1"], die=True)
        left = [process.worker.current_groups() for process in job.processes.values() if process.name != "1:1"]
        job.wait_for(lambda: all(groups.world.aborted for groups in left), "the end of the generation everywhere")
        for name in {*each} - {"1:1"}:
            job.release(each[name])
        check(job, job.wait(), {"1:1"})
    first = job.fabric.communicators[0][0]
    made = {name for prefix, name in job.fabric.communicators if prefix != first}
    assert made == {"stage1.0", "world.0", "control", *(["stage1.0-control"] if seed % 2 else [])}


@pytest.mark.parametrize("seed", by_day(2, range(4)))
def test_a_stage_that_is_in_the_middle_of_its_sum_gets_another_communicator(seed):
    """Two of its three have begun to reduce when somebody of another stage dies."""
    dies = Moment("1:1", "backward", 1)
    job = Job(SHAPE, holds=[dies], seed=seed)
    with job:
        job.wait_held()
        job.wait_waiting(r"rank 0 waits .* stage0\.0: .*rank 1", r"rank 2 waits .* stage0\.0: .*rank 1")
        job.release(dies, die=True)
        check(job, job.wait(), {"1:1"})
    assert [name for _, name in job.fabric.communicators].count("stage0.0") == 2


def test_a_stage_that_has_nobody_left_ends_the_job_and_says_so():
    kills = [Moment(f"{pipeline}:1", "forward", 1) for pipeline in range(3)]
    job = Job(SHAPE, kills)
    results = job.run()
    assert [results[rank].status for rank in range(3)] == [1, 1, 1]
    assert all("stage 1" in results[rank].error and "checkpoint" in results[rank].error for rank in range(3))


@pytest.mark.parametrize("seed", by_day(2, range(4)))
def test_without_failures_wrong_guesses_leave_the_bits_of_waiting_and_all_communicators(seed):
    """Every step is wrong at first; three in a row make the stages wait for each other."""
    job = Job(SHAPES["clipped"], seed=seed, slow=0.3)
    with job:
        check(job, job.wait())
    undone = {event["iteration"] for event in job.control.events if event["event"] == "rolled_back"}
    assert undone == {0, 1, 2}
    assert {process.worker.standing.epoch.renewal for process in job.processes.values()} == {0}
    assert len({prefix for prefix, _ in job.fabric.communicators}) == 1


def test_an_overflow_leaves_the_step_out_everywhere():
    results = undisturbed(SHAPES["overflows"])
    assert all(result.counters == [2, 2, 16.0] for result in results.values())


# ---- the comparison itself can fail


def test_one_bit_is_noticed():
    shape = replace(SHAPE, iterations=2)
    job = Job(shape)
    with job:
        results = job.wait()
        next(iter(results[4].state.values())).view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        with pytest.raises(AssertionError, match="1:1 differs"):
            check(job, results)


def test_other_learning_is_noticed():
    job = Job(replace(SHAPE, iterations=2))
    with job:
        results = job.wait()
        results[0].losses[1] += 1e-7
        with pytest.raises(AssertionError, match="0:0 differs in .'losses'"):
            check(job, results)


def test_jobs_of_one_shape_are_the_same_to_the_bit():
    first = Shape(2, 2, 2, 2)
    with Job(first, seed=3, slow=0.5) as job:
        check(job, job.wait())


@pytest.mark.parametrize(("dies", "shape"), [
    ("1:1", Shape(3, 2, 2, 3, edit=(0,))), ("1:0", Shape(3, 2, 2, 3, edit=(0,), sharded=True)),
    ("1:0", Shape(3, 2, 2, 3, edit=(0,), sharded=True).with_settings(verify="none"))])
def test_a_peer_whose_script_has_not_made_its_change_yet_is_not_taken_for_one_that_differs(monkeypatch, dies, shape):
    """Its peers have, and train the next iteration; a failure finds it in its settle(). They are compared once it has
    made the change, too, and give each other shards of the optimizer's state then."""
    settle, settled = StageWorker.settle, []
    job = Job(shape, [Moment(dies, "backward", 1)])

    def late(worker: StageWorker) -> None:
        settle(worker)
        if worker.site.place.name == "0:0" and not settled:
            settled.append(worker)
            job.wait_event("decided", generation=2)
            with worker._inside():
                worker._loop.through_failures(lambda: meets_the_end(worker))

    def meets_the_end(worker: StageWorker) -> None:
        if worker.interrupted():
            raise GenerationOver("as if its settle() had met the failure")

    monkeypatch.setattr(StageWorker, "settle", late)
    check(job, job.run(), {dies})
    assert settled and not [event for event in job.control.events if event["event"] == "healed"]


def test_a_wait_for_what_nobody_gets_to_names_the_errors_of_workers(monkeypatch):
    """A scene whose own code fails on every worker would look like a job that hangs."""
    late = Moment("2:0", "forward", 1)

    def at(job: Job, moment: Moment) -> None:
        raise ValueError(f"at {moment}")

    with Job(SHAPE, holds=[late], at=at) as job:
        job.wait()
        monkeypatch.setattr("tests.in_memory_job.job.LIMIT", 0.01)
        with pytest.raises(AssertionError, match=r"in vain for .*'2:0'.* has ended: ValueError: at .* forward"):
            job.wait_held(late)


def test_a_worker_dies_while_parameters_are_given_and_those_who_have_theirs_change_them(monkeypatch):
    """Nobody's script gets to change them before all have theirs: else others would be given what is changed already,
    and change it again, or get back what they have changed."""
    train, dead, changed = StageWorker.train, threading.Event(), threading.Event()

    def and_change(worker: StageWorker, iteration: int) -> float:
        loss = train(worker, iteration)
        worker.settle()
        with torch.no_grad():  # only there parameters lie in their shards
            for parameter in worker.site.stage.parameters if worker.site.place.me.stage else ():
                parameter.mul_(0.9)
                if dead.is_set():
                    changed.set()
        return loss

    def found_late(rank: int, pid: int, status: int) -> None:
        if status == -9:
            dead.set()
            changed.wait(0.3)
        exited(rank, pid, status)

    monkeypatch.setattr(StageWorker, "train", and_change)
    monkeypatch.setattr("tests.in_memory_job.job.once", lambda what, make: make())
    undisturbed.cache_clear()
    job = Job(Shape(4, 2, 2, 3, sharded=True).with_settings(step="barrier", verify="none"), seed=2,
              asked=[Asked("2:1", "receive stage1.0", 5)])
    exited, job.control.exited = job.control.exited, found_late
    check(job, job.run(), {"2:1"})
    undisturbed.cache_clear()
