"""Policies that do not use hit pipelines, under Megatron, in processes: a worker is killed in the middle of an
iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job
from tests.references import calm_run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.night]

DIES = Hold("1:1", "backward", 2, 1)
ITERATIONS = 4


def job_of(policy: str) -> dict[str, Any]:
    return {"pipelines": 3, "stages": 2, "iterations": ITERATIONS, "settings": {"policy": policy}}


def after_a_kill(policy: str) -> tuple[dict[int, Any], int]:
    """What each survivor has by its rank, and how many actions were made again."""
    with Job(megatron_job.train, 6, job_of(policy), [DIES]) as job:
        job.wait_held()
        job.kill(DIES)
        results = job.wait()
        left_out = [(event["pipelines"], event["iteration"]) for event in job.events if event["event"] == "left_out"]
        redone = next(event["redone"] for event in job.events if event["event"] == "reconciled")
        committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
        assert left_out == ([] if policy == "drop" else [([1], 2)]) and committed == list(range(ITERATIONS))
        living = {rank: result for rank, result in results.items() if result.status == 0}
        assert len(living) == 5, job.where()
    return living, redone


def test_drop_trains_all_micro_batches_on_whole_pipelines_the_same_to_rounding():
    calm = calm_run(megatron_job.train, 6, job_of("reroute"))
    living, _ = after_a_kill("drop")
    for rank, result in living.items():
        assert max(differences(result, calm[rank]).values(), default=0.0) < 1e-5


def test_whole_pipelines_go_on_where_they_stand_and_train_what_they_would_have_made_again():
    forward, gone_on = after_a_kill("lossy_forward")
    back, redone = after_a_kill("rollback")
    assert gone_on < redone
    calm = calm_run(megatron_job.train, 6, job_of("reroute"))
    for rank, result in forward.items():
        assert max(differences(result, back[rank]).values(), default=0.0) < 1e-5
        losses, others = result.value["losses"], calm[rank].value["losses"]  # of the last stage's workers
        assert np.allclose(losses[:2], others[:2])
        assert not losses or not np.allclose(losses[2:], others[2:], rtol=1e-6), "fewer samples"
