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


@pytest.mark.parametrize("bf16", [False, True])
def test_a_universal_checkpoint_is_gone_on_from_as_by_stock_through_a_kill(bf16, tmp_path):
    """In a job with another number of pipelines, which have as many samples in all."""
    saved = {**ZERO, "bf16": bf16, "plugin": False, "save_every": (str(tmp_path), 3)}
    run(gpt_job.train, 4, saved)
    converted(tmp_path / "global_step3")
    settings = {**ZERO["engine_settings"], "checkpoint": {"load_universal": True}}
    again = {**ZERO, "bf16": bf16, "pipelines": 4, "microbatches": 2, "engine_settings": settings,
             "load": (str(tmp_path), {})}
    stock = run(gpt_job.train, 8, {**again, "plugin": False})
    with Job(gpt_job.train, 8, again, [Hold("1:0", "backward", 1, 1)]) as job:
        job.wait_held()
        job.kill(*job.holds)
        results = job.wait()
    assert sum(result.status == 0 for result in results.values()) == 7, job.where()
    for rank, result in results.items():
        if result.status == 0:
            assert result.value["losses"] == pytest.approx(stock[rank].value["losses"], rel=1e-3 if bf16 else 1e-5)
            for name, tensor in stock[rank].value["parameters"].items():
                torch.testing.assert_close(torch.as_tensor(result.value["parameters"][name]), torch.as_tensor(tensor),
                                           rtol=1e-2 if bf16 else 1e-4, atol=2e-2 if bf16 else 1e-4)


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
