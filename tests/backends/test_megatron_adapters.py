"""Adapters (LoRA) beside frozen layers: a small part of each stage is trained, and the first one's embedding is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job
from tests.references import calm_run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.night]

ADAPTED: Mapping[str, Any] = {"pipelines": 2, "stages": 2, "iterations": 6, "adapted": True,
                              "settings": {"reduction": "exact"}}


@pytest.mark.parametrize("options", [(), ("--untied", "--bf16"), ("--bf16", "--distributed-optimizer")])
def test_without_failures_adapters_have_the_bits_of_cores_own_schedule(options):
    arguments = {**ADAPTED, "options": ("--dropout", "0", *options)}
    with Job(megatron_job.train, 4, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(megatron_job.train, 4, arguments) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0, (stock[rank].error, ours[rank].error)
        if "--distributed-optimizer" in options:
            assert ours[rank].value["norms"] == pytest.approx(stock[rank].value["norms"], rel=1e-6)
            continue  # of its state each worker has what it has; that of parameters shows in the norms of the next step
        assert ours[rank].value["norms"] == stock[rank].value["norms"]
        found = differences(stock[rank], ours[rank])
        assert found.pop("losses", 0.0) < 1e-5  # of the sums over the global batch, for the log
        assert not found


@pytest.mark.parametrize(("worker", "rank", "options"), [
    ("0:0", 0, ()), ("1:1", 3, ("--untied", "--bf16")), ("0:1", 2, ("--bf16", "--distributed-optimizer"))])
def test_a_killed_worker_is_taken_over_and_comes_back_to_frozen_layers_and_adapters(worker, rank, options):
    arguments = {**ADAPTED, "options": options}
    calm = calm_run(megatron_job.train, 4, arguments)
    other = "1:1" if worker != "1:1" else "0:0"
    dies, late = Hold(worker, "backward", 1, 1), Hold(other, "forward", 3)
    with Job(megatron_job.train, 4, arguments, [dies, late]) as job:
        job.comes_back(dies, late, rank)
        for own, result in job.wait().items():
            assert result.status == 0, job.where()
            assert len(result.value["members"]) == 4
            found = {name: by for name, by in differences(result, calm[own]).items()
                     if "--distributed-optimizer" not in options or not name.startswith("state")}
            assert not found, (own, found)
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(6))
