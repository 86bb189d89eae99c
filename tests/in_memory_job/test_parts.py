"""Workers of two parts (tensor parallelism): one that dies takes its worker out, and the others end with the same
bits. Of an interrupted iteration that counts which all parts of a worker have done. A wrong guess takes nobody's
communicators."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Worker
from megatron_recycle.runtime import site
from megatron_recycle.runtime.comm.acknowledgements import Acknowledgements
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.compute.data import Batch
from megatron_recycle.runtime.compute.device import Device
from megatron_recycle.runtime.quiesce import OUT, last_actions
from tests.fakes.network.ends import Host
from tests.in_memory_job import model
from tests.in_memory_job.job import LIMIT, Job, Moment, Shape, check
from tests.in_memory_job.model import Data, SmallStage, batch
from tests.in_memory_job.scenes import PHASES
from tests.in_memory_job.test_last_copy import check_ends_well
from tests.in_memory_job.wires import Asked
from tests.seeds import by_day, rows, seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(2, 2, 2, 3, parts=2)
CLIPPED = replace(SHAPE, stages=3, microbatches=3, clipping=0.05)
SHAPES = [SHAPE, replace(SHAPE, clipping=0.05), replace(SHAPE, stages=3, microbatches=3), CLIPPED,
          SHAPE.with_settings(step="barrier"), replace(SHAPE, save=(0, 1, 2), evaluate=(1,))]
PROCESSES = [f"{worker}.{part}" for worker in SHAPE.workers for part in range(2)]


def ends_well(shape: Shape, worker: str, seed: int, kills: list[Moment], asked: list[Asked]) -> None:
    job = Job(shape, kills, asked=asked, seed=seed, slow=0.1)
    with job:
        check(job, job.wait(), {f"{worker}.0", f"{worker}.1"})


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.night) for turn in range(1, len(PHASES)))])
def test_each_part_killed_at_some_moment_and_by_night_at_each(turn: int):
    for number, name in enumerate(PROCESSES):
        phase = PHASES[(number + turn) % len(PHASES)]
        ends_well(SHAPE, name[:3], number, [Moment(name, phase, 1)], [])


def test_a_part_that_reads_for_all_dies_and_the_other_waits_for_another_one(monkeypatch: pytest.MonkeyPatch):
    """As with a batch function that broadcasts: torch's error in it is none of the script's."""
    own, regroup = threading.local(), SmallStage.regroup

    def noted(stage: SmallStage, groups: Groups) -> None:
        own.siblings = groups.siblings
        regroup(stage, groups)

    def told(self: Data, pipeline: int, number: int) -> Batch:
        try:
            own.siblings.sum(torch.zeros(1)).wait()
        except GenerationOver as error:
            raise RuntimeError(f"gloo: {error}") from None
        return batch(pipeline, number)

    monkeypatch.setattr(SmallStage, "regroup", noted)
    monkeypatch.setattr(Data, "batch", told)
    job = Job(replace(SHAPE, evaluate=(2,)), [Moment("1:0.0", "forward", 1)])
    with job:
        results = job.wait()
        check(job, results, {"1:0.0", "1:0.1"})
        other = next(rank for rank, name in job.names.items() if name == "1:0.1")
        assert results[other].status == 0, results[other].error


@pytest.mark.parametrize("seed", seeds(3))
def test_random_campaign(seed: int):
    """At anything that is asked of the network: a collective of the parts, a reduction, a roll-back."""
    draw = random.Random(seed)
    shape = draw.choice(SHAPES)
    calm = Job(shape, seed=1)
    calm.run()
    one = draw.choice(calm.deaths.all())
    ends_well(shape, one.worker[:3], seed, [], [one])


def ends_on_its_first_communicators(job: Job) -> None:
    check(job, job.wait())
    assert {event["iteration"] for event in job.control.events if event["event"] == "rolled_back"} == {0, 1, 2}
    assert len({prefix for prefix, _ in job.fabric.communicators}) == 1


@pytest.mark.parametrize("seed", seeds(2))
def test_wrong_guesses_leave_the_bits_of_waiting_and_all_communicators(seed: int):
    """Wherever each part is when it hears that all are void; every other seed with NCCL's rules."""
    shape = random.Random(seed).choice([CLIPPED, replace(CLIPPED, stages=2), replace(CLIPPED, parts=4)])
    with Job(shape, seed=seed, slow=random.Random(seed).choice([0.0, 0.1, 0.5])) as job:
        ends_on_its_first_communicators(job)


def test_where_the_parts_stop():
    assert last_actions([2, 3, 0, 0, OUT, OUT], 2) == [3, 0, 0]
    assert last_actions([2, 3, OUT, 1], 2) is None


