"""V-shaped stages (`chunks: 2`) of Megatron. Other moments: tests/in_memory_job/test_chunks.py, tests/backends/
test_megatron_virtual.py; Megatron-LM's own flags and checkpoints: tests/backends/test_megatron_lm.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import pytest

from tests.backends import megatron_job
from tests.backends.test_megatron_distributed import EXACT
from tests.harness import Hold, Job, Result
from tests.references import calm_run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

PIPELINES, STAGES, WORKERS = 3, 2, 6


def job_of(*options: str, v_shaped: bool, **settings: Any) -> Mapping[str, Any]:
    """Stock begins with other weights on another number of chunks: both jobs begin with what goes by layer."""
    return {"pipelines": PIPELINES, "stages": STAGES, "alike": True,
            "settings": {**EXACT, **settings, "chunks": 2 if v_shaped else 1}, "options": (
                *(("--interleave", "2") if v_shaped else ()), "--dropout", "0", "--clip", "0", "--microbatches", "3",
                *options)}


def whole(results: Mapping[int, Result]) -> dict[str, Any]:
    """The model, of all that have ended well, who have the same of what they share."""
    found: dict[str, Any] = {}
    for result in results.values():
        if result.status == 0:
            for name, value in result.value["whole"].items():
                numpy.testing.assert_array_equal(found.setdefault(name, value), value, name)
    return found


@pytest.mark.night
@pytest.mark.parametrize("options", [
    ("--untied", "--distributed-optimizer", "--eval-every", "2"),
    ("--untied",), ("--untied", "--bf16", "--recompute", "full"), ()], ids=" ".join)
def test_a_v_that_has_lost_a_worker_ends_with_the_weights_of_the_job_without_it(options):
    """Tied embeddings are one tensor in a V, whose gradient is added up in another order."""
    flat = calm_run(megatron_job.train, WORKERS, job_of(*options, v_shaped=False))
    hold = Hold("1:0", "backward", 1, 1)
    with Job(megatron_job.train, WORKERS, job_of(*options, v_shaped=True), [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.status == 0 for result in results.values()) == WORKERS - 1, job.where()
    assert len(next(result.value["whole"] for result in flat.values())) < len(whole(results)) == len(whole(flat))
    losses = {result.value["stage"] for result in results.values() if result.status == 0 and result.value["losses"]}
    assert losses == {0}
    one, other = ([result.value for result in of.values() if result.status == 0 and result.value["losses"]]
                  for of in (flat, results))
    for key in ("losses", "validations"):
        assert [value for value in other[0][key] if value is not None] == pytest.approx(
            [value for value in one[0][key] if value is not None], rel=1e-6)
    if "--untied" not in options:
        calm = whole(calm_run(megatron_job.train, WORKERS, job_of(*options, v_shaped=True)))
        for name, value in whole(flat).items():
            numpy.testing.assert_allclose(calm[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    else:
        calm = whole(flat)
    for name, value in whole(results).items():
        numpy.testing.assert_array_equal(value, calm[name], name)


@pytest.mark.night
@pytest.mark.parametrize("options", [("--distributed-optimizer",), ("--untied",)], ids=" ".join)
def test_a_worker_of_a_v_comes_back_and_all_have_the_bits_of_a_calm_one(options):
    """With tied embeddings its first stage takes the one tensor over."""
    arguments = {**job_of(*options, "--eval-every", "1", v_shaped=True), "iterations": 8}
    calm = calm_run(megatron_job.train, WORKERS, arguments)
    worker, rank = "2:0", 2
    dies, late = Hold(worker, "backward", 1, 1), Hold("0:1", "forward", 3)
    with Job(megatron_job.train, WORKERS, arguments, [dies, late], limit=150) as job:
        job.comes_back(dies, late, rank)
        results = job.wait()
    assert all(result.status == 0 for result in results.values()), job.where()
    same(results, calm)


@pytest.mark.night
def test_whoever_runs_a_lent_layer_of_a_v_the_bits_are_those_of_a_calm_one():
    arguments = {**job_of("--blocks", "12", v_shaped=True, lend="auto"), "lends": True}
    calm = calm_run(megatron_job.train, WORKERS, arguments)
    hold = Hold("1:1", "backward", 1, 1)
    with Job(megatron_job.train, WORKERS, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.status == 0 for result in results.values()) == WORKERS - 1, job.where()
    assert any(result.value["borrowed"] for result in results.values() if result.status == 0)
    same(results, calm)


@pytest.mark.night
def test_parts_of_a_worker_each_have_their_part_of_both_chunks():
    arguments = {**job_of("--distributed-optimizer", "--bf16", v_shaped=True), "pipelines": 2, "tensor": 2}
    calm = calm_run(megatron_job.train, 8, arguments)
    hold = Hold("0:1.1", "backward", 1, 1)
    with Job(megatron_job.train, 8, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.value is not None for result in results.values()) == 6, job.where()
    for part in range(2):
        same({rank: result for rank, result in results.items() if rank % 2 == part and result.value is not None},
             {rank: result for rank, result in calm.items() if rank % 2 == part})


def same(results: Mapping[int, Result], calm: Mapping[int, Result]) -> None:
    expected, found = whole(calm), whole(results)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        numpy.testing.assert_array_equal(value, expected[name], name)
