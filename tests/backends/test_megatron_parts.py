"""Megatron jobs with tensor parallelism: a worker is two processes, and goes when either of them does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes

PIPELINES, STAGES, PARTS, ITERATIONS, KILLED_IN = 2, 2, 2, 3, 1
PROCESSES = PIPELINES * STAGES * PARTS
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "tensor": PARTS, "iterations": ITERATIONS,
                            "settings": {"reduction": "exact"}}
"""Tied embeddings, Adam, clipping and dropout are the script's defaults."""


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures."""
    return calm_run(megatron_job.train, PROCESSES, EXACT)


@pytest.mark.parametrize(("position", "phase", "nth"), [
    ("1:0.1", "backward", 1), *[pytest.param(*case, marks=pytest.mark.night) for case in [
        ("0:1.0", "forward", 2), ("0:0.0", "reduce", 0), ("1:1.1", "reduced", 0)]]])
def test_one_process_killed_takes_its_worker_out_and_leaves_the_same_bits(position, phase, nth, undisturbed):
    worker, _, part = position.partition(".")
    spare = f"{worker}.{1 - int(part)}"
    hold = Hold(position, phase, KILLED_IN, nth)
    with Job(megatron_job.train, PROCESSES, EXACT, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
        ranks = job.wait_event("started")["ranks"]
        assert [result.status for rank, result in results.items() if rank != ranks[position]] == [0] * 7, job.where()
    assert job.wait_event("decided")["out"] == {position: "exit", spare: "stranded"}
    survivors = [rank for name, rank in ranks.items() if name not in (position, spare)]
    for rank in survivors:
        assert not differences(results[rank], undisturbed[rank])
        assert results[rank].value["rerouted"] == " live: 3/4 | rerouted: 4 |"
    assert results[ranks[spare]].value is None  # it had no work, and ended when the job did
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(ITERATIONS))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "within"), [
    pytest.param(("--clip", "0"), 0.0, marks=pytest.mark.night),
    *[pytest.param(*case, marks=pytest.mark.night) for case in [
        # Four numbers make the norm, and core leaves the order of their sum to the communication library.
        (("--optimizer", "sgd", "--lr", "0.1"), 1e-6),
        (("--bf16", "--untied", "--recompute", "full", "--clip", "0", "--count-zeros"), 0.0)]]])
def test_without_failures_parameters_have_the_bits_of_cores_own_schedule(options, within):
    arguments = {**EXACT, "options": ("--dropout", "0", *options)}
    with Job(megatron_job.train, PROCESSES, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(megatron_job.train, PROCESSES, {**arguments, "settings": {}}) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0, (stock[rank].error, ours[rank].error)
        found = differences(stock[rank], ours[rank])
        assert found.pop("losses", 0.0) < 1e-5  # of the sums over the global batch, for the log
        assert max(found.values(), default=0.0) <= within
        assert within or not found
        assert within or ours[rank].value["zeros"] == stock[rank].value["zeros"]


@pytest.mark.night
def test_a_process_killed_in_an_evaluation_leaves_the_same_losses():
    arguments = {**EXACT, "options": ("--eval-every", "1", "--eval-iterations", "2")}
    evaluated = calm_run(megatron_job.train, PROCESSES, arguments)
    hold = Hold("1:1.0", "evaluate", 0, 5)
    with Job(megatron_job.train, PROCESSES, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    found = [rank for rank, result in results.items() if result.value is not None]
    assert len(found) == 6
    for rank in found:
        assert not differences(results[rank], evaluated[rank])
        assert results[rank].value["validations"] == evaluated[rank].value["validations"]