@pytest.mark.parametrize("guard", ["memory", "checkpoint"])
@pytest.mark.parametrize("phase", ["collective", "stepped"])
@pytest.mark.parametrize("step", ["barrier", "staggered"])
def test_a_part_that_was_without_another_one_goes_on_from_the_iterations_that_it_makes_again(
        phase: str, guard: str, step: str):
    """Its stage was lost, and it is between two iterations, or final steps are waited for: not from what it was given
    when it came in again. Each part finds its own in a checkpoint, which knows nothing of the micro-batches that the
    script has asked for since."""
    shape = replace(SHAPE, iterations=6, evaluate=(4,), save=(1, 3), collect=(1, 3, 4), pipelines=1,
                    sizes=(2, 2, 2, 3)).with_settings(guard=guard, guard_interval=3, step=step)
    with Job(shape, [Moment("0:0.1", phase, 3)], seed=4) as job:
        check_ends_well(job)
    assert not job.kills


ANNEALS = replace(SHAPE, pipelines=3, microbatches=4, iterations=4, blocks=4, anneals=True)
"""The script sets a variable of its loss before each iteration, which nothing can see. Parts compute together on both
stages."""
SEQUENCES = replace(ANNEALS, pipelines=2, iterations=3, sequences=True)
SURVIVORS = 5


def interrupted(shape: Shape, kill: Moment, seed: int = 0) -> Job:
    """A job that has lost a part in an iteration, and has come to its end with the right numbers."""
    worker, exact = kill.worker.partition(".")[0], dict(shape.settings)["reduction"] == "exact"
    with Job(shape, [kill], seed=seed) as job:
        check(job, job.wait(), {f"{worker}.{part}" for part in range(shape.parts)}, within=0.0 if exact else 1e-5)
    return job


def lost(job: Job) -> list[int]:
    """Actions that survivors had done and lost, by failure."""
    return [event["redone"] for event in job.control.events if event["event"] == "reconciled"]


@pytest.mark.parametrize(("moment", "reduction", "part"), rows([
    ("1:1", "forward", 1), ("0:0", "backward", 2), ("2:1", "weight", 0), ("1:0", "forward", 3)], ["exact", "fast"],
    [0, 1], every=11), ids=str)
def test_survivors_keep_what_all_their_parts_have_done(moment: tuple[str, str, int], reduction: str, part: int):
    """But for a forward of each whose backward one part has begun, and the other one cannot. With `fast` that may be a
    full backward, which takes the share of its worker with it."""
    worker, phase, nth = moment
    job = interrupted(ANNEALS.with_settings(reduction=reduction), Moment(f"{worker}.{part}", phase, 1, nth))
    (stopped,) = [event for event in job.control.events if event["event"] == "stopped"]
    done = sum(report["actions"] for name, report in stopped["reports"].items() if name.endswith(".0"))
    assert sum(lost(job)) <= SURVIVORS if reduction == "exact" else sum(lost(job)) < done


@pytest.mark.night
def test_nothing_is_kept_without_messages():
    job = interrupted(ANNEALS.with_settings(keep_messages="none"), Moment("1:1.0", "backward", 1, 2))
    assert lost(job)[0] > SURVIVORS


@pytest.mark.parametrize("reduction", by_day(1, ["exact", "fast"]))
def test_a_part_has_reduced_and_the_other_one_loses_its_peer(reduction: str):
    """All first parts of the stage hold the gradient of iteration 1; 1:1.1 dies before the second ones do."""
    held = Moment("1:1.1", "reduce", 1)
    with Job(ANNEALS.with_settings(reduction=reduction), holds=[held]) as job:
        job.wait_held()
        first = [job.processes[job.ranks[worker][0]] for worker in job.ranks if worker.stage == 1]
        job.wait_for(lambda: all(process.worker.standing.holds == 1 for process in first), "the first parts to reduce")
        assert all(len(process.result.losses) == 1 for process in first), "their scripts have not left the iteration"
        job.release(held, die=True)
        check(job, job.wait(), {"1:1.0", "1:1.1"}, within=0.0 if reduction == "exact" else 1e-5)
    assert not [event for event in job.control.events if event["event"] == "repeated"]


def test_all_parts_of_a_stage_leave_an_iteration_together_and_are_closed_then():
    """1:0.1 dies before it has reduced iteration 1, with which the last stage's scripts have gone on."""
    held = Moment("1:0.1", "reduce", 1)
    with Job(ANNEALS, holds=[held]) as job:
        job.wait_held()
        job.wait_left(1, 1)
        job.release(held, die=True)
        check(job, job.wait(), {"1:0.0", "1:0.1"})
    assert not [event for event in job.control.events if event["event"] == "repeated"]


