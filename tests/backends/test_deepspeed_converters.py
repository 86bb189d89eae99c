"""DeepSpeed's own converter reads checkpoints that were written with a worker missing, as it reads stock's; what it
writes, jobs with ZeRO-1 begin with as stock's do.

(`zero_to_fp32` reads no pipeline's, stock's neither: it looks for the weights where pipelines have none.)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_recycle.backends.deepspeed import engine
from tests.backends import gpt_job
from tests.harness import Hold, Job
from tests.references import run

pytest.importorskip("huggingface_hub")
pytestmark = [pytest.mark.processes, pytest.mark.night]

ZERO: Mapping[str, Any] = {"pipelines": 2, "stages": 2, "dropout": 0.0, "iterations": 3,
                           "engine_settings": {"zero_optimization": {"stage": 1}, "steps_per_print": 1000}}


def convert(checkpoint: Path) -> Path:
    """What `ds_to_universal` makes of it, beside it."""
    out = checkpoint.with_name("universal")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(checkpoint),
               "--output_folder", str(out), "--num_extract_workers", "1", "--num_merge_workers", "1",
               "--inject_missing_state"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    out.with_name("latest_universal").write_text(out.name)
    return out


def converted(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every parameter whole, and the optimizer's state of it, by file."""
    out = convert(checkpoint)
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


UNIVERSAL: Mapping[str, Any] = {**ZERO, "engine_settings": {**ZERO["engine_settings"],
                                                            "checkpoint": {"load_universal": True}}}


@pytest.mark.parametrize("kind", [
    {"clipping": 0.0}, {"clipping": 0.0, "bf16": True}, {"clipping": 0.5},
    {"clipping": 0.0, "tied": True, "blocks": 6}], ids=str)
def test_a_job_that_begins_with_a_universal_checkpoint_goes_on_as_stock_that_has_written_it(kind, tmp_path):
    """Without failures, with one, and with another number of pipelines; bits are stock's unless gradients are clipped.
    What the job saves is a checkpoint as any other."""
    folder, ours = tmp_path / "checkpoints", tmp_path / "ours"
    stock = run(gpt_job.train, 4, {**ZERO, **kind, "plugin": False, "iterations": 5, "save_every": (str(folder), 2)})
    convert(folder / "global_step2")
    job, losses = {**UNIVERSAL, **kind, "load": (str(folder), {})}, stock[0].value["losses"][2:]
    near = 1e-2 if "bf16" in kind else 1e-3  # of losses, which have 16 bits there
    for rank, result in run(gpt_job.train, 4, job).items():
        assert result.value["counters"]["steps"] == 5 and result.value["losses"] == pytest.approx(losses, rel=near)
        for name, parameter in result.value["parameters"].items():
            expected = stock[rank].value["parameters"][name]
            assert parameter == pytest.approx(expected, rel=1e-4, abs=1e-5), name
            assert kind["clipping"] or parameter.tobytes() == expected.tobytes(), name
    with Job(gpt_job.train, 4, {**job, "save": (str(ours), 3)}, [Hold("1:0", "backward", 3, 1)]) as killed:
        killed.wait_held()
        killed.kill(*killed.holds)
        results = {rank: result for rank, result in killed.wait().items() if result.status == 0}
    assert len(results) == 3, killed.where()
    fewer = run(gpt_job.train, 2, {**job, "pipelines": 1, "microbatches": 8})
    for result in (*results.values(), *fewer.values()):
        assert result.value["losses"] == pytest.approx(losses, rel=near)
    back = run(gpt_job.train, 4, {**ZERO, **kind, "plugin": False, "iterations": 1, "load": (str(ours), {})})
    assert all(result.value["counters"]["steps"] == 6 for result in back.values())


def test_v_shaped_stages_begin_with_a_universal_checkpoint_of_others(tmp_path):
    job = {**ZERO, "clipping": 0.0, "blocks": 6}
    stock = run(gpt_job.train, 4, {**job, "plugin": False, "iterations": 4, "save_every": (str(tmp_path), 2)})
    convert(tmp_path / "global_step2")
    ours = run(gpt_job.train, 4, {**UNIVERSAL, **job, "engine_settings": UNIVERSAL["engine_settings"], "iterations": 2,
                                  "settings": {"chunks": 2}, "load": (str(tmp_path), {})})
    expected, found = ({name: parameter.tobytes() for result in results.values()
                        for name, parameter in result.value["parameters"].items()} for results in (stock, ours))
    assert found == expected


def test_a_universal_checkpoint_that_lacks_a_parameter_is_refused_by_name(tmp_path):
    folder = tmp_path / "checkpoints"
    run(gpt_job.train, 4, {**ZERO, "plugin": False, "iterations": 1, "save_every": (str(folder), 1)})
    missing = next((convert(folder / "global_step1") / "zero").glob("*.weight/fp32.pt"))
    missing.unlink()
    with pytest.raises(AssertionError, match=f"has no parameter {missing.parent.name}"):
        run(gpt_job.train, 4, {**UNIVERSAL, "load": (str(folder), {})})


def in_another_life(observer_of: Any, rank: int, **arguments: Any) -> dict[str, Any]:
    """As `gpt_job.train`, of a job that was started again."""
    engine.started_again = lambda: True
    return gpt_job.train(observer_of, rank, **arguments)


def test_a_job_that_is_started_again_begins_with_what_it_has_saved_since_it_began_with_a_universal_checkpoint(tmp_path):
    run(gpt_job.train, 4, {**ZERO, "plugin": False, "iterations": 2, "save_every": (str(tmp_path), 2)})
    convert(tmp_path / "global_step2")
    job = {**UNIVERSAL, "load": (str(tmp_path), {}), "save": (str(tmp_path), 3), "iterations": 3}
    assert {result.value["counters"]["steps"] for result in run(in_another_life, 4, job).values()} == {5}
    assert (tmp_path / "latest").read_text() == "global_step5"
    again = run(in_another_life, 4, {**job, "iterations": 1, "save": None})
    assert {result.value["counters"]["steps"] for result in again.values()} == {6}
