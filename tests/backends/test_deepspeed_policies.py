"""Policies that leave hit pipelines out, in processes: a worker is killed in the middle of an iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.backends import gpt_job
from tests.harness import Hold, Job

pytestmark = pytest.mark.processes

DIES = Hold("1:1", "backward", 2, 1)
ITERATIONS = 4


def after_a_kill(policy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each survivor has by the worker's name, and the event of the recovery."""
    with Job(gpt_job.train, 6, {"iterations": ITERATIONS, "settings": {"policy": policy}}, [DIES]) as job:
        job.wait_held()
        job.kill(DIES)
        results = job.wait()
        left_out = [event for event in job.events if event["event"] == "left_out"]
        reconciled = next(event for event in job.events if event["event"] == "reconciled")
        committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
        assert [(event["pipelines"], event["microbatches"], event["iteration"]) for event in left_out] == [([1], 4, 2)]
        assert committed == list(range(ITERATIONS)), job.where()
        living = {rank: result.value for rank, result in results.items() if result.value is not None}
        assert len(living) == 5, job.where()
    return living, reconciled


@pytest.mark.night
def test_whole_pipelines_go_on_where_they_stand_and_train_what_they_would_have_made_again():
    """The same samples count under both policies, so that the results are the same, to rounding."""
    forward, gone_on = after_a_kill("lossy_forward")
    back, redone = after_a_kill("rollback")
    assert gone_on["redone"] < redone["redone"], (gone_on, redone)
    for rank, value in forward.items():
        assert np.allclose(value["losses"], back[rank]["losses"], rtol=1e-6)
        for name, parameter in value["parameters"].items():
            assert np.allclose(parameter, back[rank]["parameters"][name], rtol=0, atol=1e-5)
