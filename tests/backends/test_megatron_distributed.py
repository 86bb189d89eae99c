"""Megatron's distributed optimizer: its state is cut into shards, each on two workers. More deaths:
tests/in_memory_job/test_shards.py; checkpoints: tests/backends/test_megatron_lm.py."""

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


def shards_of(results: Mapping[int, Result],
              parts: int = 1) -> dict[tuple[int, int, int, int], list[dict[str, numpy.ndarray]]]:
    """By rank, stage, part and number."""
    return {(rank, result.value["stage"], rank % parts, shard): values for rank, result in results.items()
            if result.value is not None for shard, values in result.value["shards"].items()}


def check(results: Mapping[int, Result], reference: Mapping[int, Result], parts: int = 1) -> None:
    """What workers hold after training has the reference's bits, and each shard is held by somebody."""
    expected = {key[1:]: values for key, values in shards_of(reference, parts).items()}
    found = shards_of(results, parts)
    assert {key[1:] for key in found} == expected.keys()
    for key, values in found.items():
        for one, other in zip(values, expected[key[1:]], strict=True):
            assert one.keys() == other.keys() and not [name for name in one if not numpy.array_equal(
                one[name], other[name])], key
    for rank, result in results.items():
        for name, value in ({} if result.value is None else result.value["parameters"]).items():
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
        job.comes_back(dies, late, rank)
        results = job.wait()
    assert all(result.status == 0 for result in results.values()), job.where()
    check(results, calm)
    assert all(len(result.value["shards"]) == 2 for result in results.values())


@pytest.mark.night
@pytest.mark.parametrize("hold", [Hold("1:0.1", "backward", 1, 1), Hold("0:1.0", "stepped", 2)], ids=str)
def test_parts_of_tensor_parallel_workers_have_shards_of_their_own(hold):
    arguments = {"pipelines": 2, "tensor": 2, "settings": EXACT, "options": (
        "--distributed-optimizer", "--bf16", "--clip", "0.05")}
    calm = calm_run(megatron_job.train, 8, arguments)
    with Job(megatron_job.train, 8, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.value is not None for result in results.values()) == 6, job.where()
    check(results, calm, parts=2)


@pytest.mark.night
@pytest.mark.parametrize("policy", ["drop", "lossy_forward", "rollback"])
def test_what_is_left_out_is_left_out_of_shards_too(policy):
    """As the whole optimizer does; all twins alike."""
    arguments = {"pipelines": 3, "settings": {"policy": policy}, "options": ("--dropout", "0")}
    ended = []
    for options in (("--dropout", "0"), ("--dropout", "0", "--distributed-optimizer")):
        hold = Hold("1:1", "backward", 2, 1)
        with Job(megatron_job.train, 6, {**arguments, "options": options}, [hold]) as job:
            job.wait_held()
            job.kill(hold)
            results = job.wait()
        ended.append({rank: result.value for rank, result in results.items() if result.status == 0})
        assert len(ended[-1]) == 5, job.where()
    for rank, value in ended[1].items():
        for name, parameter in value["parameters"].items():
            assert numpy.allclose(parameter, ended[0][rank]["parameters"][name], rtol=1e-3, atol=1e-5), (rank, name)
    twins: dict[tuple[int, int], list[dict[str, numpy.ndarray]]] = {}
    for value in ended[1].values():
        for shard, values in value["shards"].items():
            for one, other in zip(values, twins.setdefault((value["stage"], shard), values), strict=True):
                assert all(numpy.array_equal(one[name], other[name]) for name in one), (policy, shard)


@pytest.mark.night
@pytest.mark.timeout(200)
def test_a_worker_that_moves_to_another_stage_gets_shards_there():
    arguments = {"pipelines": 3, "iterations": 12, "options": ("--distributed-optimizer", "--clip", "0.05"),
                 "settings": {**EXACT, "moves": True}}
    calm = calm_run(megatron_job.train, 6, arguments)
    ranks = {f"{result.value['pipeline']}:{result.value['stage']}": rank for rank, result in calm.items()}
    first, second, late = Hold("0:0", "backward", 1), Hold("1:0", "backward", 3), Hold("2:1", "forward", 5)
    with Job(megatron_job.train, 6, arguments, [first, second, late], limit=150) as job:
        for hold in (first, second):  # not together: they are twins
            job.wait_held(hold)
            job.kill(hold)
            job.wait_ended(ranks[hold.worker])
        moving = job.wait_event("moving")
        job.wait_held(late)
        job.rejoin(ranks[moving["to"]])
        job.wait_event("waiting", worker=moving["to"])
        job.release(late)
        job.wait_event("joined", worker=moving["to"])
        results = job.wait()
        gone = {ranks[moving["worker"]], *(ranks[name] for name in ("0:0", "1:0") if name != moving["to"])}
    assert all(result.status == 0 for rank, result in results.items() if rank not in gone), job.where()
    check({rank: result for rank, result in results.items() if rank not in gone}, calm)
