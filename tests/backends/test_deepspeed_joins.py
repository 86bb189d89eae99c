"""Workers of a DeepSpeed job come back while it trains, and leave when they are asked to: with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import gpt_job
from tests.backends.comparing import differences, run
from tests.harness import Hold, Job, Result

pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 3, 2, 12, 2
SIZE = PIPELINES * STAGES
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS,
                            "settings": {"reduction": "exact"}}
LIMIT = 90


def rank_of(worker: str) -> int:
    pipeline, stage = map(int, worker.split(":"))
    return stage * PIPELINES + pipeline


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures."""
    return run(gpt_job.train, SIZE, EXACT)


def check_all(job: Job, reference: Mapping[int, Result], but: set[str] = frozenset()) -> None:
    """All places `but` these are filled at the end, by workers with the reference's bits; no iteration was lost."""
    results = job.wait()
    live = set(range(SIZE)) - {rank_of(worker) for worker in but}
    for rank in live:
        assert results[rank].status == 0, job.where()
        assert len(results[rank].value["members"]) == len(live)
        own = differences(results[rank], reference[rank])
        if any(event["event"] == "joined" and event["rank"] == rank for event in job.events):
            own.pop("losses", None)  # of the iterations before it came
        assert not own, (rank, own)
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(ITERATIONS))


def test_a_killed_worker_is_replaced_and_training_goes_on_with_all(undisturbed):
    dies, late = Hold("1:1", "backward", KILLED_IN, 1), Hold("0:0", "forward", KILLED_IN + 2)
    with Job(gpt_job.train, SIZE, EXACT, [dies, late], limit=LIMIT) as job:
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(rank_of("1:1"))
        job.wait_held(late)
        job.rejoin(rank_of("1:1"))
        job.wait_event("waiting", worker="1:1")
        job.release(late)
        joined = job.wait_event("joined", worker="1:1")
        check_all(job, undisturbed)
    assert joined["bytes"] > 0 and joined["iteration"] < ITERATIONS
    taken_in = [event for event in job.events if event["event"] == "reconciled"][-1]
    assert taken_in["redone"] == 0 and taken_in["joined"] == ["1:1"]
