"""A launcher in bad surroundings: the job does not depend on its starter, its terminal, or readers of its output."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle import cli
from megatron_recycle.launch import command, slurm
from megatron_recycle.launch.launcher import Launcher
from megatron_recycle.launch.processes import Job
from tests.launch.running import FAKE_WORKER, launched
from tests.launch.test_restarts import JOINS, check, lose_and_wait


def careless() -> None:
    """What a starter leaves to the launcher: ignored and blocked signals."""
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@pytest.mark.processes
def test_a_job_outlives_its_reader_and_its_terminal_and_knows_how_workers_have_ended(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with launched(tmp_path / "run", JOINS, options=("--show", "all"), starter=careless, sink=writing) as job:
        os.close(writing)
        assert os.read(reading, 1)
        os.close(reading)
        job.paused(4)
        job.process.send_signal(signal.SIGHUP)
        lose_and_wait(job)
        assert not blocked(job.process.pid, signal.SIGTERM)
        job.go_on(0)
        check(job)
        assert job.event("suspected")["kind"] == "exit" and job.event("joined")["worker"] == "1:1"


def blocked(pid: int, number: int) -> bool:
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines()
               if line.startswith("SigBlk:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.fixture
def sigterm() -> Iterator[None]:
    """SIGTERM harms no test."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("ended", "status"), [(None, 143), (1, 143), (0, 0)])
def test_sigterm_while_no_worker_runs_leaves_nothing_behind_and_the_job_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sigterm: None, ended: int | None, status: int
) -> None:
    """Before the first life, or once one has ended: the next one is not begun, unless the job has come to its end."""
    asked: list[str] = []

    def start(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(slurm, "check_requeue", lambda environ: None)
    monkeypatch.setattr(slurm, "requeue", lambda environ: asked.append("requeue") or "")
    monkeypatch.setattr(command.service, "start", start)
    monkeypatch.setattr(command, "closing_table", start)
    if ended is not None:
        monkeypatch.setattr(command.Run, "live", lambda self, life: (None, ended))
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["--requeue", "--nproc", "1", "--run-dir", str(tmp_path / "run"), str(FAKE_WORKER)]
    assert cli.main(["run", *arguments]) == status
    assert asked == ["requeue"] * bool(status)
    assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if status else before), "Slurm may send it again"


def test_a_job_is_not_begun_in_a_folder_that_was_removed_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for arguments in (["--nproc", "1", str(FAKE_WORKER)], ["-m", "some.module"]):
        assert cli.main(["run", *arguments]) == 2
        assert capsys.readouterr().err == (
            "recycle run: the working directory was removed: start the job in another one\n")
    Launcher(Job([], {}, tmp_path, (), 0, folder=tmp_path / "gone"), "127.0.0.1:1", "token", print)  # the next life's
