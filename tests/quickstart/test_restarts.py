"""A real DeepSpeed script loses the last copy of a stage, and the job goes on all the same: on the host that is left,
from its last checkpoint, with the same batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recycle.control.ports import listen
from megatron_recycle.observe.events import read_events

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpt_deepspeed.py"
LIMIT = 180
LOSES_ITS_HOST = """
import os, runpy, signal, sys, time
from pathlib import Path
import deepspeed

initialize = deepspeed.initialize
def failing(*args, **keywords):
    engine, *rest = initialize(*args, **keywords)
    train_batch = engine.train_batch
    def train(*args):
        if os.environ["RANK"] == "2" and engine.global_steps == 7:  # only the first life has this rank
            events = Path(os.environ["RECYCLE_RUN_DIR"]) / "events.jsonl"
            while '"committed", "generation": 1, "iteration": 5' not in events.read_text():
                time.sleep(0.01)
            newest = Path("checkpoints/global_step6/mp_rank_01_model_states.pt")
            newest.write_bytes(newest.read_bytes()[:-100])
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # until that is its own end, too
        return train_batch(*args)
    engine.train_batch = train
    return engine, *rest
deepspeed.initialize = failing
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
TRAINING = ["--iterations", "12", "--log-every", "2", "--length", "16", "--width", "16", "--blocks", "2", "--batch",
            "2", "--dropout", "0", "--checkpoints", "checkpoints", "--save-every", "2"]
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(LIMIT + 30)]


def _losses(events: Path) -> dict[int, float]:
    return {event["iteration"]: event["loss"] for event in read_events(events) if event["event"] == "committed"}


@pytest.mark.night
def test_the_host_with_the_last_copies_of_a_stage_is_lost_and_the_other_goes_on_from_the_checkpoint(tmp_path: Path):
    """2 x 2 workers: both copies of stage 1 are on the second host. The first one trains the same iterations again, as
    one pipeline with twice the micro-batches: the losses agree to rounding. The newest checkpoint was cut off
    meanwhile, so that it is the one before."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RECYCLE_TOKEN": "a token of two hosts",
               "RECYCLE_PLACEMENT": "framework", "RECYCLE_GUARD": "none"}
    (tmp_path / "train.py").write_text(LOSES_ITS_HOST.format(script=str(SCRIPT)))
    hosts = []
    for node in range(2):
        command = [sys.executable, "-m", "megatron_recycle.cli", "run", "--nproc", "2", "--nnodes", "2", "--node-rank",
                   str(node), "--master-addr", "127.0.0.1", "--master-port", str(port), "--run-dir", "run",
                   "--job-restarts", "1", "train.py", *TRAINING]
        with (tmp_path / f"host-{node}.out").open("w") as file:
            hosts.append(subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path, env=environ))
    try:
        status = hosts[0].wait(LIMIT)
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    told = (tmp_path / "host-0.out").read_text()
    assert status == 0, told
    assert "restart 1 of 1: the script starts again with 2 workers (1 pipeline, 8 micro-batches of each)" in told
    assert "goes on from the checkpoint global_step4 in checkpoints, since newer ones (global_step6)" in told
    (before,) = (tmp_path / "run").glob("before-*")
    assert "most recent call first" in next((before / "post-mortem").glob("stack-0-*.txt")).read_text()
    first, second = _losses(before / "events.jsonl"), _losses(tmp_path / "run" / "events.jsonl")
    assert sorted(second) == [*range(4, 12)] and {4, 5} <= first.keys()
    again = sorted(set(first) & set(second))
    assert [second[one] for one in again] == pytest.approx([first[one] for one in again], rel=1e-5)
