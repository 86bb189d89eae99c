"""ZeRO-1: the optimizer's state is cut into shards, each on two workers. More deaths: tests/memory/test_shards.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import gpt_job
from tests.harness import Hold, Job
from tests.references import run

pytestmark = pytest.mark.processes

ZERO: Mapping[str, Any] = {"pipelines": 2, "stages": 2, "dropout": 0.0, "optimizer": "SGD", "clipping": 0.5,
                           "engine_settings": {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
                                               "steps_per_print": 1000}}


def test_a_job_of_stocks_moves_to_the_plugin_loses_a_worker_and_writes_what_stock_would(tmp_path):
    """It begins with a checkpoint of stock's; the dead worker's twin has its shard, and writes its file."""
    stock = tmp_path / "stock"
    reference = run(gpt_job.train, 4, {**ZERO, "plugin": False, "iterations": 4, "save_every": (str(stock), 2)})
    (stock / "latest").write_text("global_step2")
    ours = {**ZERO, "iterations": 2, "load": (str(stock), {}), "save": (str(tmp_path / "ours"), 2)}
    with Job(gpt_job.train, 4, ours, [Hold("1:0", "backward", 3, 1)]) as job:
        job.wait_held()
        job.kill(*job.holds)
        results = {rank: result for rank, result in job.wait().items() if result.status == 0}
    assert len(results) == 3, job.where()
    for rank, result in results.items():
        assert result.value["losses"] == pytest.approx(reference[rank].value["losses"][2:], rel=1e-5)
        for name, parameter in result.value["parameters"].items():
            assert parameter == pytest.approx(reference[rank].value["parameters"][name], rel=1e-4, abs=1e-6), name
    theirs, written = ({file.name: file for file in (folder / "global_step4").glob("*.pt")}
                       for folder in (stock, tmp_path / "ours"))
    assert written.keys() == theirs.keys() and sum("zero_pp_rank" in name for name in written) == 4
    for name in filter(lambda name: "zero_pp_rank" in name, written):
        _compare(name, _read(written[name]), _read(theirs[name]))


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=False)["optimizer_state_dict"]


def _compare(at: str, one: Any, other: Any) -> None:
    """Everything has the type, the shape and, to rounding, the value of what is there in stock's file."""
    assert isinstance(one, type(other)), (at, type(one), type(other))
    if isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, 1e-4, 1e-6), at
    elif isinstance(other, Mapping):
        assert list(one) == list(other), (at, list(one), list(other))
        for key, value in other.items():
            _compare(f"{at} {key}", one[key], value)
    elif isinstance(other, (list, tuple)):
        assert len(one) == len(other), at
        for number, value in enumerate(other):
            _compare(f"{at} {number}", one[number], value)
    elif not hasattr(other, "__dict__"):
        assert one == other, (at, one, other)
