"""Workers of a DeepSpeed job come back while it trains, and leave when they are asked to: with the same bits."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Set
from typing import Any

import pytest

from tests.backends import gpt_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run, run

pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 3, 2, 12, 2
SIZE = PIPELINES * STAGES
RAMP = (2, 2, 4, 4, 4, 6, 6, 5)
"""Micro-batches of the first iterations: changed between a failure and a rejoin, and after it."""
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS,
                            "settings": {"reduction": "exact"}, "by_hand": True, "follows": 1.0, "loader": "epochs"}
"""The script changes things by hand, which one that comes in does again while it catches up: the batch size by the
losses, which it is told, and the data, which it passes over."""
FEWER = 9
WITH_ALL: Mapping[str, Any] = {
    **EXACT, "iterations": FEWER, "tied": True, "bf16": True, "clipping": 0.05, "engine_settings": {"scheduler": {
        "type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}}},
    "follows": 0.0, "loader": "", "ramp": RAMP, "averages": True}
"""All kinds of state: of tied layers, masters, a schedule, an average of the weights. Clipping is active, so that the
workers go over to waiting for each other's norms."""
LIMIT = 190
LATE = Hold("0:0", "forward", KILLED_IN + 2)
"""Holds the job until whoever is to join is ready. Its switch is agreed with the iteration of this hold."""
BOUNDARY = KILLED_IN + 4
FIRST = Hold("1:1", "backward", KILLED_IN, 1)


def rank_of(worker: str) -> int:
    pipeline, stage = map(int, worker.split(":"))
    return stage * PIPELINES + pipeline


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures."""
    return calm_run(gpt_job.train, SIZE, EXACT)


def check_all(job: Job, reference: Mapping[int, Result], but: Set[str] = frozenset(),
              iterations: int = ITERATIONS) -> None:
    """All places `but` these are filled at the end, by workers with the reference's bits; no iteration was lost."""
    results = job.wait()
    live = set(range(SIZE)) - {rank_of(worker) for worker in but}
    for rank in live:
        assert results[rank].status == 0, job.where()
        assert len(results[rank].value["members"]) == len(live)
        own = differences(results[rank], reference[rank])  # also of losses, which one that comes in is told
        assert not own, (rank, own)
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(iterations))


def lose_one(job: Job) -> None:
    """1:1 is killed, and the others train on to LATE."""
    job.wait_held(FIRST)
    job.kill(FIRST)
    job.wait_ended(rank_of("1:1"))
    job.wait_held(LATE)


def test_a_killed_worker_is_replaced_and_training_goes_on_with_all():
    """All of its state comes with it. The workers wait for each other's norms: who comes in, too. Evaluations as well:
    stock tells the shapes of its messages once, which the new one has not heard. The script gives an iterator over a
    data loader, and keeps an average of the weights, which is its peers' in the new one too."""
    reference = calm_run(gpt_job.train, SIZE, WITH_ALL)
    evaluating = {**WITH_ALL, "evaluate": (1, FEWER - 1), "loader": "cycle"}
    with Job(gpt_job.train, SIZE, evaluating, [FIRST, LATE], limit=LIMIT) as job:
        lose_one(job)
        job.rejoin(rank_of("1:1"))
        job.wait_event("waiting", worker="1:1")
        job.release(LATE)
        joined = job.wait_event("joined", worker="1:1")
        check_all(job, reference, iterations=FEWER)
        evaluated = {tuple(result.value["evaluated"]) for result in job.results.values()}
    assert len(evaluated) == 1 and not any(map(math.isnan, evaluated.pop()))
    assert joined["bytes"] > 0
    taken_in = [event for event in job.events if event["event"] == "reconciled"][-1]
    assert (taken_in["iteration"], taken_in["redone"], taken_in["joined"]) == (BOUNDARY, 0, ["1:1"])


@pytest.mark.night
def test_lengths_of_samples_that_have_changed_since_are_those_of_a_worker_that_comes_back():
    """Its script begins with the first one, and changes how the dataset is read as its peers' have. In memory: without
    a framework."""
    arguments = {**EXACT, "follows": 0.0, "loader": "", "lengths": (3, 3, 3, 5, 5, 5, 8, 8, 4)}
    reference = calm_run(gpt_job.train, SIZE, arguments)
    with Job(gpt_job.train, SIZE, arguments, [FIRST, LATE], limit=LIMIT) as job:
        lose_one(job)
        job.rejoin(rank_of("1:1"))
        job.wait_event("waiting", worker="1:1")
        job.release(LATE)
        job.wait_event("joined", worker="1:1")
        check_all(job, reference)


@pytest.mark.night
@pytest.mark.parametrize("second", [
    Hold("2:0", "boundary", BOUNDARY), pytest.param(Hold("0:1", "joining", BOUNDARY), id="a giver"),
    Hold("2:0", "recovering", BOUNDARY - 1)], ids=str)
def test_another_worker_is_killed_while_one_comes_in(second, undisturbed):
    """It is taken in after the recovery from that."""
    with Job(gpt_job.train, SIZE, EXACT, [FIRST, LATE, second], limit=LIMIT) as job:
        lose_one(job)
        job.rejoin(rank_of("1:1"))
        job.wait_event("waiting", worker="1:1")
        job.release(LATE)
        job.wait_held(second)
        job.kill(second)
        job.wait_event("joined", worker="1:1")
        check_all(job, undisturbed, but={second.worker})


