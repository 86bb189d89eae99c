"""`recycle chaos` against a running job (of workers that compute nothing)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.running import LIMIT, ROOT, Running, launched

QUICK = {"iterations": 40, "description": {"heartbeat_timeout": 1.0}}
"""Iterations of some milliseconds: the job must not be over before it is hurt, so a worker is paused meanwhile."""


def chaos(job: Running, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_recycle.cli", "chaos", "--run-dir", str(job.folder), *words]
    # Not RECYCLE_RUN_DIR: this process is none of the job's.
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT)


def done(job: Running) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "chaos.jsonl").read_text().splitlines()]


def ended_well(job: Running, out: dict[str, str], iterations: int) -> None:
    assert job.wait() == 0, job.where()
    assert job.event("finished").get("out", {}) == out
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(iterations))
    assert job.children() == []


def test_two_workers_are_killed_at_a_moment_of_an_iteration(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}, options=("--chaos", "allow")) as job:
        job.paused(0)
        job.go_on(0)
        told = chaos(job, "kill", "1:1", "2:0", "--at-iteration", "30", "--phase", "reduced")
        assert told.returncode == 0, told.stderr
        ended_well(job, {"1:1": "exit", "2:0": "exit"}, 40)
        assert [(act["event"], act["worker"], act["iteration"], act["phase"]) for act in done(job)] == [
            ("kill", "1:1", 30, "reduced"), ("kill", "2:0", 30, "reduced")]
        reports = job.event("stopped", generation=2)["reports"]
        assert {report["holds"] for report in reports.values()} <= {29, 30}


def test_without_listening_workers_an_iteration_is_told_from_the_events(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}) as job:
        job.paused(0)
        assert chaos(job, "kill", "1:1", "--at-iteration", "1").returncode == 1  # that was before
        assert chaos(job, "kill", "1:1", "--at-iteration", "3").returncode == 0
        job.go_on(0)
        ended_well(job, {"1:1": "exit"}, 40)
        assert [act["event"] for act in done(job)] == ["missed", "kill"]


def test_a_frozen_worker_is_found_and_one_thawed_in_time_stays(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}) as job:
        job.paused(0)
        assert chaos(job, "freeze", "0:1", "--for", "0.2").returncode == 0
        assert chaos(job, "freeze", "2:1").returncode == 0
        assert job.event("suspected")["worker"] == "2:1"
        job.go_on(0)
        ended_well(job, {"2:1": "frozen"}, 40)
        assert [(act["event"], act["worker"]) for act in done(job)] == [
            ("freeze", "0:1"), ("thaw", "0:1"), ("freeze", "2:1")]


def test_a_stalled_worker_gives_signs_of_life_until_it_is_thawed(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}, options=("--chaos", "allow")) as job:
        job.paused(0)
        job.go_on(0)
        assert chaos(job, "stall", "1:0", "--at-iteration", "20").returncode == 0
        job.event("committed", iteration=19)
        assert chaos(job, "coordinator").returncode == 0  # the new one sees all members come back
        job.event("restarted")
        assert chaos(job, "thaw", "1:0").returncode == 0
        ended_well(job, {}, 40)


def test_a_slowed_worker_runs_at_full_pace_again_afterwards(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}) as job:
        job.paused(0)
        told = chaos(job, "slow", "1:0", "3", "--for", "0.3")
        assert told.returncode == 0, told.stderr
        job.go_on(0)
        ended_well(job, {}, 40)
        assert done(job)[0]["factor"] == 3


@pytest.mark.slow
def test_a_frozen_coordinator_is_woken_and_nobody_is_out(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}) as job:
        job.paused(0)
        assert chaos(job, "coordinator", "--freeze", "--for", "2").returncode == 0
        job.go_on(0)
        ended_well(job, {}, 40)


def test_a_job_can_be_started_with_a_script_that_hurts_it(tmp_path: Path):
    script = tmp_path / "two.chaos"
    script.write_text("kill 0:0 --at-iteration 5 --phase forward\nkill 1:1 --at-iteration 5 --phase recovering\n"
                      "kill 2:1 --at-iteration 20 --phase stepped  # later\n")
    with launched(tmp_path / "run", QUICK, options=("--chaos", str(script))) as job:
        ended_well(job, {"0:0": "exit", "2:1": "exit"}, 40)
        reasons = [act["reason"] for act in done(job) if act["event"] == "missed"]
        assert len(reasons) == 1  # these workers have no such phase


def test_a_script_that_makes_no_sense_is_refused_at_the_start(tmp_path: Path):
    script = tmp_path / "bad.chaos"
    script.write_text("kill everybody\n")
    with launched(tmp_path / "run", QUICK, options=("--chaos", str(script))) as job:
        assert job.wait() == 2
    assert "line 1" in job.output.read_text()


@pytest.mark.slow
def test_random_acts_leave_the_job_alive_and_end_when_no_more_can_be_borne(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "iterations": 4, "pause": {"4": 3}}) as job:
        job.paused(4)
        told = chaos(job, "random", "--seed", "4", "--rate", "600", "--kinds", "kill")
        assert told.returncode == 0, told.stderr
        killed = {act["worker"] for act in done(job)}
        assert len(killed) == 4 and {worker[-1] for worker in killed} == {"0", "1"}
        if (job.folder / "paused-4").exists():
            job.go_on(4)
        ended_well(job, dict.fromkeys(killed, "exit"), 4)
