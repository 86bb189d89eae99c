"""A worker of a Megatron job comes back while it trains: with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import differences, run
from tests.harness import Hold, Job, Result

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(200)]

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 3, 2, 10, 1
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS,
                            "settings": {"reduction": "exact", "verify": "peers"}}
LATE = Hold("0:0", "forward", KILLED_IN + 2)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures."""
    return run(megatron_job.train, PIPELINES * STAGES, EXACT)


@pytest.mark.parametrize("worker", ["1:1", "0:0"])
def test_a_killed_worker_is_replaced_and_training_goes_on_with_all(worker, undisturbed):
    """Tied embeddings, Adam, clipping and dropout are the script's defaults."""
    dies = Hold(worker, "backward", KILLED_IN, 1)
    late = LATE if worker != "0:0" else Hold("1:0", "forward", KILLED_IN + 2)
    rank = next(rank for rank, result in undisturbed.items()
                if f"{result.value['pipeline']}:{result.value['stage']}" == worker)
    with Job(megatron_job.train, PIPELINES * STAGES, EXACT, [dies, late], limit=150) as job:
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(rank)
        job.wait_held(late)
        job.rejoin(rank)
        job.wait_event("waiting", worker=worker)
        job.release(late)
        job.wait_event("joined", worker=worker)
        results = job.wait()
        for own, result in results.items():
            assert result.status == 0, job.where()
            assert len(result.value["members"]) == PIPELINES * STAGES
            found = differences(result, undisturbed[own])
            if own == rank:
                found.pop("losses", None)  # of the iterations before it came
            assert not found, (own, found)
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(ITERATIONS))