@pytest.mark.night
def test_a_joiner_that_is_killed_while_it_comes_in_harms_nobody_and_another_takes_its_place(undisturbed):
    dies, later = Hold("1:1", "joining", BOUNDARY), Hold("0:0", "forward", BOUNDARY + 1)
    with Job(gpt_job.train, SIZE, EXACT, [FIRST, LATE, later], limit=LIMIT) as job:
        lose_one(job)
        job.rejoin(rank_of("1:1"), dies)
        job.wait_event("waiting", worker="1:1")
        job.release(LATE)
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(rank_of("1:1"))
        job.wait_held(later)
        waits = len([event for event in job.events if event["event"] == "waiting"])
        job.rejoin(rank_of("1:1"))
        job.wait_until(lambda: len([e for e in job.events if e["event"] == "waiting"]) > waits, "another joiner")
        job.release(later)
        job.wait_event("joined", worker="1:1")
        check_all(job, undisturbed)


@pytest.mark.night
def test_a_joiner_with_another_model_or_configuration_is_refused_and_nobody_is_harmed(undisturbed):
    with Job(gpt_job.train, SIZE, EXACT, [FIRST, LATE], limit=LIMIT) as job:
        lose_one(job)
        another_seed = {"settings": {"reduction": "exact", "seed": 5}}
        for key, different in (("model", {"optimizer": "SGD"}), ("seed", another_seed)):
            job.rejoin(rank_of("1:1"), **different)
            assert job.wait_ended(rank_of("1:1")).status == 1
            reasons = [event["reason"] for event in job.events if event["event"] == "join_failed"]
            assert f"the job has {key} = " in reasons[-1], reasons
        job.release(LATE)
        check_all(job, undisturbed, but={"1:1"})
    assert [event["generation"] for event in job.events if event["event"] == "decided"] == [2]


def test_a_worker_that_gets_sigterm_leaves_at_a_boundary_and_nothing_is_redone():
    reference = calm_run(gpt_job.train, SIZE, WITH_ALL)
    with Job(gpt_job.train, SIZE, WITH_ALL, [LATE], limit=LIMIT) as job:
        job.wait_held(LATE)
        os.kill(job.processes[rank_of("2:1")].pid, signal.SIGTERM)
        job.wait_event("leaving", worker="2:1")
        os.kill(job.processes[rank_of("2:1")].pid, signal.SIGTERM)  # Slurm's, and the launcher's that got it too
        job.release(LATE)
        assert job.wait_ended(rank_of("2:1")).status == 0
        check_all(job, reference, but={"2:1"}, iterations=FEWER)
    reconciled, = [event for event in job.events if event["event"] == "reconciled"]
    assert reconciled["redone"] == 0 and reconciled["iteration"] == BOUNDARY
    left, = [event for event in job.events if event["event"] == "left" and "iteration" in event]
    assert (left["worker"], left["kind"], left["iteration"]) == ("2:1", "leave", BOUNDARY)


@pytest.mark.night
def test_when_the_last_of_a_stage_are_told_to_leave_the_job_ends_at_a_boundary_and_says_so():
    with Job(gpt_job.train, SIZE, EXACT, [LATE], limit=LIMIT) as job:
        job.wait_held(LATE)
        for pipeline in range(PIPELINES):
            os.kill(job.processes[rank_of(f"{pipeline}:1")].pid, signal.SIGTERM)
            job.wait_event("leaving", worker=f"{pipeline}:1")
        job.release(LATE)
        job.wait()
        finished = job.wait_event("finished")
    assert "stage 1 would have no worker" in finished["message"] and "checkpoint" in finished["message"]
    assert f"last committed iteration: {BOUNDARY - 1}" in finished["message"]


@pytest.mark.night
def test_checkpoints_are_written_while_a_worker_is_missing_and_with_its_successor(undisturbed, tmp_path):
    """Also the script of the one that came in asks for those of the past, which are there."""
    every = {"save_every": (str(tmp_path), 3)}
    with Job(gpt_job.train, SIZE, {**EXACT, **every}, [FIRST, LATE], limit=LIMIT) as job:
        lose_one(job)
        job.rejoin(rank_of("1:1"), **every)
        job.wait_event("waiting", worker="1:1")
        job.release(LATE)
        job.wait_event("joined", worker="1:1")
        check_all(job, undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        f"global_step{number}" for number in (12, 3, 6, 9)]
    assert (tmp_path / "latest").read_text() == "global_step12"
    resumed = {**EXACT, "iterations": 2, "follows": undisturbed[0].value["losses"][-1]}
    gone_on = run(gpt_job.train, SIZE, {**resumed, "load": (str(tmp_path), {})})
    unbroken = calm_run(gpt_job.train, SIZE, {**EXACT, "iterations": ITERATIONS + 2})
    for rank, result in gone_on.items():
        unbroken[rank].value["losses"] = unbroken[rank].value["losses"][ITERATIONS:]
        assert differences(result, unbroken[rank]) == {}
