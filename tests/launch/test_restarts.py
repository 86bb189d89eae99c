"""The launcher starts a dead worker again, and it joins: real processes that compute nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron_recycle.launch.restarts import Restarts
from tests.launch.running import Running, launched

ITERATIONS = 8
JOINS = {"iterations": ITERATIONS, "pause": {"4": 2, "0": 5}, "offered": 6, "description": {"max_restarts": 1}}
"""Rank 4 is worker 1:1, to be killed before iteration 2; rank 0 lets nobody go beyond 5 until the joiner is there, and
6 is not held before all have heard of it."""


def lose_and_wait(job: Running) -> None:
    """1:1 is killed, started again, and ready to join."""
    job.kill(4)
    job.event("waiting", worker="1:1")
    job.paused(0)


def check(job: Running) -> None:
    """All was committed once, with all workers at last."""
    assert job.wait() == 0, job.where()
    assert [event["iteration"] for event in job.events if event["event"] == "committed"] == list(range(ITERATIONS))
    assert [event for event in job.events if event["event"] == "decided"][-1]["out"] == {}
    assert job.children() == []


@pytest.mark.processes
def test_a_worker_that_was_started_again_does_not_spoil_the_jobs_exit_status(tmp_path: Path) -> None:
    with launched(tmp_path / "run", JOINS) as job:
        lose_and_wait(job)
        job.go_on(0)
        check(job)
        assert job.event("joined")["worker"] == "1:1"
    output = job.output.read_text()
    assert "rank 4 is started again in 1 s (restart 1 of 1)" in output
    assert "1 workers lost, after 1 of them training went on, 1 joined" in output


@pytest.mark.processes
@pytest.mark.night
def test_the_coordinator_is_killed_while_a_worker_waits_to_join(tmp_path: Path) -> None:
    with launched(tmp_path / "run", JOINS) as job:
        lose_and_wait(job)
        os.kill(job.coordinator(), signal.SIGKILL)
        job.event("restarted")
        job.until(lambda: len([e for e in job.events if e["event"] == "waiting"]) == 2, "the joiner at the new one")
        job.go_on(0)
        check(job)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.night
def test_the_coordinator_is_killed_while_a_worker_is_being_taken_in(tmp_path: Path) -> None:
    """Generation 3 has it, and rank 2 does not report for that: so nobody was told to go."""
    with launched(tmp_path / "run", {**JOINS, "pause_report": {"2": 3}}) as job:
        lose_and_wait(job)
        job.go_on(0)
        job.paused(2)
        os.kill(job.coordinator(), signal.SIGKILL)
        job.event("decided", generation=4)
        job.go_on(2)
        check(job)
        assert job.event("joined")["generation"] > 3


def test_pauses_grow_and_what_never_joins_is_given_up() -> None:
    said: list[str] = []
    restarts = Restarts(said.append)
    restarts.ended(7, 0.0, "worker-7.log")
    assert not restarts.pending() and not said, "training has not begun"
    restarts.most = 10
    moment = 0.0
    for pause in (1, 2, 4):
        restarts.ended(7, moment, "worker-7.log")
        assert restarts.due(moment + pause - 0.1) == [] and restarts.pending()
        moment += pause
        assert restarts.due(moment) == [7] and not restarts.pending()
    restarts.ended(7, moment, "worker-7.log")
    assert said[-1] == "rank 7 stays out: it has ended 3 times before it had joined; see worker-7.log"
    restarts.joined(7)
    restarts.ended(7, moment, "worker-7.log")
    assert said[-1] == "rank 7 is started again in 1 s (restart 4 of 10)"


def test_a_rank_has_as_many_restarts_as_it_was_given() -> None:
    said: list[str] = []
    restarts = Restarts(said.append)
    restarts.most = 1
    restarts.ended(0, 0.0, "")
    assert restarts.due(1.0) == [0]
    restarts.joined(0)
    restarts.ended(0, 5.0, "")
    assert said[-1] == "rank 0 stays out: it has been started again 1 times (max_restarts)"


def test_a_host_that_has_failed_as_often_as_it_may_starts_nobody_again() -> None:
    said: list[str] = []
    gone: list[int] = []
    restarts = Restarts(said.append, gone.append)
    restarts.most, restarts.of_host = 10, 2
    for rank in (0, 1):  # at the same time: a power cut, a switch
        restarts.ended(rank, 100.0, "")
    assert restarts.due(101.0) == [0, 1] and gone == []
    restarts.joined(0)
    restarts.ended(1, 200.0, "")
    assert said[-1] == "rank 1 stays out: workers of this host have failed 2 times (max_failures_per_host)"
    restarts.ended(0, 201.0, "")
    assert gone == [1, 0] and not restarts.pending()


def test_a_rank_that_was_to_be_started_stays_out_with_its_host() -> None:
    gone: list[int] = []
    restarts = Restarts(lambda line: None, gone.append)
    restarts.most, restarts.of_host = 10, 2
    restarts.ended(0, 100.0, "")
    restarts.ended(1, 300.0, "")
    assert sorted(gone) == [0, 1] and not restarts.pending()


def test_a_rank_whose_end_is_faster_than_the_word_that_training_has_begun_is_started_again() -> None:
    said: list[str] = []
    restarts = Restarts(said.append)
    restarts.ended(4, 0.0, "worker-4.log")
    restarts.begun(1, 2.0)
    restarts.begun(1, 3.0)  # the coordinator has come back
    assert said == ["rank 4 is started again in 1 s (restart 1 of 1)"]
    assert restarts.due(2.9) == [] and restarts.due(3.0) == [4]


def test_who_fails_while_its_device_has_another_process_is_given_up_once() -> None:
    said: list[str] = []
    told: list[int] = []
    restarts = Restarts(said.append, told.append)
    restarts.replaced(4)
    assert not said, "nobody would have been started again"
    restarts.most = 1
    restarts.replaced(4)
    restarts.replaced(4)
    assert told == [4] and restarts.given_up == {4} and not restarts.pending()
    restarts.joined(4)
    assert not restarts.given_up
