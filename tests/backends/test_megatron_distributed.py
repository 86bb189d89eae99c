"""Megatron's distributed optimizer: its state is cut into shards, each on two workers. More deaths:
tests/memory/test_shards.py; checkpoints: tests/backends/test_megatron_lm.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import pytest

from tests.backends import megatron_job
from tests.harness import Hold, Job, Result
from tests.references import calm_run, run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes

BUCKETS: Mapping[str, Any] = {"overlap_grad_reduce": True, "bucket_size": 2000}
"""Several on the first stage."""
EXACT = {"reduction": "exact", "verify": "peers", "verify_every": 1}


def shards_of(results: Mapping[int, Result]) -> dict[tuple[int, int, int], list[dict[str, numpy.ndarray]]]:
    """By rank, stage and number."""
    return {(rank, result.value["stage"], shard): values for rank, result in results.items() if result.status == 0
            for shard, values in result.value["shards"].items()}


def check(results: Mapping[int, Result], reference: Mapping[int, Result]) -> None:
    """What workers hold after training has the reference's bits, and each shard is held by somebody."""
    expected = {key[1:]: values for key, values in shards_of(reference).items()}
    found = shards_of(results)
    assert {key[1:] for key in found} == expected.keys()
    for key, values in found.items():
        for one, other in zip(values, expected[key[1:]], strict=True):
            assert one.keys() == other.keys() and not [name for name in one if not numpy.array_equal(
                one[name], other[name])], key
    for rank, result in results.items():
        for name, value in (result.value["parameters"] if result.status == 0 else {}).items():
            assert numpy.array_equal(value, reference[rank].value["parameters"][name]), (rank, name)


@pytest.mark.parametrize("options", [(), pytest.param(("--bf16", "--untied"), marks=pytest.mark.night)], ids=" ".join)
def test_a_killed_workers_shards_live_on_and_all_has_the_bits_of_stocks_own(options):
    """Two addends have one sum, and nothing is clipped, whose norm stock adds up in another order."""
    job_of: dict[str, Any] = {"pipelines": 2, "data_parallel": BUCKETS, "options": (
        "--distributed-optimizer", "--dropout", "0", "--clip", "0", *options)}
    stock = run(megatron_job.train, 4, {**job_of, "plugin": False})
    hold = Hold("1:0", "backward", 1, 1)
    with Job(megatron_job.train, 4, {**job_of, "settings": EXACT}, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.status == 0 for result in results.values()) == 3, job.where()
    check(results, stock)


@pytest.mark.night
@pytest.mark.parametrize("step", ["barrier", "staggered"])
def test_workers_killed_one_after_the_other_leave_the_bits_of_the_job_without_failures(step):
    """Of one stage, and each time what they have held is adopted."""
    arguments = {"pipelines": 3, "options": ("--distributed-optimizer", "--bf16", "--clip", "0.05", "--count-zeros"),
                 "settings": {**EXACT, "step": step}}
    calm = calm_run(megatron_job.train, 6, arguments)
    holds = [Hold("1:0", "backward", 1, 1), Hold("2:0", "stepped", 2)]
    with Job(megatron_job.train, 6, arguments, holds) as job:
        for hold in holds:
            job.wait_held(hold)
            job.kill(hold)
        results = job.wait()
    assert sum(result.status == 0 for result in results.values()) == 4, job.where()
    check(results, calm)


@pytest.mark.night
@pytest.mark.timeout(200)
def test_a_worker_that_comes_back_gets_the_shards_that_are_to_be_its():
    arguments = {"pipelines": 3, "iterations": 8, "options": ("--distributed-optimizer",), "settings": EXACT}
    calm = calm_run(megatron_job.train, 6, arguments)
    worker = "1:1"
    rank = next(rank for rank, result in calm.items()
                if f"{result.value['pipeline']}:{result.value['stage']}" == worker)
    dies, late = Hold(worker, "backward", 1, 1), Hold("0:0", "forward", 3)
    with Job(megatron_job.train, 6, arguments, [dies, late], limit=150) as job:
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(rank)
        job.wait_held(late)
        job.rejoin(rank)
        job.wait_event("waiting", worker=worker)
        job.release(late)
        job.wait_event("joined", worker=worker)
        results = job.wait()
    assert all(result.status == 0 for result in results.values()), job.where()
    check(results, calm)
    assert all(len(result.value["shards"]) == 2 for result in results.values())
