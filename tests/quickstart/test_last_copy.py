"""A real DeepSpeed script loses both workers of a stage, or both that hold a shard of its optimizer (ZeRO-1), and
trains on in the same job: from its newest checkpoint, or with the copy that another stage's worker keeps (`guard:
memory`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.observe.events import read_events
from tests.nccl_rules.rules import Rules

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpt_deepspeed.py"
LIMIT = 150
DIES = """
import json, os, runpy, signal, sys
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
        step, takes_along = json.loads(os.environ["DEATHS"]).get(os.environ["RANK"], (None, []))
        if engine.global_steps == step and "RECYCLE_JOIN" not in os.environ:
            started = json.loads(open("run/events.jsonl").readline())
            for pid in [*(started["pids"][name] for name in takes_along), os.getpid()]:
                os.kill(pid, signal.SIGKILL)
        return train_batch(*args)
    engine.train_batch = train
    return engine, *rest
deepspeed.initialize = failing
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
TRAINING = ["--iterations", "14", "--log-every", "2", "--length", "16", "--width", "16", "--blocks", "2", "--batch",
            "2"]
pytestmark = [pytest.mark.night, pytest.mark.processes, pytest.mark.timeout(LIMIT + 30)]


def run(tmp_path: Path, deaths: Mapping[int, tuple[int, Sequence[str]]], *arguments: str,
        **settings: str) -> tuple[str, list[dict[str, Any]]]:
    """What the job has printed, and its events."""
    (tmp_path / "train.py").write_text(DIES.format(script=str(SCRIPT)))
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RECYCLE_REDUCTION": "exact",
               "RECYCLE_VERIFY": "peers", "DEATHS": json.dumps(deaths), **settings}
    over = [str(ROOT / "tests" / "nccl_rules" / "script.py"), "deepspeed"] if Rules.of_all() is not None else []
    command = [sys.executable, "-m", "megatron_recycle.cli", "run", "--run-dir", "run", *arguments[:2], *over,
               "train.py", *TRAINING, *arguments[2:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=LIMIT)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told, read_events(tmp_path / "run" / "events.jsonl")


def check_losses(events: Sequence[Mapping[str, Any]], back: int) -> None:
    """Iterations after ``back`` were made again, with the same losses."""
    losses: dict[int, list[str]] = {}
    for event in events:
        if event["event"] == "committed":
            losses.setdefault(event["iteration"], []).append(repr(event["loss"]))
    assert sorted(losses) == [*range(14)] and len(losses[back + 1]) == 2
    assert all(len(set(of)) == 1 for of in losses.values()), losses


@pytest.mark.parametrize("guard", ["checkpoint", "memory"])
def test_both_workers_of_a_stage_are_killed_and_all_go_back(tmp_path: Path, guard):
    """The iterations since then are made again, with the same losses, bit for bit. The script begins with its newest
    checkpoint, if there is one: so does the process that comes for the stage, and saves with the others later. It gives
    an iterator of its own, what that has given since the checkpoint is read again."""
    settings = {"ITERATES": "1"} if guard == "checkpoint" else {}
    saving = ["--checkpoints", "checkpoints", "--save-every", "4"] if guard == "checkpoint" else []
    told, events = run(tmp_path, {2: (3, []), 3: (10, [])}, "--nproc", "4", *saving, RECYCLE_GUARD=guard,
                       RECYCLE_GUARD_INTERVAL="5", **settings)
    kept = "; 0:0 keeps a copy" if guard == "memory" else ""
    assert re.search(rf"warning: stage 1 has one worker left \(1:1 on [^;)]+{kept}\)", told), told
    (restored,) = [event for event in events if event["event"] == "restored"]
    back = 7 if guard == "checkpoint" else restored["iteration"]
    assert (restored["stages"], restored["iteration"]) == ([1], back) and restored["lost"] in (1, 2, 3, 4, 5)
    check_losses(events, back)
    saved = [event["iteration"] for event in events if event["event"] == "checkpoint"]
    assert saved == ([3, 7, 11] if guard == "checkpoint" else [])


@pytest.mark.parametrize(("shape", "deaths", "lost"), [
    (("--nproc", "3", "--stages", "1"), {1: (10, ["2:0"])}, "stage 0 has lost shard 1 of its optimizer state"),
    (("--nproc", "4"), {2: (3, []), 3: (10, [])}, None)])
def test_both_that_hold_a_shard_are_killed_and_all_go_back(tmp_path: Path, shape, deaths, lost):
    """Under ZeRO-1: twins die at once, and the one that is left loads all shards; or a whole stage dies, one worker
    after the other, and the process that comes for it loads its shards."""
    zero = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
            "steps_per_print": 2, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}}
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    told, events = run(tmp_path, deaths, *shape, "--deepspeed_config", "zero.json", "--checkpoints", "checkpoints",
                       "--save-every", "4")
    (restored,) = [event for event in events if event["event"] == "restored"]
    assert (restored["iteration"], restored.get("shards", "").partition(" (")[0]) == (7, lost or ""), told
    check_losses(events, 7)
    assert [event["iteration"] for event in events if event["event"] == "checkpoint"] == [3, 7, 11]
