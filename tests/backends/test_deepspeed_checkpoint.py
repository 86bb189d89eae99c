"""A run that goes on from a checkpoint has the bits of the run that was not stopped."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from tests.backends import gpt_job
from tests.backends.comparing import differences
from tests.references import run

SAVED, ITERATIONS = 3, 5
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6,
                                                                       "loss_scale_window": 2}}}


def arguments(precision: str, **options: Any) -> dict[str, Any]:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}}
    return {"pipelines": 2, "stages": 2, "engine_settings": {**PRECISIONS[precision], "scheduler": warmup}, **options}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("precision", [
    *[pytest.param(precision, marks=pytest.mark.night) for precision in ("fp32", "bf16")], "fp16"])
def test_a_run_goes_on_from_a_checkpoint(precision, tmp_path):
    folder = str(tmp_path)
    unbroken = run(gpt_job.train, 4, arguments(precision, iterations=ITERATIONS, save=(folder, SAVED)))
    gone_on = run(gpt_job.train, 4, arguments(precision, iterations=ITERATIONS - SAVED, load=(folder, {})))
    for rank, result in gone_on.items():
        reference = unbroken[rank]
        reference.value["losses"] = reference.value["losses"][SAVED:]
        assert differences(result, reference) == {}
        assert result.value["counters"] == reference.value["counters"]
        assert (result.value["counters"]["norm"] is None) == (precision == "fp32")


@pytest.mark.processes
@pytest.mark.night
@pytest.mark.parametrize(("keywords", "steps", "later"), [
    ({"load_module_only": True}, 0, False), ({"load_optimizer_states": False}, SAVED, True),
    ({"load_lr_scheduler_states": False}, SAVED, False),
], ids=["module only", "no optimizer states", "no schedule"])
def test_what_is_not_asked_for_is_not_loaded(keywords, steps, later, tmp_path):
    folder = str(tmp_path)
    saved = run(gpt_job.train, 4, arguments("bf16", iterations=SAVED, save=(folder, SAVED)))
    result = run(gpt_job.train, 4, arguments("bf16", iterations=1, load=(folder, keywords)))
    fresh = run(gpt_job.train, 4, arguments("bf16", iterations=1))
    for rank, found in result.items():
        assert found.value["counters"]["steps"] == steps + 1
        rate = found.value["counters"]["rate"]
        assert (rate > fresh[rank].value["counters"]["rate"]) == later
        # One step further than the loaded weights, not than the initial ones: the masters went with them.
        loaded, now = saved[rank].value["state"][-1], found.value["state"][-1]
        assert max(numpy.abs(now[name] - loaded[name]).max() for name in loaded) < 2.5 * max(rate, 0.0033)
        moments = found.value["state"][0]["step"]
        assert moments == (SAVED + 1 if keywords == {"load_lr_scheduler_states": False} else 1)
