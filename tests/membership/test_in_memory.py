"""Real agents and the coordinator's decisions without sockets, threads or a clock: time passes when a test says so."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_recycle.control.agent import Agent
from megatron_recycle.control.searches import Plans
from megatron_recycle.membership import inputs
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.protocol import Out
from tests.fakes.coordinator import Heap, InMemory
from tests.membership.cluster import report
from tests.membership.service import DESCRIPTION, fake_plan

NAMES = [f"{pipeline}:{stage}" for pipeline in range(3) for stage in range(2)]


class Job:
    """Six agents in generation 1."""

    def __init__(self) -> None:
        self.heap = Heap(1000.0)
        self.coordinator = self.led()
        self.agents = {name: self.agent(name, rank) for rank, name in enumerate(NAMES)}
        for agent in self.agents.values():
            agent.ready(DESCRIPTION, report(attempt=0))
        self.heap.run(1.0)
        self.resume(1)

    def led(self, before: InMemory | None = None) -> InMemory:
        return InMemory(6, Plans(fake_plan), self.heap.later, lambda: self.heap.now, plan_s=0.1, before=before)

    def agent(self, name: str, rank: int) -> Agent:
        made = Agent("", "", name, rank, f"{name}/0", pid=1000 + rank, host="host",
                     link=self.coordinator.link)
        made.start()
        return made

    def exit(self, name: str) -> None:
        self.agents.pop(name).close()
        rank = NAMES.index(name)
        self.coordinator.feed(inputs.Exited(rank, 1000 + rank, -9, self.heap.now))

    def resume(self, generation: int) -> dict[str, Any]:
        found = {}
        for name, agent in self.agents.items():
            go = agent.wait_go(generation, timeout=0.0)
            assert go is not None and go.generation == generation
            found[name] = go
            agent.resumed(generation)
        self.heap.run()
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.coordinator.events if event["event"] == name]


def test_a_failure_from_the_exit_to_the_go() -> None:
    job = Job()
    for agent in job.agents.values():
        agent.committed(0, 1.0)
    job.heap.run()
    job.exit("1:1")
    job.heap.run()
    assert {agent.stop_generation for agent in job.agents.values()} == {2}
    assert job.coordinator.commands[-1] == Out(3, 1003, FailureKind.EXIT, "")
    for agent in job.agents.values():
        agent.report(2, report(1, holds=0))
    job.heap.run(0.05)
    assert all(agent.generation == 1 for agent in job.agents.values()), "the plan takes a moment"
    job.heap.run(0.06)
    assert {go.resume.next for go in job.resume(2).values()} == {1}
    assert [event["ms"] for event in job.events("reconciled")] == [pytest.approx(100.0)]


def test_who_does_not_report_is_stalled_once_that_time_has_passed() -> None:
    job = Job()
    job.exit("1:1")
    job.heap.run(29.0)
    for name, agent in job.agents.items():
        if name != "0:0":
            agent.report(2, report())
    job.heap.run(1.0)
    assert job.coordinator.state.absent.out == {"0:0": "stalled", "1:1": "exit"}


def test_a_coordinator_dies_and_the_next_one_finds_everybody_where_they_are() -> None:
    job = Job()
    job.exit("1:1")
    job.coordinator = job.led(before=job.coordinator)
    job.heap.run()
    assert job.events("restarted") and job.coordinator.state.generation == 3, "it was half done, and is begun again"
    for agent in job.agents.values():
        agent.report(3, report())
    job.heap.run(0.1)
    job.resume(3)
    job.coordinator = job.led(before=job.coordinator)
    job.heap.run(60.0)
    assert job.coordinator.state.generation == 3, "all were told to go: training has never stopped"
    for agent in job.agents.values():
        agent._send_kept(inputs.Finished(agent.incarnation, 3))
    job.heap.run()
    assert job.coordinator.ended is not None and job.coordinator.ended.status == 0
    assert all(agent.ended is not None and agent.ended.status == 0 for agent in job.agents.values())
