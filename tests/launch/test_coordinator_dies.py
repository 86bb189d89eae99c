"""The coordinator is killed, or stopped for a while: the job does not die of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megatron_recycle.control.coordinator_spec import CoordinatorSpec
from megatron_recycle.control.link import visit
from megatron_recycle.launch import coordinator_process as service
from megatron_recycle.membership.protocol import TO_LAUNCHER, LauncherHello, Lives
from tests.launch.running import LIMIT, Running, launched

TOKEN = "0123456789abcdef"


def _committed(job: Running) -> list[int]:
    return [event["iteration"] for event in job.events if event["event"] == "committed"]


def _generations(job: Running) -> list[int]:
    return [event["generation"] for event in job.events if event["event"] == "decided"]


@pytest.mark.processes
def test_training_goes_on_when_the_coordinator_is_killed_in_the_middle_of_it(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"0": 2}}, nproc=2) as job:
        job.paused(0)
        job.event("committed", iteration=1)
        os.kill(job.coordinator(), signal.SIGKILL)
        job.event("restarted", generation=1)
        job.go_on(0)
        assert job.wait() == 0, job.where()
        assert _committed(job) == [0, 1, 2, 3]
        assert _generations(job) == []
        assert job.children() == []


@pytest.mark.processes
def test_the_next_coordinator_may_be_killed_before_it_listens(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"0": 2}}, nproc=2) as job:
        job.paused(0)
        job.event("committed", iteration=1)
        for _ in range(3):
            pid = job.until(job.coordinator, "coordinator")
            os.kill(pid, signal.SIGKILL)
            job.until(lambda pid=pid: job.coordinator() not in (pid, 0), "next coordinator")
        job.event("restarted", generation=1)
        job.go_on(0)
        assert job.wait() == 0, job.where()
        assert _committed(job) == [0, 1, 2, 3]
        # Once more if the last one has served all workers, and ended, before the launcher is back.
        assert job.output.read_text().count("has died; starting it again") in (3, 4)
        assert job.children() == []


@pytest.mark.processes
def test_a_worker_that_dies_while_there_is_no_coordinator_is_found_by_the_next_one(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"3": 2}}, nproc=4) as job:
        (victim,) = job.paused(3)
        os.kill(job.coordinator(), signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        assert job.wait() == 0, job.where()
        assert job.event("suspected")["worker"] == "1:1"
        assert _committed(job) == [0, 1, 2, 3]
        assert job.children() == []


@pytest.mark.processes
def test_a_recovery_that_was_half_announced_is_begun_again(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"3": 2}, "pause_report": {"2": 2}}, nproc=4) as job:
        job.kill(3)
        job.paused(2)  # generation 2 is decided and announced, one report is missing
        os.kill(job.coordinator(), signal.SIGKILL)
        job.event("decided", generation=3)
        assert job.wait() == 0, job.where()
        assert _generations(job) == [2, 3]
        assert _committed(job) == [0, 1, 2, 3]
        assert job.event("finished")["out"] == {"1:1": "exit"}
        assert job.children() == []


@pytest.mark.night
@pytest.mark.processes
def test_nobody_is_declared_out_because_the_coordinator_stood_still(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"0": 2}, "description": {"heartbeat_timeout": 1.5}}) as job:
        job.paused(0)
        pid = job.coordinator()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)  # longer than any heartbeat may take
        os.kill(pid, signal.SIGCONT)
        job.go_on(0)
        assert job.wait() == 0, job.where()
        assert _generations(job) == []
        assert _committed(job) == [0, 1, 2, 3]


@pytest.mark.processes
def test_without_its_journal_no_coordinator_leads(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"0": 2}}, nproc=2) as job:
        job.paused(0)
        pid = job.coordinator()
        (job.folder / "journal.jsonl").unlink()
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == 1, job.where()
        assert "refuses to lead" in job.output.read_text()
        assert job.children() == []


def test_its_launcher_hears_of_a_coordinator_all_the_time(tmp_path: Path) -> None:
    """One that stands still would be missed by its silence."""
    started = service.start(CoordinatorSpec(2), tmp_path, TOKEN, os.environ)
    hello = LauncherHello("far", (), 0, role="launcher")
    try:
        with visit(started.control, TOKEN, [hello], TO_LAUNCHER, "visit") as (answers, _):
            assert [type(answers.get(timeout=LIMIT)) for _ in range(2)] == [Lives, Lives]
    finally:
        started.kill()
