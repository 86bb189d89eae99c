"""Stages that read different data are found out."""

from __future__ import annotations

import pytest

from tests.backends import gpt_job
from tests.harness import Job


@pytest.mark.slow
@pytest.mark.processes
def test_a_dataset_that_differs_between_first_and_last_stage_ends_the_job_and_no_worker_before_the_others():
    with Job(gpt_job.train, 6, {"mistake": "data"}) as job:
        results = job.wait()
        assert all(result.status == 1 for result in results.values()), job.where()
        finished = job.wait_event("finished")
    assert finished["status"] == 1 and "read different data" in finished["message"]
    assert not finished["out"] and not [event for event in job.events if event["event"] == "suspected"]
    assert any("read different data" in (result.error or "") for result in results.values())
