"""A real DeepSpeed script loses the last copy of a stage, and the job goes on all the same: on the host that is left,
from its last checkpoint, with the same batch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_recycle.control.ports import listen
from megatron_recycle.observe.events import read_events

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "gpt_deepspeed.py")
LIMIT = 180
TRAINING = ["--iterations", "12", "--log-every", "2", "--length", "16", "--width", "16", "--blocks", "2", "--batch",
            "2", "--dropout", "0", "--checkpoints", "checkpoints", "--save-every", "3"]
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(LIMIT + 30)]


def _losses(events: Path) -> dict[int, float]:
    return {event["iteration"]: event["loss"] for event in read_events(events) if event["event"] == "committed"}


def test_the_host_with_the_last_copies_of_a_stage_is_lost_and_the_other_goes_on_from_the_checkpoint(tmp_path: Path):
    """2 x 2 workers: both copies of stage 1 are on the second host. The first one trains the same iterations again, as
    one pipeline with twice the micro-batches: the losses agree to rounding."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RECYCLE_TOKEN": "a token of two hosts"}
    hosts = []
    for node in range(2):
        command = [sys.executable, "-m", "megatron_recycle.cli", "run", "--nproc", "2", "--nnodes", "2", "--node-rank",
                   str(node), "--master-addr", "127.0.0.1", "--master-port", str(port), "--run-dir", "run",
                   "--restarts", "1", SCRIPT, *TRAINING]
        with (tmp_path / f"host-{node}.out").open("w") as file:
            hosts.append(subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path, env=environ))
    events = tmp_path / "run" / "events.jsonl"
    limit = time.monotonic() + LIMIT
    try:
        while not events.exists() or max(_losses(events), default=0) < 5:
            assert time.monotonic() < limit and hosts[0].poll() is None, (tmp_path / "host-0.out").read_text()
            time.sleep(0.02)
        hosts[1].kill()
        status = hosts[0].wait(max(0.0, limit - time.monotonic()))
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    told = (tmp_path / "host-0.out").read_text()
    assert status == 0, told
    assert "restart 1 of 1: the script starts again with 2 workers (1 pipeline, 8 micro-batches of each)" in told
    (before,) = (tmp_path / "run").glob("before-*")
    assert "most recent call first" in next((before / "post-mortem").glob("stack-0-*.txt")).read_text()
    first, second = _losses(before / "events.jsonl"), _losses(events)
    again = sorted(set(first) & set(second))
    assert again and min(second) in (3, 6, 9) and max(second) == 11
    assert [second[one] for one in again] == pytest.approx([first[one] for one in again], rel=1e-5)
