"""Promise P7: what workers hold, by their own count and by the C library's, is what the plan says."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from megatron_recycle.plan import Plan, Worker, peak
from tests.backends import memory_job
from tests.harness import Hold, Job

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="asks glibc's allocator")]

WITHIN = 0.10
"""Messages under way and sums of gradients are in the allocator's count too."""


def check(value: dict[str, Any]) -> Plan:
    """The plan's peak in bytes, which is what this worker held; returns the plan."""
    plan, me = Plan.from_json(value["plan"]), Worker.parse(value["worker"])
    held = 0
    planned = 0
    before, after = value["before_b"], value["after_b"]
    change = {"F": before, "B": after - before, "W": -after, "FB": -before, "S": 0}
    for kind, _, _, _ in plan.actions(me):
        held += change[kind]
        planned = max(planned, held)
    assert value["before_b"] > 4 * 2**20 - 2**16, "four wide tensors of 1 MiB"
    assert value["counted"] == planned
    assert abs(value["allocated"] - planned) <= WITHIN * planned, (value["allocated"], planned)
    return plan


@pytest.mark.parametrize("hold", [
    pytest.param(None, marks=pytest.mark.night, id="whole"),
    pytest.param(Hold("1:1", "backward", 2, 1), id="after a death")])
def test_workers_hold_what_the_plan_says(hold):
    arguments = {"stages": 2, "pipelines": 3, "iterations": 4, "settings": {"cap": 3}}
    with Job(memory_job.train, 6, arguments, [hold] if hold else []) as job:
        if hold:
            job.wait_held()
            job.kill(hold)
        results = job.wait()
        survivors = [result.value for result in results.values() if result.status == 0]
        assert len(survivors) == (5 if hold else 6), job.where()
        profiles = [{"worker": told["worker"], **told["memory"]} for told in job.measured if told["memory"]]
    for value in survivors:
        check(value)
    assert {event["worker"] for event in profiles} >= {value["worker"] for value in survivors}
    assert all(event["held"]["before_b"] and event["kept"]["state"] for event in profiles)


@pytest.mark.night
def test_workers_that_are_told_to_use_less_memory_hold_less():
    """The first plan counts activations; the next one knows what they weigh, and how much room there is."""
    limit = 15 / 1024  # GiB; a micro-batch holds more than 4 MiB, so that three of four fit
    arguments = {"stages": 2, "pipelines": 2, "iterations": 20,
                 "settings": {"memory": limit, "planner_budget": 0.2, "heartbeat_timeout": 20.0}}
    with Job(memory_job.train, 4, arguments, profiled=True) as job:
        results = job.wait()
        assert all(result.status == 0 for result in results.values()), job.where()
        adopted = [event for event in job.events if event["event"] == "adopted"]
    assert adopted
    for result in results.values():
        plan = check(result.value)
        room = limit * 2**30
        assert plan.problem.before_b != (1, 1) and result.value["counted"] < room
        worker = Worker.parse(result.value["worker"])
        assert peak(plan, worker) <= plan.problem.cap[worker]
