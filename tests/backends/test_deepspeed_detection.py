"""Failures that no process end tells of: lost messages, stuck threads, lost hosts, late wakers. Training goes on with
the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from megatron_recycle.planner import search_process
from tests.backends import faults, gpt_job
from tests.backends.comparing import check_survivors
from tests.backends.faults import Fault
from tests.harness import Hold, Job, Result
from tests.references import calm_run

pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS, AT = 3, 2, 6, 4
SIZE = PIPELINES * STAGES
SETTINGS = {"reduction": "exact"}
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS, "settings": SETTINGS}
QUICK = {**EXACT, "settings": {**SETTINGS, "heartbeat_timeout": 3.0, "stall_floor": 4.0}}


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures."""
    return calm_run(gpt_job.train, SIZE, EXACT)


# ---- nobody is at fault


@pytest.mark.night
@pytest.mark.parametrize(("fault", "reason"), [
    pytest.param(Fault("swallow", Hold("1:0", "forward", AT, 1)), "all workers wait", id="a message is lost"),
    pytest.param(Fault("abort", Hold("1:1", "backward", AT, 1)), "failed", id="connections break")])
def test_without_a_failure_the_same_members_go_on(fault, reason, undisturbed):
    with Job(faults.train, SIZE, {**QUICK, "faults": [fault]}) as job:
        check_survivors(job, set(), undisturbed)
    decided = [event for event in job.events if event["event"] == "decided"]
    assert [event["generation"] for event in decided] == [2]
    assert decided[0]["out"] == {} and reason in decided[0]["reason"]
    assert not [event for event in job.events if event["event"] == "suspected"]


@pytest.mark.night
def test_connections_that_break_again_and_again_end_the_job_with_a_report():
    again = [Fault("abort", Hold("1:1", "forward", AT, nth)) for nth in range(16)]
    with Job(faults.train, SIZE, {**QUICK, "faults": again}) as job:
        results = job.wait()
        finished = job.wait_event("finished")
    assert "1:1" in finished["message"] and "network" in finished["message"]
    assert [result.status for result in results.values()] == [1] * SIZE


@pytest.mark.night
def test_connections_of_torchs_world_that_break_before_a_checkpoint_cost_nothing(undisturbed, tmp_path):
    """Nobody meets over them, neither the checkpoint nor the script."""
    arguments = {**QUICK, "save": (str(tmp_path), AT)}
    with Job(faults.train, SIZE, {**arguments, "faults": [Fault("apart", Hold("1:0", "stepped", AT - 1))]}) as job:
        check_survivors(job, set(), undisturbed)
    assert not [event for event in job.events if event["event"] in ("decided", "suspected")]
    assert [event["place"] for event in job.events if event["event"] == "checkpoint"], "it is written"


# ---- in the middle of connecting


@pytest.mark.night
@pytest.mark.parametrize("kind", ["vanish", "freeze"])
def test_a_second_worker_fails_while_the_survivors_connect(kind, undisturbed):
    """They know where it listens and wait for its answer, for ten minutes here if nothing ended that."""
    first = Hold("0:1", "backward", AT, 1)
    arguments = {**QUICK, "settings": {**QUICK["settings"], "report_timeout": 1200.0, "connect_timeout": 600.0},
                 "faults": [Fault(kind, Hold("1:0", "recovering", AT))]}
    with Job(faults.train, SIZE, arguments, [first]) as job:
        job.wait_held()
        job.kill(first)
        job.wait_event("resumed")
        if kind == "freeze":
            os.kill(job.processes[1].pid, signal.SIGKILL)
        check_survivors(job, {"0:1", "1:0"}, undisturbed)


