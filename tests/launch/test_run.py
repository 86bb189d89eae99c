"""`recycle run` from outside: real processes, real signals, workers that compute nothing."""

from __future__ import annotations

import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.launch.running import Running, launched


def _committed(job: Running) -> list[int]:
    return [event["iteration"] for event in job.events if event["event"] == "committed"]


def _out(job: Running) -> dict[str, str]:
    decided = [event for event in job.events if event["event"] == "decided"]
    return decided[-1]["out"] if decided else {}


def _no_process_is_left(job: Running) -> None:
    assert job.children() == []


@pytest.mark.processes
def test_a_job_without_failures_ends_well_with_a_table(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {}, nproc=4) as job:
        assert job.wait() == 0, job.where()
        assert _committed(job) == [0, 1, 2, 3]
        _no_process_is_left(job)
    output = job.output.read_text()
    assert "finished" in output and "4 iterations committed" in output
    assert "rank 0 is worker 0:0" in output and "rank 1 is worker" not in output
    assert (job.folder / "worker-3.log").read_text().startswith("rank 3 is worker 1:1")


def _in_memory(job: Running) -> dict[str, Any]:
    """The message that the workers of this host have in common."""
    (memory,) = [entry for entry in Path(f"/proc/{job.process.pid}/fd").iterdir()
                 if os.readlink(entry).startswith("/memfd:recycle-")]
    found: dict[str, Any] = json.loads(zlib.decompress(memory.read_bytes()))
    return found


@pytest.mark.processes
def test_a_killed_worker_costs_no_iteration_and_no_other_process(tmp_path: Path) -> None:
    """Rank 4 is worker 1:1: the launcher does not know that, the worker says so. The plans are large: the workers of
    this host fetch each once, for all of them."""
    patient = {"heartbeat_timeout": 200.0, "grid": {"stages": 2, "microbatches": [800] * 3}}
    with launched(tmp_path / "run", {"pause": {"4": 2}, "description": patient}) as job:  # its end is seen
        job.paused(4)
        first = _in_memory(job)
        job.kill(4)
        assert job.wait() == 0, job.where()
        assert _committed(job) == [0, 1, 2, 3]
        suspected = job.event("suspected")
        assert (suspected["worker"], suspected["kind"], suspected["rank"]) == ("1:1", "exit", 4)
        heard = [event for event in job.events if event["event"] == "rebuilt"]
        assert {event["worker"] for event in heard} == {"0:0", "0:1", "1:0", "2:0", "2:1"}
        assert job.event("reconciled")["iteration"] == 2
        _no_process_is_left(job)
    assert first["type"] == "go" and first["generation"] == 1 and "1:1" in first["plan"]["workers"]
    output = job.output.read_text()
    assert "signal SIGKILL" in output and "1 workers lost, after 1 of them training went on" in output


@pytest.mark.processes
@pytest.mark.night
def test_two_workers_of_different_stages_killed_at_once(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"1": 2, "5": 2}}) as job:
        job.kill(1, 5)
        assert job.wait() == 0, job.where()
        assert _committed(job) == [0, 1, 2, 3]
        assert _out(job) == {"1:0": "exit", "2:1": "exit"}
        generations = [event["generation"] for event in job.events if event["event"] == "decided"]
        assert generations == [2, 3]
        _no_process_is_left(job)


@pytest.mark.processes
def test_a_stage_without_workers_ends_the_job_within_seconds_and_is_named(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"2": 1, "3": 1}}, nproc=4) as job:
        job.kill(2, 3)
        assert job.wait() == 1, job.where()
        message = job.event("finished")["message"]
        assert "stage 1" in message and "checkpoint" in message
        _no_process_is_left(job)
        about = json.loads(next((job.folder / "post-mortem").glob("about-*.json")).read_text())
        assert about["message"] == message and about["versions"]["torch"] and about["status"] == 1
        assert not [name for name in about["environment"] if "TOKEN" in name]
        assert {"events.jsonl", "journal.jsonl", "plans", "worker-0.log", "coordinator.log"} <= {
            path.name for path in (job.folder / "post-mortem").iterdir()}
    output = job.output.read_text()
    assert "stage 1 has lost its last worker" in output and f"are in {job.folder / 'post-mortem'}" in output
    assert "ended: stage 1" in (job.folder / "worker-0.log").read_text()


