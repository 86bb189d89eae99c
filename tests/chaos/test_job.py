"""Nothing is touched but the workers of the job that was named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle import cli
from megatron_recycle.observe.holds import folder_of, write
from megatron_recycle.tools.chaos.acts import Act
from megatron_recycle.tools.chaos.orders import read_script
from megatron_recycle.tools.chaos.target_job import ChaosError, TargetJob


@contextmanager
def sleeping(folder: Path, rank: int) -> Iterator[subprocess.Popen]:
    environ = {**os.environ, "RECYCLE_RUN_DIR": str(folder), "RANK": str(rank)}
    process = subprocess.Popen(["sleep", "60"], env=environ)
    while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.001)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process that says that it is rank 1 of the job in tmp_path."""
    with sleeping(tmp_path, 1) as process:
        yield process


def job(folder: Path, pid: int, *more: dict[str, Any], **started: Any) -> TargetJob:
    event = {"t": time.time(), "event": "started", "pids": {"1:0": pid}, "ranks": {"1:0": 1},
             "grid": {"stages": 1, "microbatches": [2, 2]}, **started}
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (event, *more)))
    made = TargetJob(folder)
    made.follow()
    return made


def test_a_worker_of_the_job_gets_the_signal(tmp_path: Path, stranger: subprocess.Popen):
    job(tmp_path, stranger.pid).signal(["1:0"], signal.SIGKILL)
    assert stranger.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(("started", "why"), [
    ({"t": 1000.0}, "it started .* after"),
    ({"ranks": {"1:0": 2}}, "it is rank 1, not 2"),
    ({"hosts": {"1:0": "elsewhere"}}, "runs on host elsewhere"),
])
def test_a_process_that_only_has_the_pid_is_left_alone(tmp_path: Path, stranger: subprocess.Popen, started, why):
    with pytest.raises(ChaosError, match=why):
        job(tmp_path, stranger.pid, **started).signal(["1:0"], signal.SIGKILL)
    assert stranger.poll() is None


def test_a_worker_of_another_job_is_left_alone(tmp_path: Path, stranger: subprocess.Popen):
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ChaosError, match=f"it belongs to the job in {tmp_path}"):
        job(other, stranger.pid).signal(["1:0"], signal.SIGKILL)
    assert stranger.poll() is None


def test_a_worker_that_has_ended_is_said_to_have(tmp_path: Path, stranger: subprocess.Popen):
    target = job(tmp_path, stranger.pid)
    stranger.kill()
    stranger.wait()
    with pytest.raises(ChaosError, match="has ended"):
        target.signal(["1:0"], signal.SIGKILL)


@pytest.mark.parametrize(("named", "hit"), [("1:0", [True, True]), ("1:0.1", [False, True])])
def test_a_worker_that_has_parts_is_hit_in_all_of_them_or_in_the_one_that_is_named(tmp_path, stranger, named, hit):
    with sleeping(tmp_path, 2) as other:
        target = job(tmp_path, 0, ranks={"1:0.0": 1, "1:0.1": 2}, pids={"1:0.0": stranger.pid, "1:0.1": other.pid})
        (order,) = read_script([f"kill {named} --at-iteration 0"], "here")
        told: list[str] = []
        act = Act(order, target, lambda act, **fields: told.append(fields["worker"]))
        act.poll()
        assert act.done and told == [name for name, killed in zip(("1:0.0", "1:0.1"), hit, strict=True) if killed]
        assert [process.wait(60) for process, killed in zip((stranger, other), hit, strict=True) if killed]
        assert stranger.poll() is None or hit[0]


@pytest.mark.parametrize(("reached", "held"), [((), False), (("1:0.1",), True)])
def test_where_only_one_part_comes_to_a_moment_the_worker_has(tmp_path: Path, stranger, reached, held):
    with sleeping(tmp_path, 2) as other:
        pids = {"1:0.0": stranger.pid, "1:0.1": other.pid}
        target = job(tmp_path, 0, ranks={"1:0.0": 1, "1:0.1": 2}, pids=pids)
        for rank, pid in enumerate(pids.values(), 1):
            folder_of(tmp_path, rank, pid).mkdir(parents=True)
        (order,) = read_script(["kill 1:0 --phase saved"], "here")
        act = Act(order, target, lambda act, **fields: None)
        act.poll()
        for rank, (name, pid) in enumerate(pids.items(), 1):
            (armed,) = folder_of(tmp_path, rank, pid).glob("*.json")
            if name in reached:
                write(armed.with_suffix(".reached"), {})
        act.poll()
        assert act.done == held


def test_workers_of_which_one_cannot_be_slowed_are_all_let_go(tmp_path: Path, stranger, monkeypatch):
    with sleeping(tmp_path, 2) as other:
        target = job(tmp_path, 0, ranks={"1:0": 1, "1:1": 2}, pids={"1:0": stranger.pid, "1:1": other.pid})
        (order,) = read_script(["slow 1:0 1:1 50"], "here")
        act = Act(order, target, lambda act, **fields: other.kill() or other.wait())
        with pytest.raises(ChaosError, match="1:1"):
            act.poll()
        act.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("slow ")]


def test_a_slowed_workers_end_leaves_no_other_one_slow(tmp_path: Path, stranger):
    with sleeping(tmp_path, 2) as other:
        target = job(tmp_path, 0, ranks={"1:0": 1, "1:1": 2}, pids={"1:0": stranger.pid, "1:1": other.pid})
        (order,) = read_script(["slow 1:0 1:1 50"], "here")
        act = Act(order, target, lambda act, **fields: None)
        act.poll()
        stranger.kill()
        stranger.wait()
        act.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("slow ")]
        assert Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"


def test_a_worker_that_came_back_is_the_one_that_is_meant(tmp_path: Path, stranger: subprocess.Popen):
    joined = {"t": time.time(), "event": "joined", "worker": "1:0", "pid": stranger.pid, "rank": 1}
    target = job(tmp_path, os.getpid(), {"t": 0.0, "event": "suspected", "worker": "1:0"}, joined)
    assert target.out == set()
    target.signal(["1:0"], signal.SIGKILL)
    assert stranger.wait(60) == -signal.SIGKILL


def test_a_refusal_is_one_line_and_status_2(tmp_path: Path, stranger: subprocess.Popen, capsys):
    job(tmp_path, stranger.pid)
    command = ["chaos", "--run-dir", str(tmp_path)]
    assert cli.main(["chaos", "kill", "5:5", "--run-dir", str(tmp_path)]) == 2
    assert cli.main([*command, "kill", "1:0", "--phase", "backward"]) == 2
    assert cli.main([*command, "coordinator"]) == 2
    assert cli.main(["chaos", "kill", "1:0", "--run-dir", "/proc/self"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4, lines
    assert "no worker 5:5; it has 1:0" in lines[0]
    assert "recycle run --chaos allow" in lines[1]
    assert "no coordinator on this host" in lines[2]
    assert "chaos.jsonl cannot be written" in lines[3]
    assert stranger.poll() is None
    job(tmp_path, stranger.pid, {"t": 0.0, "event": "finished"})
    assert cli.main([*command, "kill", "1:0"]) == 2
    assert "has ended" in capsys.readouterr().err
    assert stranger.poll() is None
