"""Workers of a DeepSpeed job are killed at chosen moments; training goes on and ends with the same bits."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import gpt_job
from tests.backends.comparing import check_survivors, differences, run
from tests.harness import Hold, Job, Result

pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 3, 2, 5, 2
POSITIONS = [f"{pipeline}:{stage}" for pipeline in range(PIPELINES) for stage in range(STAGES)]
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS, "noisy": True,
                            "settings": {"reduction": "exact"}}
FAST_SGD: Mapping[str, Any] = {**EXACT, "optimizer": "SGD", "settings": {"reduction": "fast"}}


def tiers(values: list[str], fast: set[str]) -> list[Any]:
    """All ``values``, those not ``fast`` for the slow tier only."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures, in which every backward is split."""
    results = run(gpt_job.train, PIPELINES * STAGES, EXACT)
    assert not any(result.value["full"] for result in results.values())
    return results


@pytest.fixture(scope="module")
def undisturbed_fast() -> dict[int, Result]:
    """The fast one, whose first stage runs most B and W in one."""
    results = run(gpt_job.train, PIPELINES * STAGES, FAST_SGD)
    assert all(bool(result.value["full"]) == (rank < PIPELINES) for rank, result in results.items())
    return results


def kill_and_compare(holds: list[Hold], reference: Mapping[int, Result], arguments: Mapping[str, Any] = EXACT,
                     within: float = 0.0) -> Job:
    with Job(gpt_job.train, PIPELINES * STAGES, arguments, holds) as job:
        job.wait_held()
        job.kill(*holds)
        check_survivors(job, {hold.worker for hold in holds}, reference, within)
    return job


@pytest.mark.parametrize("position", tiers(POSITIONS, fast={"0:0", "1:1"}))
def test_a_worker_killed_in_mid_iteration_leaves_the_same_bits(position, undisturbed):
    job = kill_and_compare([Hold(position, "backward", KILLED_IN, 1)], undisturbed)
    resumed = next(event for event in job.events if event["event"] == "resumed")
    assert resumed["generation"] == 2
    reconciled = next(event for event in job.events if event["event"] == "reconciled")
    assert reconciled["target"] == KILLED_IN - 1


@pytest.mark.slow
@pytest.mark.parametrize("position", POSITIONS)
def test_with_the_fast_reduction_results_agree_to_rounding(position, undisturbed_fast):
    kill_and_compare([Hold(position, "backward", KILLED_IN, 2)], undisturbed_fast, FAST_SGD, within=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("position", "phase", "nth"), [
    ("0:0", "forward", 2), ("1:1", "forward", 0), ("2:1", "weight", 3), ("2:0", "reduce", 0), ("0:1", "reduce", 0),
    ("1:0", "reduced", 0), ("1:1", "reduced", 0)])
def test_a_worker_killed_before_the_commit_leaves_the_same_bits(position, phase, nth, undisturbed):
    kill_and_compare([Hold(position, phase, KILLED_IN, nth)], undisturbed)


@pytest.mark.slow
def test_a_worker_killed_after_the_commit_but_before_its_step(undisturbed):
    kill_and_compare([Hold("1:1", "step", KILLED_IN)], undisturbed)


@pytest.mark.parametrize(("stepped", "not_yet"), [
    pytest.param("1:1", "0:1", id="two peers"), pytest.param("1:0", "0:1", id="two stages", marks=pytest.mark.slow)])
def test_a_worker_killed_between_the_steps_of(stepped, not_yet, undisturbed):
    holds = [Hold(stepped, "stepped", KILLED_IN), Hold(not_yet, "step", KILLED_IN)]
    with Job(gpt_job.train, PIPELINES * STAGES, EXACT, holds) as job:
        job.wait_held()
        job.kill(holds[0])
        job.wait_event("decided", generation=2)
        job.release(holds[1])
        check_survivors(job, {stepped}, undisturbed)


@pytest.mark.parametrize("hold", [
    Hold("0:1", "reduced", ITERATIONS - 1),
    pytest.param(Hold("1:0", "backward", ITERATIONS - 1, 1), marks=pytest.mark.slow)], ids=str)
def test_a_worker_killed_in_the_last_iteration(hold, undisturbed):
    """Others may have nothing left to do than to stand by; the recovery is told to be over all the same."""
    job = kill_and_compare([hold], undisturbed)
    assert [event["generation"] for event in job.events if event["event"] == "resumed"] == [2]


