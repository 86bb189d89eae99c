"""Pipelines of one stage: each worker has the whole model, and the others take a dead one's micro-batches over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold, Job
from tests.references import calm_run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

ITERATIONS, KILLED_IN = 6, 1
WHOLE: Mapping[str, Any] = {"stages": 1, "iterations": ITERATIONS, "settings": {"reduction": "exact"}}


@pytest.mark.gloo
@pytest.mark.night
@pytest.mark.parametrize(("pipelines", "options"), [
    (2, ("--bf16",)), (2, ()), (3, ("--per-token-loss", "--untied")), (2, ("--distributed-optimizer",))])
def test_without_failures_one_stage_has_the_bits_of_cores_own_schedule(pipelines, options):
    arguments = {"pipelines": pipelines, "stages": 1, "iterations": 4, "options": ("--dropout", "0", *options)}
    with Job(megatron_job.train, pipelines, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(megatron_job.train, pipelines, arguments) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0, (stock[rank].error, ours[rank].error)
        assert ours[rank].value["norms"] == stock[rank].value["norms"]
        if "--distributed-optimizer" in options:
            continue  # of its state each worker has what it has; that of parameters shows in the norms of the next step
        found = differences(stock[rank], ours[rank])
        assert found.pop("losses", 0.0) < 1e-5  # of the sums over the global batch, for the log
        assert not found


@pytest.mark.parametrize(("worker", "settings"), [
    ("1:0", {}), *[pytest.param(*case, marks=pytest.mark.night) for case in [
        ("0:0", {"step": "staggered"}), ("2:0", {"verify": "peers"})]]])
def test_a_killed_worker_of_one_stage_is_taken_over_and_comes_back(worker, settings):
    """Tied embeddings (here one tensor), Adam, clipping and dropout are the script's defaults."""
    arguments = {**WHOLE, "pipelines": 3, "settings": {**WHOLE["settings"], **settings}}
    calm = calm_run(megatron_job.train, 3, arguments)
    rank = int(worker[0])
    other = "0:0" if rank else "1:0"
    dies, late = Hold(worker, "backward", KILLED_IN, 1), Hold(other, "forward", KILLED_IN + 2)
    with Job(megatron_job.train, 3, arguments, [dies, late]) as job:
        job.comes_back(dies, late, rank)
        for own, result in job.wait().items():
            assert result.status == 0, job.where()
            assert len(result.value["members"]) == 3
            assert not (found := differences(result, calm[own])), (own, found)
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(ITERATIONS))


@pytest.mark.night
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_all_pipelines_of_one_stage_but_one_may_die(reduction):
    arguments = {**WHOLE, "pipelines": 3, "settings": {"reduction": reduction},
                 "options": ("--optimizer", "sgd", "--lr", "0.1")}
    calm = calm_run(megatron_job.train, 3, arguments)
    holds = [Hold("0:0", "backward", KILLED_IN, 2), Hold("2:0", "forward", KILLED_IN + 1, 1)]
    with Job(megatron_job.train, 3, arguments, holds) as job:
        for hold in holds:
            job.wait_held(hold)
            job.kill(hold)
        check_survivors(job, {hold.worker for hold in holds}, calm, 1e-5 if reduction == "fast" else 0.0)
