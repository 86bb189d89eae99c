"""A real DeepSpeed script loses both workers of a stage, and trains on in the same job: from its newest checkpoint, or
with the copy that another stage's worker keeps (`guard: memory`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recycle.observe.events import read_events
from tests.ordered.rules import Rules

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpt_deepspeed.py"
LIMIT = 150
DIES = """
import os, runpy, signal, sys
import deepspeed
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader, DistributedSampler

initialize = deepspeed.initialize
def failing(*args, **keywords):
    iterates = "ITERATES" in os.environ
    data = keywords.pop("training_data") if iterates else None
    engine, *rest = initialize(*args, **keywords)
    train_batch = engine.train_batch
    if iterates:
        grid = engine.grid
        sampler = DistributedSampler(data, grid.data_parallel_size, grid.get_data_parallel_rank(), shuffle=True)
        iterator = iter(RepeatingLoader(DataLoader(data, engine.micro_batch_size, sampler=sampler)))
        steps = []
        def train_batch():
            if not steps:  # the script's data go on where its checkpoint has
                steps.append(engine.global_steps)
                for _ in range(engine.global_steps * engine.micro_batches):
                    next(iterator)
            return engine.__class__.train_batch(engine, iterator)
    def train(*args):
        dies = {{"2": 3, "3": 10}}.get(os.environ["RANK"])
        if engine.global_steps == dies and "RECYCLE_JOIN" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_batch(*args)
    engine.train_batch = train
    return engine, *rest
deepspeed.initialize = failing
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
TRAINING = ["--iterations", "14", "--log-every", "2", "--length", "16", "--width", "16", "--blocks", "2", "--batch",
            "2"]
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(LIMIT + 30)]


@pytest.mark.parametrize("guard", ["checkpoint", pytest.param("memory", marks=pytest.mark.night)])
def test_both_workers_of_a_stage_are_killed_and_all_go_back(tmp_path: Path, guard):
    """The iterations since then are made again, with the same losses, bit for bit. The script begins with its newest
    checkpoint, if there is one: so does the process that comes for the stage, and saves with the others later. It gives
    an iterator of its own, what that has given since the checkpoint is read again."""
    (tmp_path / "train.py").write_text(DIES.format(script=str(SCRIPT)))
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RECYCLE_REDUCTION": "exact",
               "RECYCLE_GUARD": guard, "RECYCLE_GUARD_INTERVAL": "5", "RECYCLE_VERIFY": "peers"}
    environ |= {"ITERATES": "1"} if guard == "checkpoint" else {}
    saving = ["--checkpoints", "checkpoints", "--save-every", "4"] if guard == "checkpoint" else []
    over = [str(ROOT / "tests" / "ordered" / "script.py"), "deepspeed"] if Rules.of_all() is not None else []
    command = [sys.executable, "-m", "megatron_recycle.cli", "run", "--nproc", "4", "--run-dir", "run", *over,
               "train.py", *TRAINING, *saving]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=LIMIT)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    events = read_events(tmp_path / "run" / "events.jsonl")
    kept = "; 0:0 keeps a copy" if guard == "memory" else ""
    assert re.search(rf"warning: stage 1 has one worker left \(1:1 on [^;)]+{kept}\)", told), told
    (restored,) = [event for event in events if event["event"] == "restored"]
    back = 7 if guard == "checkpoint" else restored["iteration"]
    assert (restored["stages"], restored["iteration"]) == ([1], back) and restored["lost"] in (1, 2, 3, 4, 5)
    losses: dict[int, list[str]] = {}
    for event in events:
        if event["event"] == "committed":
            losses.setdefault(event["iteration"], []).append(repr(event["loss"]))
    assert sorted(losses) == [*range(14)] and len(losses[back + 1]) == 2
    assert all(len(set(of)) == 1 for of in losses.values()), losses
    saved = [event["iteration"] for event in events if event["event"] == "checkpoint"]
    assert saved == ([3, 7, 11] if guard == "checkpoint" else [])
