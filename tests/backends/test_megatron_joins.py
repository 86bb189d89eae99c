"""A worker of a Megatron job comes back while it trains: with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import comparing, megatron_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(200)]

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 3, 2, 10, 1
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS,
                            "settings": {"reduction": "exact", "verify": "peers"}, "ramp": (3, 2, 2, 4, 4, 5)}
"""The batch size is ramped up meanwhile."""
LATE = Hold("0:0", "forward", KILLED_IN + 2)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures."""
    return calm_run(megatron_job.train, PIPELINES * STAGES, EXACT)


@pytest.mark.night
@pytest.mark.parametrize("worker", ["1:1", "0:0"])
def test_a_killed_worker_is_replaced_and_training_goes_on_with_all(worker, undisturbed):
    """Tied embeddings, Adam, clipping and dropout are the script's defaults."""
    dies = Hold(worker, "backward", KILLED_IN, 1)
    late = LATE if worker != "0:0" else Hold("1:0", "forward", KILLED_IN + 2)
    rank = next(rank for rank, result in undisturbed.items()
                if f"{result.value['pipeline']}:{result.value['stage']}" == worker)
    with Job(megatron_job.train, PIPELINES * STAGES, EXACT, [dies, late], limit=150) as job:
        job.comes_back(dies, late, rank)
        results = job.wait()
        for own, result in results.items():
            assert result.status == 0, job.where()
            assert len(result.value["members"]) == PIPELINES * STAGES
            found = differences(result, undisturbed[own])  # of losses too, which one that comes in is told
            assert not found, (own, found)
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(ITERATIONS))


@pytest.mark.night
def test_one_that_comes_back_with_other_data_or_rates_ends_alone_and_the_job_goes_on(undisturbed):
    """Nobody else ends for it, none of its numbers count, and the next one comes in."""
    worker, rank = "1:1", 4
    dies = Hold(worker, "backward", KILLED_IN, 1)
    lates = [Hold("0:0", "forward", iteration) for iteration in (3, 5, 7)]
    with Job(megatron_job.train, PIPELINES * STAGES, EXACT, [dies, *lates], limit=150) as job:
        job.wait_held(dies)
        job.kill(dies)
        for times, (late, options) in enumerate(zip(lates, [("--data", comparing.__file__), ("--lr", "0.5"), ()])):
            assert job.wait_ended(rank).status == (1 if times else -9)
            job.wait_held(late)
            job.rejoin(rank, options=options)
            job.wait_until(lambda wanted=times + 1: sum(
                event["event"] == "waiting" for event in job.events) == wanted, "one that waits")
            job.release(late)
        results = job.wait()
        told = (job.folder / f"worker-{rank}.log").read_text()
        assert "worker 1:1 cannot join: it reads other data than the job" in told
        assert "worker 1:1 cannot join: its rates for iteration" in told
        for own, result in results.items():
            assert result.status == 0, job.where()
            found = differences(result, undisturbed[own])
            assert not found, (own, found)
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(ITERATIONS))


TENSOR: Mapping[str, Any] = {**EXACT, "pipelines": 2, "tensor": 2, "iterations": 7}


@pytest.mark.night
def test_a_killed_part_of_a_worker_is_replaced_and_its_other_part_works_again():
    """Its worker is out, and the other part idles until it comes in together with the new one."""
    arguments = {**TENSOR, "settings": {**EXACT["settings"], "step": "staggered"}}
    calm = calm_run(megatron_job.train, 8, arguments)
    dies, late = Hold("1:1.0", "backward", KILLED_IN, 1), Hold("0:0.0", "forward", KILLED_IN + 2)
    with Job(megatron_job.train, 8, arguments, [dies, late], limit=150) as job:
        job.wait_held(dies)
        rank = job.wait_event("started")["ranks"][dies.worker]
        job.kill(dies)
        job.wait_ended(rank)
        job.wait_held(late)
        assert job.wait_event("decided")["out"] == {dies.worker: "exit", "1:1.1": "stranded"}
        job.rejoin(rank)
        job.wait_event("waiting", worker=dies.worker)
        job.release(late)
        results = job.wait()
        for own, result in results.items():
            assert result.status == 0, job.where()
            assert len(result.value["members"]) == 4 and result.value["rerouted"] == " live: 4/4 | rerouted: 0 |"
            found = differences(result, calm[own])
            assert not found, (own, found)
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(TENSOR["iterations"]))
        assert sorted(e["worker"] for e in job.events if e["event"] == "joined") == ["1:1.0", "1:1.1"]
