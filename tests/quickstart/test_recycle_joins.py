"""A real DeepSpeed script that is not changed for it fails on one rank under `recycle run`; another process comes for
it, and the job ends well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.observe.events import read_events

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LIMIT = 150
ITERATIONS = 14

DIES_ONCE = """
import os, runpy, sys, time
from pathlib import Path
import deepspeed

initialize = deepspeed.initialize
def failing(*args, **keywords):
    engine, *rest = initialize(*args, **keywords)
    train_batch = engine.train_batch
    def train(*args):
        if os.environ["RANK"] == "0" and engine.global_steps == 3 and "RECYCLE_JOIN" not in os.environ:
            raise RuntimeError("a bug of rank 0's first life")
        if os.environ["RANK"] == "1" and engine.global_steps == 6:
            events = Path(os.environ["RECYCLE_RUN_DIR"]) / "events.jsonl"
            while '"event": "waiting"' not in events.read_text():
                time.sleep(0.05)
        return train_batch(*args)
    engine.train_batch = train
    return engine, *rest
deepspeed.initialize = failing
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
TRAINING = ["--iterations", str(ITERATIONS), "--log-every", "2", "--length", "16", "--width", "16", "--blocks", "2",
            "--batch", "2"]
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(LIMIT + 30)]


def start(folder: Path, *options: str, **environ: str) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(DIES_ONCE.format(script=str(SCRIPTS / "gpt_deepspeed.py")))
    command = [sys.executable, "-m", "megatron_recycle.cli", "run", *options, str(script), *TRAINING]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RECYCLE_REDUCTION": "exact",
               "RECYCLE_VERIFY": "peers", **environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environ)


def check(events: list[dict[str, Any]]) -> None:
    joined, = [event for event in events if event["event"] == "joined"]
    assert joined["rank"] == 0 and joined["bytes"] > 0
    (suspected,) = [event for event in events if event["event"] == "suspected"]
    assert (suspected["worker"], suspected["kind"]) == ("0:0", "exit")
    assert [event["iteration"] for event in events if event["event"] == "committed"] == list(range(ITERATIONS))
    assert [event["out"] for event in events if event["event"] == "decided"] == [{joined["worker"]: "exit"}, {}]
    assert events[-1]["event"] == "finished" and events[-1]["status"] == 0


@pytest.mark.night
def test_rank_0_fails_another_logs_on_and_the_launcher_starts_it_again_and_it_joins(tmp_path: Path):
    run = start(tmp_path, "--nproc", "4", "--run-dir", str(tmp_path / "run"), RECYCLE_MAX_RESTARTS="1")
    output, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, output + errors
    check(read_events(tmp_path / "run/events.jsonl"))
    assert "rank 0 is started again in 1 s (restart 1 of 1)" in errors
    assert "1 workers lost, after 1 of them training went on, 1 joined" in output
    logs = {rank: (tmp_path / f"run/worker-{rank}.log").read_text() for rank in range(4)}
    assert "a bug of rank 0's first life" in logs[0]
    # An interpreter that ends under a thread of the communication library says so and aborts.
    assert not [rank for rank, log in logs.items() if "terminate called" in log]
    steps = {rank: list(map(int, re.findall(r"^steps: (\d+)", log, re.MULTILINE))) for rank, log in logs.items()}
    assert steps[0][0] == 2 and steps[1][:2] == [4, 6] and not steps[2] + steps[3], "the next one logs on"
    assert sorted(steps[0] + steps[1]) == list(range(2, ITERATIONS + 1, 2)), "each line once"


@pytest.mark.night
def test_another_host_joins_by_the_run_folder_and_a_stranger_does_not(tmp_path: Path):
    run = start(tmp_path, "--nproc", "4", "--run-dir", str(tmp_path / "run"))
    try:
        assert run.stderr is not None
        address = next(found[1] for found in (re.search(r"control at (\S+),", line) for line in run.stderr) if found)
        other = tmp_path / "other"
        other.mkdir()
        deadline = time.monotonic() + LIMIT / 2
        while not any(event["event"] == "resumed" for event in read_events(tmp_path / "run/events.jsonl")):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.1)
        stranger = start(other, "--join", address, "--run-dir", str(other / "run"), RECYCLE_TOKEN="0123456789abcdef")
        host = start(other, "--join", str(tmp_path / "run"), "--nproc", "2", "--run-dir", str(other / "run"))
        output, errors = host.communicate(timeout=LIMIT)
        assert host.returncode == 0, output + errors + (other / "run/worker-0.log").read_text()
        assert "rank 0 of 4 join" in errors
        output, errors = run.communicate(timeout=LIMIT)
        assert run.returncode == 0, output + errors
        assert "does not answer" in stranger.communicate(timeout=LIMIT)[1] and stranger.returncode == 2
    finally:
        run.kill()
    check(read_events(tmp_path / "run/events.jsonl"))
