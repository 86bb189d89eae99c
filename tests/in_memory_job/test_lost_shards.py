"""All holders of a shard of an optimizer's state are lost, or a whole stage of such: the job goes back to its newest
checkpoint, where those that are left load all shards between them.

The job is in memory, see `tests.in_memory_job.job`.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from megatron_recycle.runtime.worker import StageWorker
from tests.in_memory_job.job import Job, Shape, check
from tests.in_memory_job.test_last_copy import loading_fails, told
from tests.moments import Moment
from tests.seeds import seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(4, 2, 2, 7, sharded=True, clipping=0.05, save=(2, 4))
PHASES = ("forward", "backward", "weight", "reduce", "reduced", "step", "stepped")


def twins_die(worker: str, twin: str, phase: str, iteration: int) -> list[Moment]:
    """The twin in the recovery from the worker's death, before it can be given anything; it may be an iteration behind,
    or ahead."""
    return [Moment(worker, phase, iteration),
            *(Moment(twin, "recovering", other) for other in (iteration - 1, iteration, iteration + 1))]


def check_goes_on(job: Job, out: Collection[str], came: Collection[str] = (),
                  restored: int = 1) -> list[dict[str, Any]]:
    """Bit for bit as without failures; the events of the ways back."""
    results = job.wait()
    found = told(job, "restored")
    assert len(found) >= restored, job.where()
    check(job, results, out, came, again=True)
    return found


@pytest.mark.parametrize("step", ["barrier", "staggered"])
@pytest.mark.parametrize("phase", ["forward", "reduced", "step"])
def test_twins_that_die_at_once_cost_the_iterations_since_the_checkpoint(phase, step):
    shape = SHAPE.with_settings(step=step)
    with Job(shape, twins_die("1:0", "2:0", phase, 5), seed=len(phase)) as job:
        (event,) = check_goes_on(job, {"1:0", "2:0"})
    assert (event["stages"], event["iteration"], event["from"]) == ([0], 3, {"0": "checkpoint"})
    assert event["shards"] == "stage 0 has lost shard 1 of its optimizer state (1:0 and 2:0 held it)"
    left = [process.result for process in job.processes.values() if process.name in ("0:0", "3:0")]
    assert [sorted(result.shards) for result in left] == [[0, 1, 2, 3]] * 2, "each has two copies again"


def test_without_a_checkpoint_the_job_ends_and_names_shard_and_holders():
    with Job(replace(SHAPE, save=()), twins_die("1:0", "2:0", "forward", 5)) as job:
        job.wait_event("finished")
        job.wait()
    status, message, again = job.control.state.ended
    assert (status, again) == (1, True)
    assert "stage 0 has lost shard 1 of its optimizer state (1:0 and 2:0 held it): nobody who is left has it" in message
    assert "there is no checkpoint of this run to go back to; last committed iteration" in message


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_in_shards_that_is_lost_comes_back_from_the_checkpoint(stage):
    """One process comes for it, and has all of its shards."""
    shape = replace(SHAPE, pipelines=2)
    with Job(shape, [Moment(f"0:{stage}", "forward", 1), Moment(f"1:{stage}", "backward", 6)], seed=stage) as job:
        (event,) = check_goes_on(job, {f"0:{stage}"}, {f"1:{stage}"})
    assert (event["stages"], event["iteration"]) == ([stage], 3) and "shards" not in event
    (came,) = [process.result for process in job.processes.values() if process.name == f"1:{stage}"]
    assert sorted(came.shards) == [0, 1]


@pytest.mark.parametrize("dies", ["0:0", "3:0", "0:1"])
def test_another_failure_on_the_way_back(dies):
    """Of those that are to load shards, or of another stage: whoever has arrived already goes back again."""
    kills = [*twins_die("1:0", "2:0", "backward", 5), Moment(dies, "joining", 4)]
    with Job(SHAPE, kills, seed=int(dies[0])) as job:
        check_goes_on(job, {"1:0", "2:0", dies})
    assert Moment(dies, "joining", 4) not in job.kills


@pytest.mark.parametrize("worker", ["0:0", "0:1"])
def test_a_checkpoint_that_cannot_be_read_at_first(monkeypatch, worker):
    """Half of it is in the model, and not all have arrived: all go back again, or to the one before."""
    failed = loading_fails(monkeypatch, {worker}, 1)
    with Job(SHAPE, twins_die("1:0", "2:0", "backward", 5), seed=1) as job:
        events = check_goes_on(job, {"1:0", "2:0"}, restored=2)
    assert failed == [worker] and [event["iteration"] for event in events] == [3, 1]


def test_who_comes_back_afterwards_gets_shards():
    late = Moment("3:1", "forward", 5)
    shape = replace(SHAPE, iterations=9).with_settings(step="barrier")
    with Job(shape, twins_die("1:0", "2:0", "backward", 4), holds=[late]) as job:
        job.comes_back("1:0", late)
        check_goes_on(job, {"2:0"}, {"1:0"})
    assert all(process.result.shards for process in job.processes.values() if process.name != "2:0")


@pytest.mark.parametrize("seed", seeds(2))
def test_random_losses_of_shards(seed):
    """Any job, any twins, any moments; the coordinator may die on the way, and another worker, too."""
    draw = random.Random(seed)
    shape = draw.choice([
        SHAPE, replace(SHAPE, pipelines=3), replace(SHAPE, stages=3, pipelines=3), replace(SHAPE, tied=True),
        replace(SHAPE, clipping=0.0, scale=64.0, overflows=((1, 1), (0, 2))), replace(SHAPE, evaluate=(3, 5)),
        replace(SHAPE, pipelines=3, parts=2)])
    copies = draw.choice([1, 2, 2, 3])
    shape = shape.with_settings(step=draw.choice(["staggered", "barrier"]), verify_every=draw.choice([0, 2]),
                                state_copies=copies)
    stage, first = draw.randrange(shape.stages), draw.randrange(shape.pipelines)
    twin = (first + draw.choice([1, -1])) % shape.pipelines
    names = [f"{pipeline}:{stage}" + ".0" * (shape.parts > 1) for pipeline in (first, twin)]
    kills = twins_die(*names, draw.choice(PHASES), draw.choice([2, 3, 4, 5]))[:1 if copies == 1 else 4]
    if draw.random() < 0.3:
        third = draw.choice([name for name in shape.workers if name.split(":")[0] not in (str(first), str(twin))])
        kills.append(Moment(third + ".0" * (shape.parts > 1), "joining", draw.choice([2, 4])))
    out = {name for kill in kills for name in (kill.worker, kill.worker.replace(".0", ".1"))}
    with Job(shape, kills, seed=seed, slow=draw.choice([0.0, 0.1, 0.5])) as job:
        if draw.random() < 0.4:
            job.wait_event("decided", generation=2)
            job.control.call(lambda: job.control.kill(0.01), draw.uniform(0.0, 0.03))
        check_goes_on(job, out, restored=0)


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("worker", ["1:0", "2:1"])
def test_a_wrong_bit_in_a_shard(monkeypatch, worker, copies):
    """Of three copies the odd one is healed, with the parameters that follow from it; of two nobody knows which is
    right."""
    train = StageWorker.train

    def flips(self: StageWorker, iteration: int) -> float:
        if iteration == 3 and str(self.site.place.me) == worker:
            self.settle()
            shard = int(worker[0])
            self.site.stage.shards.masters(shard)[0].data[0] += 1.0
            self.site.stage.shards.copy_to_model(shard)
        return train(self, iteration)

    monkeypatch.setattr(StageWorker, "train", flips)
    shape = replace(SHAPE, save=()).with_settings(state_copies=copies, verify_every=1, step="barrier")
    with Job(shape) as job:
        if copies == 3:
            check(job, job.wait())
            (healed,) = told(job, "healed")
            assert (healed["worker"], healed["shards"]) == (worker, [int(worker[0])])
        else:
            job.wait_event("finished")
            job.wait()
            message = told(job, "finished")[-1]["message"]
            assert f"the workers that hold shard {worker[0]} of stage {worker[2]}'s optimizer state differ" in message
