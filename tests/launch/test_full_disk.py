"""The disk of the run's folder is full, of whatever, and then something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.running import LIMIT, ROOT, Running, launched
from tests.membership.test_disk import fill


def kill_one_after_the_other(job: Running, pids: Sequence[int]) -> None:
    """Each once the one before is out, as long as the job lives."""
    for generation, pid in enumerate(pids, 2):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        out = f"decided generation={generation} "
        job.until(lambda out=out: out in job.output.read_text() or job.process.poll() is not None, out)


@pytest.mark.processes
def test_a_job_survives_workers_and_the_coordinator_though_nothing_can_be_written_any_more(
    tmp_path: Path, disk: Callable[[int], Path]
) -> None:
    """Events, plans and logs are left out; for the journal disk was set aside."""
    orders = {"marks": str(tmp_path / "marks"), "iterations": 400}
    with launched(disk(3000), orders) as job:
        pids = job.event("started")["pids"]
        fill(job.folder)
        kill_one_after_the_other(job, [pids["1:1"], pids["2:0"]])
        os.kill(job.coordinator(), signal.SIGKILL)
        assert job.wait() == 0, job.where()
        assert "the job has finished" in job.output.read_text()
        assert job.children() == []
        assert "finished" not in [event["event"] for event in job.events], "the disk was full to the end"


@pytest.mark.processes
@pytest.mark.night
def test_where_the_journal_cannot_be_written_the_job_ends_and_says_which_disk_is_full(
    tmp_path: Path, disk: Callable[[int], Path]
) -> None:
    """Too small a disk for any to be set aside."""
    orders = {"marks": str(tmp_path / "marks"), "iterations": 400}
    with launched(disk(700), orders) as job:
        pids = job.event("started")["pids"]
        fill(job.folder)
        kill_one_after_the_other(job, [pids[name] for name in ("1:1", "2:0", "2:1", "1:0")])
        assert job.wait() == 1, job.where()
        assert job.children() == []
        said = " ".join(job.output.read_text().split())
        assert f"the journal {job.folder / 'journal.jsonl'} cannot be written (No space left on device)" in said
        assert f"make room on, or mend, the disk of {job.folder}" in said


PRINTS = """
import sys
from megatron_recycle.observe.output import spare_output
spare_output()
for number in range(2000):
    print("x" * 100)
    print("y" * 100, file=sys.stderr)
print("to the end", file=open(sys.argv[1], "w"))
"""


def test_what_a_worker_prints_to_a_full_disk_is_lost_and_not_the_worker(
    tmp_path: Path, disk: Callable[[int], Path]
) -> None:
    folder = disk(100)
    for environ in ({"PYTHONUNBUFFERED": "1"}, {}):
        with (folder / "log").open("ab") as log:
            command = [sys.executable, "-c", PRINTS, str(tmp_path / "end")]
            subprocess.run(command, stdout=log, stderr=log, check=True, timeout=LIMIT,
                           env={**os.environ, "PYTHONPATH": str(ROOT), **environ})
        assert (tmp_path / "end").read_text() == "to the end\n"
        (tmp_path / "end").unlink()
    assert {*(folder / "log").read_text()} == {*"xy\n"}
