"""`recycle chaos` against a running job (of workers that compute nothing)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle import cli
from tests.launch.running import LIMIT, ROOT, Running, launched

QUICK = {"iterations": 40}
"""Iterations of some milliseconds: the job must not be over before it is hurt, so a worker is paused meanwhile."""
SILENCE = {**QUICK, "description": {"heartbeat_timeout": 2.0}}
"""Whoever is silent for that long is out; the usual is longer, since a busy machine may keep a worker waiting."""


def started(job: Running, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_recycle.cli", "chaos", "--run-dir", str(job.folder), *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


def chaos(job: Running, *words: str, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Run `recycle chaos` and do something once it waits for its moment; returns what it says."""
    tool = started(job, *words)
    try:
        if "--phase" in words or words[0] == "stall":
            job.until(lambda: list(job.folder.glob("chaos/*/*.json")), "armed moment")
        meanwhile()
        said = tool.communicate(timeout=LIMIT)[1]
    finally:
        tool.kill()
    assert tool.returncode == 0, said
    return said


def done(job: Running) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "chaos.jsonl").read_text().splitlines()]


def ended_well(job: Running, out: dict[str, str], iterations: int) -> None:
    assert job.wait() == 0, job.where()
    assert job.event("finished").get("out", {}) == out
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(iterations))
    assert job.children() == []


@pytest.mark.processes
def test_two_workers_are_killed_at_a_moment_of_an_iteration(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}, options=("--chaos", "allow")) as job:
        job.paused(0)
        chaos(job, "kill", "1:1", "2:0", "--at-iteration", "30", "--phase", "reduced", meanwhile=lambda: job.go_on(0))
        ended_well(job, {"1:1": "exit", "2:0": "exit"}, 40)
        assert [(act["event"], act["worker"], act["iteration"], act["phase"]) for act in done(job)] == [
            ("kill", "1:1", 30, "reduced"), ("kill", "2:0", 30, "reduced")]
        reports = job.event("stopped")["reports"]
        assert {report["holds"] for report in reports.values()} <= {29, 30}


@pytest.mark.processes
def test_without_listening_workers_an_iteration_is_told_from_the_events(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}) as job:
        job.paused(0)
        past = started(job, "kill", "1:1", "--at-iteration", "1")
        assert "committed already" in past.communicate(timeout=LIMIT)[1]
        assert past.returncode == 1
        chaos(job, "kill", "1:1", "--at-iteration", "3")
        ended_well(job, {"1:1": "exit"}, 40)
        assert [act["event"] for act in done(job)] == ["missed", "kill"]


@pytest.mark.processes
@pytest.mark.slow
def test_a_frozen_worker_is_found_and_one_thawed_in_time_stays(tmp_path: Path):
    with launched(tmp_path / "run", {**SILENCE, "pause": {"0": 3}}) as job:
        job.paused(0)
        chaos(job, "freeze", "0:1", "--for", "0.2")
        chaos(job, "freeze", "2:1")
        assert job.event("suspected")["worker"] == "2:1"
        ended_well(job, {"2:1": "frozen"}, 40)
        assert [(act["event"], act["worker"]) for act in done(job)] == [
            ("freeze", "0:1"), ("thaw", "0:1"), ("freeze", "2:1")]


@pytest.mark.processes
def test_a_stalled_worker_gives_signs_of_life_until_it_is_thawed(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}, options=("--chaos", "allow")) as job:
        job.paused(0)
        chaos(job, "stall", "1:0", "--at-iteration", "20", meanwhile=lambda: job.go_on(0))
        job.event("committed", iteration=19)
        chaos(job, "coordinator")  # the new one sees all members come back
        job.event("restarted")
        chaos(job, "thaw", "1:0")
        ended_well(job, {}, 40)


@pytest.mark.processes
def test_a_slowed_worker_runs_at_full_pace_again_afterwards(tmp_path: Path):
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}) as job:
        job.paused(0)
        chaos(job, "slow", "1:0", "3", "--for", "0.3")
        job.go_on(0)
        ended_well(job, {}, 40)
        assert done(job)[0]["factor"] == 3


@pytest.mark.processes
@pytest.mark.slow
def test_a_frozen_coordinator_is_woken_and_nobody_is_out(tmp_path: Path):
    with launched(tmp_path / "run", {**SILENCE, "pause": {"0": 3}}) as job:
        job.paused(0)
        chaos(job, "coordinator", "--freeze", "--for", "3")
        job.go_on(0)
        ended_well(job, {}, 40)


@pytest.mark.processes
def test_a_job_can_be_started_with_a_script_that_hurts_it(tmp_path: Path):
    script = tmp_path / "two.chaos"
    script.write_text("kill 0:0 --at-iteration 5 --phase forward\nkill 1:1 --at-iteration 5 --phase recovering\n"
                      "kill 2:1 --at-iteration 20 --phase stepped  # later\n")
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}, options=("--chaos", str(script))) as job:
        job.paused(0)
        job.until(lambda: len(list(job.folder.glob("chaos/*/*.json"))) == 3, "three armed moments")
        job.go_on(0)
        ended_well(job, {"0:0": "exit", "2:1": "exit"}, 40)
        reasons = [act["reason"] for act in done(job) if act["event"] == "missed"]
        assert len(reasons) == 1  # these workers have no such phase


def test_a_script_that_makes_no_sense_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "bad.chaos"
    script.write_text("kill everybody\n")
    for chaos_file, why in ((script, "line 1"), (tmp_path / "none.chaos", "No such file")):
        assert cli.main(["run", "--run-dir", str(tmp_path / "run"), "--chaos", str(chaos_file), __file__]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
@pytest.mark.slow
def test_random_acts_leave_the_job_alive_and_go_on_until_it_ends(tmp_path: Path):
    def at_first_act() -> None:
        job.until(lambda: (job.folder / "chaos.jsonl").exists() and done(job), "first act")
        job.go_on(0)

    with launched(tmp_path / "run", {**QUICK, "iterations": 400, "pause": {"0": 3}}) as job:
        job.paused(0)
        assert "waiting for workers to come back" in chaos(job, "random", "--seed", "4", "--rate", "6000", "--kinds",
                                                           "kill", meanwhile=at_first_act)
        killed = {act["worker"] for act in done(job)}
        assert len(killed) == 4 and {worker[-1] for worker in killed} == {"0", "1"}
        ended_well(job, dict.fromkeys(killed, "exit"), 400)
