"""The layers of a DeepSpeed model whose stages get two chunks: where they go, and what checkpoints say of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends import gpt_job
from tests.harness import Result
from tests.references import run

PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def arguments(precision: str, chunks: int, **options: Any) -> dict[str, Any]:
    engine = {**PRECISIONS[precision], "pipeline": {"use_reentrant": False},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}}}
    return {"pipelines": 1, "stages": 2, "dropout": 0.0, "engine_settings": engine,
            "settings": {"reduction": "exact", "chunks": chunks}, **options}


def weights(results: dict[int, Result]) -> dict[str, bytes]:
    return {name: value.tobytes() for result in results.values() for name, value in result.value["parameters"].items()}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.night)])
def test_a_run_goes_on_with_two_chunks_and_back_with_one_and_has_the_bits_of_one_that_was_not_stopped(
        precision, tmp_path):
    flat, bent = str(tmp_path / "flat"), str(tmp_path / "bent")
    unbroken = run(gpt_job.train, 2, arguments(precision, 1, iterations=4, save=(flat, 2)))
    run(gpt_job.train, 2, arguments(precision, 2, iterations=1, load=(flat, {}), save=(bent, 1)))
    back = run(gpt_job.train, 2, arguments(precision, 1, iterations=1, load=(bent, {})))
    assert back[0].value["losses"] == unbroken[0].value["losses"][3:]
    assert weights(back) == weights(unbroken)
