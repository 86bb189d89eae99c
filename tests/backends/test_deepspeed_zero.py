"""ZeRO-1: the optimizer's state is cut into shards, each on two workers. More deaths:
tests/in_memory_job/test_shards.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import gpt_job, tensor_job
from tests.harness import Hold, Job
from tests.references import run

pytestmark = pytest.mark.processes

ZERO: Mapping[str, Any] = {"pipelines": 2, "stages": 2, "dropout": 0.0, "optimizer": "SGD", "clipping": 0.5,
                           "engine_settings": {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
                                               "steps_per_print": 1000}}


BF16: Mapping[str, Any] = {"bf16": True, "optimizer": "Adam"}
ACCUMULATED: Mapping[str, Any] = {**BF16, "engine_settings": {**ZERO["engine_settings"],
                                                              "data_types": {"grad_accum_dtype": "fp32"}}}
FP16: Mapping[str, Any] = {"optimizer": "Adam", "engine_settings": {
    **ZERO["engine_settings"], "fp16": {"enabled": True, "initial_scale_power": 8}}}


@pytest.mark.parametrize(("kind", "near"), [({}, 1e-4), *(pytest.param(*case, marks=pytest.mark.night) for case in [
    (BF16, 0.1), (ACCUMULATED, 0.1), (FP16, 0.1)])])
def test_a_job_of_stocks_moves_to_the_plugin_loses_a_worker_and_writes_what_stock_would(kind, near, tmp_path):
    """It begins with a checkpoint of stock's; the dead worker's twin has its shard, and writes its file. Then stock
    goes on with that one. One pipeline alone goes on with stock's too: its shards are cut anew."""
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    reference = run(gpt_job.train, 4, {**ZERO, **kind, "plugin": False, "iterations": 4,
                                       "save_every": (str(stock), 2)})
    (stock / "latest").write_text("global_step2")
    again = {**ZERO, **kind, "iterations": 2, "load": (str(stock), {}), "save": (str(ours), 2)}
    with Job(gpt_job.train, 4, again, [Hold("1:0", "backward", 3, 1)]) as job:
        job.wait_held()
        job.kill(*job.holds)
        results = {rank: result for rank, result in job.wait().items() if result.status == 0}
    assert len(results) == 3, job.where()
    for rank, result in results.items():
        assert result.value["losses"] == pytest.approx(reference[rank].value["losses"][2:], rel=max(near / 10, 1e-5))
        for name, parameter in result.value["parameters"].items():
            assert parameter == pytest.approx(reference[rank].value["parameters"][name], rel=near, abs=near / 10), name
    fewer = run(gpt_job.train, 2, {**ZERO, **kind, "pipelines": 1, "microbatches": 8, "iterations": 2,
                                   "load": (str(stock), {})})
    expected = {name: parameter for result in reference.values()
                for name, parameter in result.value["parameters"].items()}
    for result in fewer.values():
        assert result.value["losses"] == pytest.approx(reference[0].value["losses"][2:], rel=max(near / 10, 1e-5))
        for name, parameter in result.value["parameters"].items():
            assert parameter == pytest.approx(expected[name], rel=near, abs=near / 10), name
    theirs, written = ({file.name: file for file in (folder / "global_step4").glob("*.pt")}
                       for folder in (stock, ours))
    assert written.keys() == theirs.keys() and sum("zero_pp_rank" in name for name in written) == 4
    for name in filter(lambda name: "zero_pp_rank" in name, written):
        _compare(name, _read(written[name]), _read(theirs[name]), near)
    back = run(gpt_job.train, 4, {**ZERO, **kind, "plugin": False, "iterations": 1, "load": (str(ours), {})})
    assert all(result.value["counters"]["steps"] == 5 for result in back.values())


@pytest.mark.parametrize("kind", [{**ACCUMULATED, "tied": True}, *(
    pytest.param(case, marks=pytest.mark.night) for case in [
        {}, BF16, FP16, {**BF16, "clipping": 0.2}, {**FP16, "overflows": ((1, 1),)}, {"stages": 3, "clipping": 0.2}])])
def test_without_failures_parameters_have_stocks_bits(kind):
    job = {**ZERO, "clipping": 0.0, **kind, "iterations": 3}
    size = job["pipelines"] * job.get("stages", 2)
    stock, ours = run(gpt_job.train, size, {**job, "plugin": False}), run(gpt_job.train, size, job)
    for rank, result in ours.items():
        assert result.value["counters"]["skipped"] == stock[rank].value["counters"]["skipped"]
        for name, parameter in result.value["parameters"].items():
            assert parameter.tobytes() == stock[rank].value["parameters"][name].tobytes(), name


@pytest.mark.night
@pytest.mark.parametrize("stages", [1, 2])
def test_tensor_parallelism(stages, tmp_path):
    """Each part of a worker has shards of its own."""
    arguments = {"pipelines": 2, "parts": 2, "stages": stages, "zero": 1, "settings": {"reduction": "exact"}}
    with Job(tensor_job.train, 4 * stages, {**arguments, "plugin": False, "save": str(tmp_path / "stock")},
             coordinated=False) as job:
        stock = job.wait()
    undisturbed = run(tensor_job.train, 4 * stages, {**arguments, "save": str(tmp_path / "ours")})
    for rank, result in undisturbed.items():
        for name, parameter in result.value["parameters"].items():
            assert parameter == pytest.approx(stock[rank].value["parameters"][name], rel=1e-4, abs=1e-5), name
    theirs, written = (sorted(file.name for file in (tmp_path / folder / "global_step4").iterdir())
                       for folder in ("stock", "ours"))
    assert written == theirs
    with Job(tensor_job.train, 4 * stages, arguments, [Hold("1:0.1", "forward", 1, 1)]) as job:
        job.wait_held()
        job.kill(*job.holds)
        results = job.wait()
        ranks = job.wait_event("started")["ranks"]
        ended = {name: results[rank].status for name, rank in ranks.items()}
        assert {name for name, status in ended.items() if status} == {"1:0.1"}, job.where()
    for rank in (rank for name, rank in ranks.items() if not name.startswith("1:0.")):
        for name, parameter in results[rank].value["parameters"].items():
            assert parameter.tobytes() == undisturbed[rank].value["parameters"][name].tobytes(), name


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=False)["optimizer_state_dict"]


def _compare(at: str, one: Any, other: Any, near: float) -> None:
    """Everything has the type, the shape and, to rounding, the value of what is there in stock's file."""
    assert isinstance(one, type(other)), (at, type(one), type(other))
    if isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, near, near / 10), at
    elif isinstance(other, Mapping):
        assert list(one) == list(other), (at, list(one), list(other))
        for key, value in other.items():
            _compare(f"{at} {key}", one[key], value, near)
    elif isinstance(other, (list, tuple)):
        assert len(one) == len(other), at
        for number, value in enumerate(other):
            _compare(f"{at} {number}", one[number], value, near)
    elif not hasattr(other, "__dict__"):
        assert one == other, (at, one, other)
