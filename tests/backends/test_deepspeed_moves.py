"""A stage of a DeepSpeed job has lost so much that a healthy worker of another one moves there: with the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import pytest

from tests.backends import gpt_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run

pytestmark = pytest.mark.processes

STAGES, ITERATIONS, KILLED_IN = 2, 16, 2
LIMIT = 120
FIRST = Hold("0:0", "backward", KILLED_IN), Hold("1:0", "backward", KILLED_IN)
"""Two of stage 0 die together."""
LATE = Hold("2:1", "forward", KILLED_IN + 2)
"""Holds the job until the process that takes the new place is ready. Its switch is agreed with this iteration."""
BOUNDARY = KILLED_IN + 4
MOVER, TO = "1:1", "0:0"


def arguments(pipelines: int) -> dict[str, Any]:
    return {"pipelines": pipelines, "stages": STAGES, "iterations": ITERATIONS,
            "settings": {"reduction": "exact", "moves": True}}


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job of three pipelines without failures."""
    return calm_run(gpt_job.train, 3 * STAGES, arguments(3))


def job_of(pipelines: int, *holds: Hold) -> Job:
    return Job(gpt_job.train, pipelines * STAGES, arguments(pipelines), [*FIRST, LATE, *holds], limit=LIMIT)


def rank_of(job: Job, worker: str) -> int:
    pipeline, stage = map(int, worker.split(":"))
    return stage * (job.size // STAGES) + pipeline


def lose_two(job: Job) -> None:
    """Two of stage 0 are killed; the planner wants a worker of stage 1 to move, and the others train on to LATE."""
    job.wait_held(*FIRST)
    job.kill(*FIRST)
    for hold in FIRST:
        job.wait_ended(rank_of(job, hold.worker))
    moving = job.wait_event("moving")
    assert (moving["worker"], moving["to"], moving["to_rank"]) == (MOVER, TO, rank_of(job, TO))
    job.wait_held(LATE)


def check_all(job: Job, reference: Mapping[int, Result], but: Set[str]) -> None:
    """All places `but` these are filled at the end, by workers with the reference's bits; no iteration was lost."""
    results = job.wait()
    live = set(range(job.size)) - {rank_of(job, worker) for worker in but}
    for rank in live:
        assert results[rank].status == 0, job.where()
        assert len(results[rank].value["members"]) == len(live)
        own = differences(results[rank], reference[rank])
        assert not own, (rank, own)
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(ITERATIONS))


def names(job: Job) -> list[str]:
    wanted = ("moving", "waiting", "joined", "left", "move_failed")
    return [event["event"] for event in job.events if event["event"] in wanted and event.get("kind") != "leave"]


@pytest.mark.night
@pytest.mark.parametrize("pipelines", [3, 4])
def test_a_healthy_worker_moves_to_the_stage_that_lost_two(pipelines, undisturbed):
    """Its old stage is kept until an iteration has committed with its new process."""
    reference = undisturbed if pipelines == 3 else calm_run(gpt_job.train, pipelines * STAGES, arguments(pipelines))
    with job_of(pipelines) as job:
        lose_two(job)
        job.rejoin(rank_of(job, TO))
        job.wait_event("waiting", worker=TO)
        job.release(LATE)
        joined = job.wait_event("joined", worker=TO)
        left = job.wait_event("left", kind="move")
        assert job.wait_ended(rank_of(job, MOVER)).status == 0
        check_all(job, reference, but={"1:0", MOVER})
    assert joined["moved_from"] == left["worker"] == MOVER
    assert joined["iteration"] == BOUNDARY < left["iteration"]
    assert names(job) == ["moving", "waiting", "joined", "left"]
    assert [event["redone"] for event in job.events if event["event"] == "reconciled"][1:] == [0, 0]


@pytest.mark.night
@pytest.mark.parametrize("dies", [
    pytest.param(Hold(MOVER, "backward", KILLED_IN + 2), id="before"),
    pytest.param(Hold(MOVER, "forward", BOUNDARY), id="after")])
def test_the_mover_is_killed_before_or_after_its_new_process_has_come_in(dies, undisturbed):
    """Its device is the new process's alone then."""
    with job_of(3, dies) as job:
        lose_two(job)
        job.rejoin(rank_of(job, TO))
        job.wait_event("waiting", worker=TO)
        if dies.iteration < BOUNDARY:
            job.wait_held(dies)
            job.kill(dies)
            job.wait_event("suspected", worker=MOVER)
        job.release(LATE)
        job.wait_held(dies)
        if dies.iteration == BOUNDARY:
            job.kill(dies)
        job.wait_event("joined", worker=TO)
        check_all(job, undisturbed, but={"1:0", MOVER})
    assert names(job) == ["moving", "waiting", "joined"]


@pytest.mark.night
def test_the_new_process_dies_before_it_comes_in_and_the_mover_stays(undisturbed):
    with job_of(3) as job:
        lose_two(job)
        job.rejoin(rank_of(job, TO))
        job.wait_event("waiting", worker=TO)
        job.processes[rank_of(job, TO)].kill()
        failed = job.wait_event("move_failed")
        job.release(LATE)
        check_all(job, undisturbed, but={"1:0", TO})
    assert (failed["worker"], failed["to"], failed["reason"]) == (MOVER, TO, "its process has failed")
    assert names(job) == ["moving", "waiting", "move_failed", "moving"], "tried again after the boundary"


@pytest.mark.night
def test_the_new_process_dies_while_it_is_given_the_state_and_another_one_makes_the_move(undisturbed):
    dies, later = Hold(TO, "joining", BOUNDARY), Hold("2:1", "forward", BOUNDARY + 1)
    with job_of(3, later) as job:
        lose_two(job)
        job.rejoin(rank_of(job, TO), dies)
        job.wait_event("waiting", worker=TO)
        job.release(LATE)
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(rank_of(job, TO))
        job.wait_until(lambda: names(job).count("moving") == 2, "another try")
        job.wait_held(later)
        job.rejoin(rank_of(job, TO))
        job.wait_until(lambda: names(job).count("waiting") == 2, "another process")
        job.release(later)
        job.wait_event("left", kind="move")
        check_all(job, undisturbed, but={"1:0", MOVER})
    assert names(job) == ["moving", "waiting", "move_failed", "moving", "waiting", "joined", "left"]


@pytest.mark.night
def test_another_failure_meanwhile_ends_the_move(undisturbed):
    """And the planner decides anew: now stage 1 has nobody to spare."""
    dies = Hold("0:1", "backward", KILLED_IN + 2)
    with job_of(3, dies) as job:
        lose_two(job)
        job.rejoin(rank_of(job, TO))
        job.wait_event("waiting", worker=TO)
        job.wait_held(dies)
        job.kill(dies)
        job.wait_event("suspected", worker="0:1")
        assert job.wait_event("move_failed")["reason"] == "the membership has changed"
        job.release(LATE)
        assert job.wait_ended(rank_of(job, TO)).status == 1
        check_all(job, undisturbed, but={"1:0", TO, "0:1"})
    assert names(job) == ["moving", "waiting", "move_failed"]