@pytest.mark.processes
def test_a_stopped_worker_is_found_by_its_silence_and_its_late_words_have_no_effect(tmp_path: Path) -> None:
    orders = {"pause": {"3": 2, "0": 3}, "description": {"heartbeat_timeout": 2.0}}
    with launched(tmp_path / "run", orders, nproc=4) as job:
        (pid,) = job.paused(3)
        job.kill(3, number=signal.SIGSTOP)
        suspected = job.event("suspected")
        assert (suspected["worker"], suspected["kind"]) == ("1:1", "frozen")
        job.event("rolled_back", iteration=3)  # it pauses; the others are on their way again
        os.kill(pid, signal.SIGCONT)
        job.until(lambda: "declared out" in (job.folder / "worker-3.log").read_text(), "the fence")
        job.go_on(0)
        assert job.wait() == 0, job.where()
        assert _committed(job) == [0, 1, 2, 3]
        assert _out(job) == {"1:1": "frozen"}
        _no_process_is_left(job)


@pytest.mark.processes
@pytest.mark.slow
def test_a_worker_that_stays_stopped_does_not_outlive_the_job(tmp_path: Path) -> None:
    orders = {"pause": {"3": 2}, "description": {"heartbeat_timeout": 2.0}}
    with launched(tmp_path / "run", orders, nproc=4) as job:
        job.kill(3, number=signal.SIGSTOP)
        assert job.wait() == 0, job.where()
        _no_process_is_left(job)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.night
def test_a_worker_that_never_reports_is_out_too(tmp_path: Path) -> None:
    orders = {"pause": {"4": 2}, "mute": [2], "description": {"report_timeout": 2.0}}
    with launched(tmp_path / "run", orders) as job:
        job.kill(4)
        assert job.wait() == 0, job.where()
        assert _out(job) == {"1:1": "exit", "2:0": "stalled"}
        assert _committed(job) == [0, 1, 2, 3]
        _no_process_is_left(job)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_and_leaves_no_orphan(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path / "run", {"pause": {"1": 1}}, nproc=2) as job:
        job.paused(1)
        os.kill(job.coordinator(), number)  # as Slurm does: every process of the job
        job.process.send_signal(number)
        assert job.wait() == 128 + number, job.where()
        assert job.event("finished")["status"] == 128 + number
        assert "has died" not in job.output.read_text()
        _no_process_is_left(job)


@pytest.mark.processes
def test_a_script_with_a_sigterm_handler_of_its_own_ends_by_itself(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"iterations": 10**6, "handles": True}, nproc=2) as job:
        job.event("committed", iteration=1)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143, job.where()
        end = job.event("finished")
        assert end["status"] == 143 and end["out"] == {}
        assert end["message"] == "interrupted by SIGTERM, which the script handles itself: the job has finished"
        assert "the script handles SIGTERM itself: it has 30 s to end" in job.output.read_text()


@pytest.mark.processes
def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"1": 1}}, nproc=2) as job:
        job.paused(1)
        job.process.kill()
        job.until(lambda: not job.children(), "end of all processes")


@pytest.mark.processes
def test_a_worker_that_fails_at_the_start_ends_the_job_and_its_log_is_named(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"fail_at_start": [1]}, nproc=2) as job:
        assert job.wait() == 1, job.where()
        _no_process_is_left(job)
    output = job.output.read_text()
    assert "rank 1 ended with status 7 before training began" in output
    assert str(job.folder / "worker-1.log") in output


@pytest.mark.processes
def test_the_log_is_named_too_of_one_that_says_so_before_it_ends(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"fail_when_connected": [1]}, nproc=2) as job:
        assert job.wait() == 1, job.where()
    assert "rank 1 has ended before training began: see worker-1.log in the run's folder" in job.output.read_text()


@pytest.mark.processes
def test_a_used_folder_is_not_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        with launched(tmp_path / "run", {"iterations": 1}, nproc=2) as job:
            assert job.wait() == 0, job.where()
            assert _committed(job) == [0]
    (aside,) = (tmp_path / "run").glob("before-*")
    assert {path.name for path in aside.iterdir()} >= {"events.jsonl", "journal.jsonl", "worker-0.log"}


@pytest.mark.processes
def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with launched(tmp_path / "run", {"pause": {"0": 0}}, nproc=2) as first:
        first.paused(0)
        with launched(tmp_path / "run", {}, nproc=2) as second:
            assert second.wait() != 0
            assert "choose another --run-dir" in second.output.read_text()
            second.folder = tmp_path / "none"  # the first job's processes are not the second's
        first.go_on(0)
        assert first.wait() == 0, first.where()
