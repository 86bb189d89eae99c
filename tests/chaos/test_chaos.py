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
    """Run `recycle chaos` and do something meanwhile; returns what it says."""
    tool = started(job, *words)
    try:
        meanwhile()
        said = tool.communicate(timeout=LIMIT)[1]
    finally:
        tool.kill()
    assert tool.returncode == 0, said
    return said


def armed_and_on(job: Running) -> None:
    """Once the tool has armed a worker, let worker 0 go on."""
    job.until(lambda: list(job.folder.glob("chaos/*/*.json")), "armed moment")
    job.go_on(0)


def done(job: Running) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "chaos.jsonl").read_text().splitlines()]


def ended_well(job: Running, out: dict[str, str], iterations: int) -> None:
    assert job.wait() == 0, job.where()
    assert job.event("finished").get("out", {}) == out
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(iterations))
    assert job.children() == []


@pytest.mark.processes
@pytest.mark.slow
def test_harm_that_ends_in_time_costs_nobody_and_what_lasts_is_found(tmp_path: Path):
    """Without listening workers an iteration is told from the events."""
    brief, lasting = tmp_path / "brief.chaos", tmp_path / "lasting.chaos"
    brief.write_text("slow 1:0 3 --for 0.3\nfreeze 0:1 --for 0.2\ncoordinator --freeze --for 3 --after 1\n"
                     "kill 1:1 --at-iteration 1\n")
    lasting.write_text("kill 1:1 --at-iteration 3\nfreeze 2:1\n")
    with launched(tmp_path / "run", {**SILENCE, "pause": {"0": 3}}) as job:
        job.paused(0)
        tool = started(job, "script", str(brief))
        assert "kill 1:1 in iteration 1: iteration 1 is committed already" in tool.communicate(timeout=LIMIT)[1]
        assert tool.returncode == 1
        assert not [event for event in job.events if event["event"] == "suspected"]
        chaos(job, "script", str(lasting))
        job.event("suspected", worker="2:1")
        ended_well(job, {"1:1": "exit", "2:1": "frozen"}, 40)
        acts = [(act["event"], act.get("worker")) for act in done(job)]
        assert sorted(acts[:6], key=str) == [("coordinator", None), ("freeze", "0:1"), ("missed", None),
                                             ("slow", "1:0"), ("thaw", "0:1"), ("thaw", None)]
        assert {*acts[6:]} == {("kill", "1:1"), ("freeze", "2:1")}


@pytest.mark.processes
@pytest.mark.night
def test_a_stalled_worker_gives_signs_of_life_until_it_is_thawed(tmp_path: Path):
    script = tmp_path / "two.chaos"
    script.write_text("stall 1:0 --at-iteration 20\ncoordinator --at-iteration 20\n")
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}, options=("--chaos", "allow")) as job:
        job.paused(0)
        chaos(job, "script", str(script), meanwhile=lambda: armed_and_on(job))
        job.event("restarted")  # the new coordinator sees all members come back
        assert [event["iteration"] for event in job.events if event["event"] == "committed"][-1] == 19
        chaos(job, "thaw", "1:0")
        ended_well(job, {}, 40)


@pytest.mark.processes
def test_a_job_can_be_started_with_a_script_that_hurts_it(tmp_path: Path):
    """And two workers may be hit at the same moment."""
    script = tmp_path / "some.chaos"
    script.write_text("kill 0:0 --at-iteration 5 --phase forward\nkill 1:1 --at-iteration 5 --phase recovering\n"
                      "kill 1:1 2:0 --at-iteration 30 --phase reduced  # later\n")
    with launched(tmp_path / "run", {**QUICK, "pause": {"0": 3}}, options=("--chaos", str(script))) as job:
        job.paused(0)
        job.until(lambda: len(list(job.folder.glob("chaos/*/*.json"))) == 4, "four armed moments")
        job.go_on(0)
        ended_well(job, {"0:0": "exit", "1:1": "exit", "2:0": "exit"}, 40)
        kills = [(act["worker"], act["iteration"], act["phase"]) for act in done(job) if act["event"] == "kill"]
        assert kills == [("0:0", 5, "forward"), ("1:1", 30, "reduced"), ("2:0", 30, "reduced")]
        assert [act["order"] for act in done(job) if act["event"] == "missed"] == [
            "kill 1:1 in iteration 5 at recovering"]  # these workers have no such phase
        *_, reports = (event["reports"] for event in job.events if event["event"] == "stopped")
        assert {report["holds"] for report in reports.values()} <= {29, 30}


def test_a_script_that_makes_no_sense_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "bad.chaos"
    script.write_text("kill everybody\n")
    for chaos_file, why in ((script, "line 1"), (tmp_path / "none.chaos", "No such file")):
        assert cli.main(["run", "--run-dir", str(tmp_path / "run"), "--chaos", str(chaos_file), __file__]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.night
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
