"""Megatron-Core itself trains on the stand-in, as it does on its own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.backends import megatron_job
from tests.harness import Job
from tests.te.job import stock
from tests.te.versions import engines

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes

ADAM = ("--optimizer", "adam", "--lr", "0.001")


@engines
@pytest.mark.parametrize(("options", "more", "within"), [
    (("--bf16",), {"fused": True}, 2e-2),
    pytest.param((), {}, 2e-5, marks=pytest.mark.night),
    pytest.param((), {"tensor": 2}, 2e-5, marks=pytest.mark.night),
    pytest.param(("--distributed-optimizer", "--bf16", *ADAM), {}, 2e-2, marks=pytest.mark.night),
    *[pytest.param(options, {}, 2e-5, marks=pytest.mark.night)
      for options in (("--recompute", "full"), ("--interleave", "2"), (*ADAM, "--weight-decay", "0.1"))]], ids=str)
def test_losses_are_those_of_core_s_own_layers(engine: Path, options: tuple[str, ...], more: dict[str, Any],
                                               within: float):
    arguments = {"pipelines": 1, "iterations": 5, "alike": True,
                 "options": ("--dropout", "0", "--optimizer", "sgd", "--lr", "0.1", *options), **more}
    size = 2 * more.get("tensor", 1)
    with Job(megatron_job.train, size, {**arguments, "plugin": False}, coordinated=False) as job:
        local = job.wait()
    found = stock(engine, size, arguments)
    for rank, result in local.items():
        assert result.status == 0, result.error
        ours, theirs = found[rank].value, result.value
        assert numpy.allclose(ours["losses"], theirs["losses"], atol=within, rtol=0)
        assert ours["whole"].keys() == theirs["whole"].keys()
        if "adam" not in options:  # it makes as much of a gradient that is nothing but rounding as of any other
            for name, value in theirs["whole"].items():
                assert numpy.allclose(ours["whole"][name], value, atol=within, rtol=0), name
        if len(theirs["losses"]):
            assert ours["losses"][-1] < ours["losses"][0]
