"""Virtual pipelines: stock's interleaved chunks, in the order of a plan. Other moments:
tests/in_memory_job/test_chunks.py; Megatron-LM's own flags: tests/backends/test_megatron_lm.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.backends.test_megatron_distributed import EXACT
from tests.backends.test_megatron_distributed import check as check_shards
from tests.harness import Hold, Job, Result
from tests.references import calm_run, run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

PIPELINES, STAGES, WORKERS = 2, 3, 6


def job_of(*options: str, interleave: int = 2, microbatches: int = STAGES) -> Mapping[str, Any]:
    """Two addends have one sum, and nothing is clipped, whose norm stock adds up in another order."""
    return {"pipelines": PIPELINES, "stages": STAGES, "options": (
        "--interleave", str(interleave), "--blocks", str(STAGES * interleave), "--microbatches", str(microbatches),
        "--dropout", "0", "--clip", "0", *options)}


@pytest.mark.parametrize("options", [
    ("--distributed-optimizer",), *[pytest.param(case, marks=pytest.mark.night) for case in [
        (), ("--untied", "--bf16"), ("--recompute", "full", "--eval-every", "2"),
        ("--bf16", "--distributed-optimizer", "--eval-every", "2", "--per-token-loss")]]], ids=" ".join)
def test_a_job_that_has_lost_a_worker_ends_with_the_bits_of_stocks_own_interleaving(options):
    stock = run(megatron_job.train, WORKERS, {**job_of(*options), "plugin": False})
    hold = Hold("1:0", "backward", 1, 1)
    with Job(megatron_job.train, WORKERS, {**job_of(*options), "settings": EXACT}, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.status == 0 for result in results.values()) == WORKERS - 1, job.where()
    compare(results, stock, options)


@pytest.mark.night
@pytest.mark.parametrize("options", [("--distributed-optimizer",), ("--untied",)], ids=" ".join)
def test_a_worker_comes_back_and_all_end_with_the_bits_of_stocks_own_interleaving(options):
    """With three chunks on each stage, and an evaluation before each iteration."""
    arguments = {**job_of("--eval-every", "1", *options, interleave=3), "iterations": 8}
    stock = run(megatron_job.train, WORKERS, {**arguments, "plugin": False})
    worker, rank = "1:2", WORKERS - 1
    dies, late = Hold(worker, "backward", 1, 1), Hold("0:0", "forward", 3)
    with Job(megatron_job.train, WORKERS, {**arguments, "settings": EXACT}, [dies, late], limit=150) as job:
        job.comes_back(dies, late, rank)
        results = job.wait()
    assert all(result.status == 0 for result in results.values()), job.where()
    compare(results, stock, options)


@pytest.mark.night
@pytest.mark.parametrize("options", [(), ("--distributed-optimizer", "--recompute", "full")], ids=" ".join)
def test_whoever_runs_a_lent_layer_of_a_chunk_the_bits_are_stocks(options):
    arguments = job_of("--blocks", "18", *options)
    stock = run(megatron_job.train, WORKERS, {**arguments, "plugin": False})
    hold = Hold("1:1", "backward", 1, 1)
    settings = {**EXACT, "lend": "auto"}
    with Job(megatron_job.train, WORKERS, {**arguments, "settings": settings, "lends": True}, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.status == 0 for result in results.values()) == WORKERS - 1, job.where()
    assert any(result.value["borrowed"] for result in results.values() if result.status == 0)
    compare(results, stock, options)


@pytest.mark.night
def test_parts_of_a_worker_each_have_their_part_of_every_chunk():
    arguments = {**job_of("--distributed-optimizer", "--bf16"), "tensor": 2, "settings": EXACT}
    calm = calm_run(megatron_job.train, 2 * WORKERS, arguments)
    hold = Hold("0:1.1", "backward", 1, 1)
    with Job(megatron_job.train, 2 * WORKERS, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.value is not None for result in results.values()) == 2 * WORKERS - 2, job.where()
    check_shards(results, calm, parts=2)


def compare(results: Mapping[int, Result], stock: Mapping[int, Result], options: Sequence[str]) -> None:
    """Those that are left have stock's bits; sums over the global batch, for the log, agree to rounding."""
    check_shards(results, stock)  # and parameters
    for rank in (rank for rank, result in results.items() if result.status == 0):
        if "--distributed-optimizer" not in options:
            assert set(differences(stock[rank], results[rank])) <= {"losses"}
        for key in ("losses", "validations"):
            ours, theirs = ([value for value in of[rank].value[key] if value is not None] for of in (results, stock))
            assert ours == pytest.approx(theirs, rel=1e-6)
