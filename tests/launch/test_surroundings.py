"""A launcher in bad surroundings: the job does not depend on its starter, its terminal, or readers of its output."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launch.running import launched
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