def test_a_part_whose_sibling_has_not_heard_that_the_stage_is_closed_stays_in_the_iteration(
        monkeypatch: pytest.MonkeyPatch):
    """1:1.1 stops before it tells 1:1.0 that what it has sent is used."""
    meet, held, go_on = Acknowledgements._meet_siblings, threading.Event(), threading.Event()
    job = Job(ANNEALS)

    def stops(acknowledgements: Acknowledgements) -> None:
        groups = acknowledgements._groups
        process = job.processes[job.ranks[groups.me][groups.part]]
        if process.name == "1:1.1" and process.worker.standing.stepped == 1 and not held.is_set():
            held.set()
            assert go_on.wait(30.0)
        meet(acknowledgements)

    monkeypatch.setattr(Acknowledgements, "_meet_siblings", stops)
    with job:
        job.wait_for(held.is_set, "1:1.1 to stop")
        others = [process for process in job.processes.values() if process.name in ("0:1.0", "0:1.1", "2:1.0", "2:1.1")]
        job.wait_for(lambda: all(len(process.result.losses) == 2 for process in others), "its peers to leave")
        sibling = next(process for process in job.processes.values() if process.name == "1:1.0")
        assert len(sibling.result.losses) == 1
        go_on.set()
        check(job, job.wait())


@pytest.mark.parametrize(("phase", "nth", "reduction"), [
    ("forward", 1, "exact"), ("backward", 3, "fast"), *[pytest.param(*case, marks=pytest.mark.night) for case in [
        ("backward", 1, "exact"), ("weight", 1, "exact")]]])
def test_nothing_counts_before_the_device_has_computed_it(phase: str, nth: int, reduction: str,
                                                          monkeypatch: pytest.MonkeyPatch):
    """With NCCL's rules. The thread of 0:0.0 has launched an action (with `fast` a full backward, its last), and its
    device is still in the parts' collective when 1:1.0 dies: the abort ends that with anything in it."""
    name, spoilt, over_all = "0:0.0", Moment("0:0.0", phase, 1, nth), model._over_all
    launched, seen, done = threading.Event(), list[Moment](), list[int]()

    def mine() -> bool:
        return threading.current_thread().name == f"worker-{name}"

    def dies() -> None:
        """The device comes to that collective when the other part has done the action and the generation has ended."""
        groups, before = job.processes[0].worker.current_groups(), done[0]
        job.wait_for(lambda: len(job.processes[1].worker.standing.done) > before, "the other part")
        job.processes[job.ranks[Worker(1, 1)][0]].network.die()
        job.wait_for(lambda: groups.world.aborted, "the abort")
        launched.clear()

    class Behind(Device):
        def moment(self) -> Any:
            return Late(launched.is_set() and mine())

    class Late:
        def __init__(self, behind: bool) -> None:
            self._behind = behind

        def over(self) -> bool:
            return not self._behind

        def wait(self) -> None:
            if self._behind and launched.is_set():
                dies()

        def since(self, before: Any) -> float:
            return 1.0

    def sums(siblings: Comm, values: torch.Tensor) -> torch.Tensor:
        found = over_all(siblings, values)
        if mine() and seen[-1:] == [spoilt]:
            launched.set()
            found.fill_(math.nan)
        return found

    def at(job: Job, moment: Moment) -> None:
        if moment.worker == name:
            if launched.is_set():
                dies()
            seen.append(moment)
        if moment == spoilt:
            done.append(len(job.processes[0].worker.standing.done))

    monkeypatch.setattr(site, "device_of", lambda device: Behind())
    monkeypatch.setattr(model, "_over_all", sums)
    job = Job(SEQUENCES.with_settings(reduction=reduction), seed=1, at=at)
    with job:
        check(job, job.wait(), {"1:1.0", "1:1.1"}, within=0.0 if reduction == "exact" else 1e-5)
    assert not launched.is_set() and spoilt in seen


def test_a_part_does_not_wait_for_another_one_that_never_had_the_generation():
    """0:0.1 is late with the communicators of the second generation, which 0:0.0 has, when there is another failure. A
    part waits for the others' positions for half of `report_timeout`: longer than this test."""
    shape = replace(SHAPE, pipelines=3).with_settings(report_timeout=20 * LIMIT)
    job, held, go_on = Job(shape, [Moment("1:1.0", "forward", 1)]), threading.Event(), threading.Event()
    asked = job.fabric._at

    def late(process: Host, what: str) -> None:
        if (job.names[process.rank], what) == ("0:0.1", "connect control") and job.control.state.generation == 2:
            held.set()
            assert go_on.wait(LIMIT)
            raise GenerationOver("given up while its workers connected to each other")  # the others stay as they are
        asked(process, what)

    job.fabric._at = late
    with job:
        job.wait_for(held.is_set, "0:0.1")
        job.wait_event("rebuilt", generation=2, worker="0:0.0")
        job.control.lost("2:1.0", "2:1.1")
        job.wait_event("decided", generation=3)
        go_on.set()
        check(job, job.wait(), {"1:1.0", "1:1.1", "2:1.0", "2:1.1"})
