"""Optimizers whose state has 8 bits, bitsandbytes' (`pip install bitsandbytes`, where these are to run)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_recycle.backends.deepspeed.support import _of_8_bits
from tests.backends import gpt_job
from tests.harness import Hold, Job
from tests.references import run

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.processes, pytest.mark.night]

JOB: Mapping[str, Any] = {"pipelines": 2, "stages": 2, "dropout": 0.0, "optimizer": "Adam8bit", "clipping": 0.0,
                          "iterations": 4, "settings": {"reduction": "exact"}}
SHARDED: Mapping[str, Any] = {**JOB, "engine_settings": {"zero_optimization": {"stage": 1},
                                                         "zero_allow_untested_optimizer": True}}


def same(found: Mapping[int, Any], expected: Mapping[int, Any]) -> None:
    """Parameters have the same bits."""
    for rank, result in found.items():
        for name, parameter in result.value["parameters"].items():
            assert parameter.tobytes() == expected[rank].value["parameters"][name].tobytes(), (rank, name)


@pytest.mark.parametrize("job", [
    JOB, SHARDED, {**SHARDED, "bf16": True, "pipelines": 3, "settings": {**JOB["settings"], "state_copies": 2}}],
    ids=("whole", "shards", "shards that move, bf16"))
def test_training_and_checkpoints_are_stocks_through_a_failure(job: dict[str, Any], tmp_path: Path) -> None:
    """With bits of an undisturbed job's, whose bits are stock's; a checkpoint of stock's is what the job begins with,
    and stock goes on with what it has saved. With three pipelines shards go to other workers when one is lost."""
    size = 2 * job["pipelines"]
    stocks, ours = tmp_path / "stock", tmp_path / "ours"
    stock = run(gpt_job.train, size, {**job, "plugin": False, "save_every": (str(stocks), 2)})
    (stocks / "latest").write_text("global_step2")
    again = {**job, "iterations": 2, "load": (str(stocks), {}), "save": (str(ours), 2)}
    calm = run(gpt_job.train, size, again)
    if size == 4:  # sums of three in 16 bits are not in stock's order
        same(calm, stock)
    with Job(gpt_job.train, size, again, [Hold("1:0", "backward", 3, 1)]) as killed:
        killed.wait_held()
        killed.kill(*killed.holds)
        results = {rank: result for rank, result in killed.wait().items() if result.status == 0}
    assert len(results) == size - 1, killed.where()
    same(results, calm)
    back = run(gpt_job.train, size, {**job, "plugin": False, "iterations": 1, "load": (str(ours), {})})
    assert all(result.value["counters"]["steps"] == 5 for result in back.values())


def test_without_zero_bf16_is_refused() -> None:
    with pytest.raises(AssertionError, match="Adam8bit with bf16 and without ZeRO"):
        run(gpt_job.train, 4, {**JOB, "bf16": True})


def test_what_has_8_bits_is_known_by_another_name_too() -> None:
    import bitsandbytes.optim

    weights = [torch.nn.Parameter(torch.ones(4))]
    assert _of_8_bits(bitsandbytes.optim.Adam8bit(weights))
    assert _of_8_bits(bitsandbytes.optim.Adam(weights, optim_bits=8))
    assert not _of_8_bits(bitsandbytes.optim.Adam(weights)) and not _of_8_bits(torch.optim.Adam(weights))


def test_shards_of_another_number_of_pipelines_are_refused(tmp_path: Path) -> None:
    run(gpt_job.train, 4, {**SHARDED, "plugin": False, "iterations": 1, "save_every": (str(tmp_path), 1)})
    with pytest.raises(AssertionError, match="go on with 2 pipelines"):
        run(gpt_job.train, 2, {**SHARDED, "pipelines": 1, "microbatches": 8, "load": (str(tmp_path), {})})