@pytest.mark.night
def test_who_has_made_its_step_in_a_recovery_only_waits_for_the_others(undisturbed):
    """The other one is found frozen long after the time that a step may take."""
    first, second = Hold("0:1", "reduced", AT), Hold("1:0", "step", AT)
    settings = {**SETTINGS, "step": "barrier", "heartbeat_timeout": 8.0, "stall_floor": 2.0}
    with Job(faults.train, SIZE, {**EXACT, "settings": settings}, [first, second]) as job:
        job.wait_held(first)
        job.kill(first)
        job.wait_held(second)
        job.kill(second, with_signal=signal.SIGSTOP)
        found = job.wait_event("decided", generation=3)
        assert found["out"] == {"0:1": "exit", "1:0": "frozen"}
        job.kill(second)
        check_survivors(job, {"0:1", "1:0"}, undisturbed)


# ---- only the training thread is stuck


@pytest.mark.parametrize("hold", [
    Hold("1:1", "forward", AT, 1), pytest.param(Hold("0:0", "data", AT, 2), marks=pytest.mark.night),
    pytest.param(Hold("2:0", "step", AT), marks=pytest.mark.night)], ids=str)
def test_a_stuck_training_thread_is_out_and_wakes_up_too_late(hold, undisturbed):
    with Job(faults.train, SIZE, QUICK, [hold]) as job:
        job.wait_held()
        suspected = job.wait_event("suspected")
        assert (suspected["worker"], suspected["kind"]) == (hold.worker, "stalled")
        assert suspected["progress"]["doing"]["what"] == hold.phase
        job.wait_event("committed", iteration=AT)
        job.release(hold)
        check_survivors(job, {hold.worker}, undisturbed)
        assert [result.status for result in job.results.values()].count(3) == 1
    assert len([event for event in job.events if event["event"] == "suspected"]) == 1


# ---- silence


@pytest.mark.night
def test_a_frozen_worker_that_wakes_up_after_it_was_declared_out_changes_nothing(undisturbed):
    hold = Hold("1:1", "backward", AT, 1)
    with Job(faults.train, SIZE, QUICK, [hold]) as job:
        job.wait_held()
        job.kill(hold, with_signal=signal.SIGSTOP)
        assert job.wait_event("suspected")["kind"] == "frozen"
        job.wait_event("committed", iteration=AT)
        job.release(hold)
        job.kill(hold, with_signal=signal.SIGCONT)
        check_survivors(job, {hold.worker}, undisturbed)
        assert [result.status for result in job.results.values()].count(3) == 1
    assert {event["generation"] for event in job.events if event["event"] == "decided"} == {2}


@pytest.mark.night
@pytest.mark.parametrize("whole", [pytest.param(True, id="all of its workers"), pytest.param(False, id="one of two")])
def test_a_host_that_goes_silent_is_one_decision(whole, undisturbed):
    holds = [Hold("2:0", "backward", AT, 1), Hold("1:1", "backward", AT, 1)]
    hosts = {rank: "far" if rank in (2, 4) else "near" for rank in range(SIZE)}  # 2:0 and 1:1
    with Job(faults.train, SIZE, {**QUICK, "hosts": hosts}, holds) as job:
        job.wait_held()
        silent = holds if whole else holds[:1]
        job.kill(*silent, with_signal=signal.SIGSTOP)
        decided = job.wait_event("decided")
        assert decided["out"] == {hold.worker: "unreachable" if whole else "frozen" for hold in silent}
        for hold in holds:
            job.release(hold)
        job.wait_event("committed", iteration=AT)
        job.kill(*silent, with_signal=signal.SIGCONT)
        check_survivors(job, {hold.worker for hold in silent}, undisturbed)
    assert {event["generation"] for event in job.events if event["event"] == "decided"} == {2}


# ---- a worker's memory is wrong


@pytest.mark.parametrize("kind", ["flip", pytest.param("nan", marks=pytest.mark.night)])
def test_one_of_three_peers_that_holds_other_parameters_is_healed_by_them(kind, undisturbed):
    checked = {**EXACT, "settings": {**SETTINGS, "verify_every": 1}}
    with Job(faults.train, SIZE, {**checked, "faults": [Fault(kind, Hold("1:0", "stepped", AT - 1))]}) as job:
        check_survivors(job, set(), undisturbed)
    suspected, = [event for event in job.events if event["event"] == "suspected"]
    assert (suspected["worker"], suspected["kind"], suspected["iteration"]) == ("1:0", "corrupt", AT)
    healed, = [event for event in job.events if event["event"] == "healed"]
    assert healed["worker"] == "1:0" and healed["bytes"] > 0
    assert not [event for event in job.events if event["event"] == "decided"]


