"""Better plans come faster than they are taken up: all workers follow the same one in every iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_recycle.control.planning import problem_of
from megatron_recycle.membership.inputs import Improved
from megatron_recycle.planner import plan_for
from tests.backends import gpt_job
from tests.harness import Job

pytestmark = [pytest.mark.processes, pytest.mark.night]

ITERATIONS = 30


def test_a_plan_is_offered_with_every_iteration():
    """The next plan may be agreed upon on one worker before, on another after it begins with the last one."""
    arguments: dict[str, Any] = {"pipelines": 3, "iterations": ITERATIONS, "settings": {"reduction": "exact"}}
    with Job(gpt_job.train, 6, arguments) as job:
        job.wait_event("committed", iteration=0)
        state = job._coordinator.state
        problem = problem_of(state.job, frozenset())
        plans = [plan_for(replace(problem, cap=dict.fromkeys(problem.cap, cap)), None, work=0).to_file()
                 for cap in (2, 4)]
        assert len({plan.digest for plan in plans}) == 2
        for number in range(ITERATIONS - 1):
            job.wait_event("committed", iteration=number)
            job._loop.call_soon_threadsafe(job._coordinator.feed, Improved(1, plans[number % 2], 1.0))
        results = job.wait()
    assert all(result.status == 0 for result in results.values())
    assert not [event for event in job.events if event["event"] == "decided"]
    assert len([event for event in job.events if event["event"] == "adopted"]) > 5