def test_a_worker_killed_when_the_scripts_of_others_have_destroyed_their_process_groups(undisturbed):
    """As many scripts end: torch does not know any group then, and the recovery makes new ones all the same."""
    hold = Hold("0:1", "stepped", ITERATIONS - 1)
    others = {rank for rank in range(PIPELINES * STAGES) if rank != PIPELINES}
    with Job(gpt_job.train, PIPELINES * STAGES, {**EXACT, "tidy": True}, [hold]) as job:
        job.wait_held()
        for position in set(POSITIONS) - {hold.worker}:
            job.wait_event("left", worker=position)
        job.kill(hold)
        results = job.wait()
        assert {rank for rank, result in results.items() if result.status == 0} == others, job.where()
        assert all(not differences(results[rank], undisturbed[rank]) for rank in others)
        logs = [(job.folder / f"worker-{rank}.log").read_text() for rank in others]
        assert not any("Traceback" in log for log in logs), job.where()


@pytest.mark.slow
def test_two_workers_of_different_stages_killed_at_once(undisturbed):
    kill_and_compare([Hold("0:0", "backward", KILLED_IN, 1), Hold("2:1", "forward", KILLED_IN, 3)], undisturbed)


@pytest.mark.slow
def test_a_second_worker_killed_during_the_recovery_from_the_first(undisturbed):
    first, second = Hold("0:1", "backward", KILLED_IN, 1), Hold("1:0", "recovering", KILLED_IN)
    with Job(gpt_job.train, PIPELINES * STAGES, EXACT, [first, second]) as job:
        job.wait_held(first)
        job.kill(first)
        job.wait_held(second)
        job.kill(second)
        check_survivors(job, {"0:1", "1:0"}, undisturbed)


def test_when_a_stage_has_no_worker_left_the_job_stops_and_says_so():
    holds = [Hold(f"{pipeline}:1", "forward", KILLED_IN, 1) for pipeline in range(PIPELINES)]
    with Job(gpt_job.train, PIPELINES * STAGES, EXACT, holds, limit=40) as job:
        job.wait_held()
        job.kill(*holds)
        results = job.wait()
        finished = job.wait_event("finished")
    assert "stage 1" in finished["message"] and "checkpoint" in finished["message"], finished
    assert [result.status for result in results.values()] == [1, 1, 1, -9, -9, -9]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_campaign(seed, undisturbed):
    draw = random.Random(seed)
    phase, arrivals = draw.choice([("forward", 4), ("backward", 4), ("weight", 4), ("reduce", 1), ("reduced", 1),
                                   ("step", 1), ("stepped", 1)])
    hold = Hold(draw.choice(POSITIONS), phase, draw.randrange(ITERATIONS), draw.randrange(arrivals))
    kill_and_compare([hold], undisturbed)


# ---- without failures


@pytest.mark.slow
def test_a_worker_may_pause_for_longer_than_connecting_may_take():
    """Here half a second: nobody has failed, so nobody gives up."""
    paused = Hold("1:1", "backward", 1, 1)
    settings = {"reduction": "exact", "report_timeout": 1.0}
    with Job(gpt_job.train, PIPELINES * STAGES, {**EXACT, "settings": settings}, [paused]) as job:
        job.wait_held()
        time.sleep(1.5)
        job.release(paused)
        assert all(result.status == 0 for result in job.wait().values()), job.where()
        assert not [event for event in job.events if event["event"] in ("hint", "decided")]


@pytest.mark.parametrize("pipelines", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_without_failures_losses_and_parameters_have_the_stock_engines_bits(pipelines):
    arguments = {"pipelines": pipelines, "stages": 2, "iterations": 10, "dropout": 0.0}
    with Job(gpt_job.train, 2 * pipelines, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(gpt_job.train, 2 * pipelines, arguments) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0
        assert differences(stock[rank], ours[rank]) == {}
        most = [f"FB{rank % pipelines}.{microbatch}" for microbatch in range(1, 4)]
        assert ours[rank].value["full"] == (most if rank < pipelines else []), "B and W in one"


# ---- the comparison itself can fail


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["twice", "dropped", "order"])
def test_the_comparison_notices(mistake, undisturbed):
    wrong = run(gpt_job.train, PIPELINES * STAGES, {**EXACT, "mistake": mistake})
    assert any(differences(wrong[rank], undisturbed[rank]) for rank in wrong)


def test_peers_that_do_not_begin_alike_are_told_so():
    with Job(gpt_job.train, PIPELINES * STAGES, {**EXACT, "mistake": "apart"}, limit=40) as job:
        results = job.wait()
        assert all(result.status == 1 for result in results.values()), job.where()
    assert any("build the model from the same seed" in (result.error or "") for result in results.values())