def test_of_two_peers_that_differ_nobody_knows_which_is_right_and_the_job_stops():
    checked = {**EXACT, "pipelines": 2, "settings": {**SETTINGS, "verify_every": 2}}
    with Job(faults.train, 4, {**checked, "faults": [Fault("flip", Hold("1:0", "stepped", AT - 1))]}) as job:
        results = job.wait()
        finished = job.wait_event("finished")
    assert "stage 0 differ" in finished["message"] and "1:0" in finished["message"]
    assert [result.status for result in results.values()] == [1] * 4


# ---- a worker is slow


LONGER: Mapping[str, Any] = {**EXACT, "iterations": 14}


@pytest.fixture(scope="module")
def longer() -> dict[int, Result]:
    """The exact job with more iterations."""
    return calm_run(gpt_job.train, SIZE, LONGER)


def told(events: list[dict[str, Any]]) -> int:
    """Where 1:1 was reported slow among the events so far; their number, if it was not yet."""
    return next((at for at, event in enumerate(events) if event["event"] == "slow" and event["worker"] == "1:1"),
                len(events))


@pytest.mark.slow
@pytest.mark.night
def test_a_slow_worker_is_reported_and_gets_less_work(longer, monkeypatch):
    monkeypatch.setattr(search_process, "RESERVE", -60.0)  # the search ends with its work, and not by the clock
    settings = {**SETTINGS, "planner_budget": 0.5, "stall_floor": 200.0}
    arguments = {**LONGER, "settings": settings, "slow": {"1:1": (0, 0.25)}}
    # The search takes its time: the job does not end before it, and who waits for it does not count as stalled.
    until_planned = Hold("0:0", "stepped", LONGER["iterations"] - 4)
    with Job(faults.train, SIZE, arguments, [until_planned], profiled=True, limit=180) as job:
        job.wait_held(until_planned)
        job.wait_until(lambda: "planned" in {event["event"] for event in job.events[told(job.events):]}, "a new plan")
        job.release(until_planned)
        check_survivors(job, set(), longer)
        results = job.results
    assert next(event for event in job.events if event["event"] == "slow" and event["worker"] == "1:1")["factor"] > 1.25
    assert not [event for event in job.events if event["event"] == "suspected"]
    assert [event for event in job.events if event["event"] == "adopted"]
    values = [result.value for result in results.values()]
    of = {(value["pipeline"], value["stage"]): value["forwards"] for value in values}
    assert of[1, 1].get(LONGER["iterations"] - 1, 0) < 4


@pytest.mark.night
def test_a_worker_that_becomes_slow_is_removed_if_the_user_asks(longer):
    began = 6
    settings = {**SETTINGS, "slow_factor_out": 4.0}
    with Job(faults.train, SIZE, {**LONGER, "settings": settings, "slow": {"1:1": (began, 0.3)}}, profiled=True) as job:
        check_survivors(job, {"1:1"}, longer)
        assert [result.status for result in job.results.values()].count(3) == 1
    removed = next(event for event in job.events if event["event"] == "suspected" and event.get("removed", True))
    assert (removed["worker"], removed["kind"]) == ("1:1", "slow")
    assert removed["iteration"] <= began + 3


@pytest.mark.night
def test_the_time_of_a_transfer_is_measured():
    seconds = 0.05
    with Job(faults.train, 4, {**EXACT, "pipelines": 2, "hop": seconds}, profiled=True) as job:
        assert all(result.status == 0 for result in job.wait().values()), job.where()
        profiled = job.wait_event("profiled")
    assert seconds <= profiled["costs"]["hop"] / 1e6 <= 2 * seconds
