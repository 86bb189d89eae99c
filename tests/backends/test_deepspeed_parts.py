"""DeepSpeed jobs with tensor parallelism: a worker is as many processes as the `model` axis has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.backends import tensor_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job
from tests.references import calm_run

pytestmark = pytest.mark.processes

PIPELINES, PARTS = 2, 2
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": 1, "parts": PARTS, "dropout": 0.1,
                            "settings": {"reduction": "exact"}}


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.night)])
def test_without_failures_parameters_have_stocks_bits(stages: int):
    arguments = {**EXACT, "stages": stages, "dropout": 0.0, "settings": {}}
    with Job(tensor_job.train, stages * PIPELINES * PARTS, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(tensor_job.train, stages * PIPELINES * PARTS, arguments) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0, (stock[rank].error, ours[rank].error)
        assert not differences(stock[rank], ours[rank])


@pytest.mark.parametrize(("position", "stages"), [("1:0.1", 1), *(
    pytest.param(*case, marks=pytest.mark.night) for case in [("0:0.0", 1), ("1:1.0", 2), ("0:0.1", 2)])])
def test_one_process_killed_takes_its_worker_out_and_leaves_the_same_bits(position: str, stages: int, tmp_path: Path):
    """The other one is inside a sum over the script's own group then. Survivors go on with what all their parts have
    done. Evaluations are made, and a checkpoint is written, without those two."""
    arguments = {**EXACT, "stages": stages, "evaluate": True}
    undisturbed = calm_run(tensor_job.train, stages * PIPELINES * PARTS, arguments)
    hold = Hold(position, "forward", 1, 1)
    with Job(tensor_job.train, stages * PIPELINES * PARTS, {**arguments, "save": str(tmp_path)}, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
        ranks = job.wait_event("started")["ranks"]
        worker = position.partition(".")[0]
        lost = [rank for name, rank in ranks.items() if name.startswith(worker)]
        for rank in set(results) - set(lost):
            assert results[rank].status == 0, job.where()
            assert not differences(results[rank], undisturbed[rank])
            assert results[rank].value["evaluated"] == undisturbed[rank].value["evaluated"]
        assert next(event["redone"] for event in job.events if event["event"] == "reconciled") <= 1
    saved = tmp_path / (tmp_path / "latest").read_text()
    assert {f"mp_rank_{rank:02}_model_states.pt" for rank in range(PARTS * stages)} <= {
        path.name for path in saved.iterdir()}


@pytest.mark.night
def test_a_killed_part_of_a_worker_is_replaced_while_the_batch_size_changes():
    """The script's group of tensor-parallel ranks is made again by the one that comes in, and evaluations, barriers and
    the changes that it has not seen are behind it."""
    arguments = {**EXACT, "stages": 2, "iterations": 7, "evaluate": True, "ramp": (3, 3, 4, 4, 2, 2, 5)}
    undisturbed = calm_run(tensor_job.train, 2 * PIPELINES * PARTS, arguments)
    dies, late = Hold("1:1.0", "forward", 1, 1), Hold("0:0.0", "forward", 3)
    with Job(tensor_job.train, 2 * PIPELINES * PARTS, arguments, [dies, late], limit=150) as job:
        job.wait_held(dies)
        rank = job.wait_event("started")["ranks"][dies.worker]
        job.kill(dies)
        job.wait_ended(rank)
        job.wait_held(late)
        job.rejoin(rank)
        job.wait_event("waiting", worker=dies.worker)
        job.release(late)
        results = job.wait()
        for own, result in results.items():
            assert result.status == 0, job.where()
            assert not differences(result, undisturbed[own]), own
            assert result.value["evaluated"] == undisturbed[own].value["evaluated"], own
        assert sorted(e["worker"] for e in job.events if e["event"] == "joined") == ["1:1.0", "1:1.1"]
