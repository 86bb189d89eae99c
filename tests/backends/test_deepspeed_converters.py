"""DeepSpeed's own converter reads checkpoints that were written with a worker missing, as it reads stock's.

(`zero_to_fp32` reads no pipeline's, stock's neither: it looks for the weights where pipelines have none.)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import gpt_job
from tests.harness import Hold, Job
from tests.references import run

pytest.importorskip("huggingface_hub")
pytestmark = [pytest.mark.processes, pytest.mark.night]

ZERO: Mapping[str, Any] = {"pipelines": 2, "stages": 2, "dropout": 0.0, "iterations": 3,
                           "engine_settings": {"zero_optimization": {"stage": 1}, "steps_per_print": 1000}}


def converted(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What `ds_to_universal` makes of it: every parameter whole, and the optimizer's state of it, by file."""
    out = checkpoint.with_name("universal")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(checkpoint),
               "--output_folder", str(out), "--num_extract_workers", "1", "--num_merge_workers", "1",
               "--inject_missing_state"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {str(file.relative_to(out)): torch.load(file, weights_only=False) for file in (out / "zero").rglob("*.pt")}
    return {name: value.get("param", value) if isinstance(value, dict) else value
            for name, value in found.items()}


def test_a_checkpoint_of_zero_without_a_worker_becomes_a_universal_one(tmp_path):
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    run(gpt_job.train, 4, {**ZERO, "plugin": False, "save_every": (str(stock), 3)})
    with Job(gpt_job.train, 4, {**ZERO, "save": (str(ours), 3)}, [Hold("1:0", "backward", 1, 1)]) as job:
        job.wait_held()
        job.kill(*job.holds)
        assert sum(result.status == 0 for result in job.wait().values()) == 3, job.where()
    expected, found = converted(stock / "global_step3"), converted(ours / "global_step3")
    assert found.keys() == expected.keys() and any("exp_avg" in name for name in found)
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
