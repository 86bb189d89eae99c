"""A cluster on paper: drives the pure machine and keeps what it decided."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.description import Description
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.machine import step
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.verdict import Verdict
from megatron_recycle.plan.plan_file import PlanFile


def report(iteration: int = 0, holds: int = -1, stepped: int | None = None, **other: Any) -> Report:
    """A worker's report; by default it has stepped what it holds."""
    base = {
        "iteration": iteration,
        "attempt": 1,
        "holds": holds,
        "stepped": holds if stepped is None else stepped,
        "verdict": None,
        "actions": 0,
    }
    return Report.from_json({**base, **other})


def verdict(iteration: int, norm: float = 1.0) -> Verdict:
    """The verdict of one stage."""
    return Verdict(iteration, 0.0, 0.0, (norm,), (1.0,))


PLAN = PlanFile(source="greedy", digest="sha256:0", period=9, makespan=12, lower_bound=9)


def described(facts: Mapping[str, Any]) -> Description:
    """A process's description of its job."""
    return Description.from_json(facts)


class Cluster:
    """`pipelines` x `stages` workers; worker d:s has rank d * stages + s and incarnation "d:s/0"."""

    def __init__(self, pipelines: int = 3, stages: int = 2) -> None:
        self.names = [f"{d}:{s}" for d in range(pipelines) for s in range(stages)]
        self.grid = {"stages": stages, "microbatches": [4] * pipelines}
        self.state = st.State(size=len(self.names))
        self.now = 100.0
        self.log: list[do.Decision] = []

    @property
    def journal(self) -> list[dict[str, Any]]:
        """What a coordinator that comes back would read."""
        return [json.loads(json.dumps(one.record.to_json())) for one in self.log
                if isinstance(one, (do.Record, do.Note))]

    def feed(self, happened: Any, after: float = 0.01) -> list[do.Decision]:
        self.now += after
        self.state, decisions = step(self.state, happened, self.now)
        self.log += decisions
        return list(decisions)

    def member(self, name: str, life: int = 0) -> st.Member:
        rank = self.names.index(name)
        return st.Member(name, rank, f"{name}/{life}", 1000 + rank + 100 * life, "host")

    def hello(self, name: str, life: int = 0) -> list[do.Decision]:
        return self.feed(inputs.Hello(self.member(name, life)))

    def ready(self, name: str, **other: Any) -> list[do.Decision]:
        description = {"grid": self.grid, "block": 2, "reduction": "exact", **other}
        return self.feed(inputs.Ready(f"{name}/0", described(description), report(attempt=0)))

    def exit(self, name: str, status: int | None = -9, since: float | None = None) -> list[do.Decision]:
        member = self.member(name)
        moment = self.now if since is None else since
        return self.feed(inputs.Exited(member.rank, member.pid, status, moment, "worker.log"))

    def declare(self, kind: FailureKind, *incarnations: str, ago: float = 0.0) -> list[do.Decision]:
        """A detector's verdict on these."""
        losses = tuple(inputs.Loss(one, kind) for one in incarnations)
        return self.feed(inputs.Lost(losses, self.now - ago))

    def reports(self, *names: str, **fields: Any) -> list[do.Decision]:
        """These workers report for the current generation (all members if none is named)."""
        decisions: list[do.Decision] = []
        for name in names or tuple(self.state.members):
            happened = inputs.Reported(f"{name}/0", self.state.generation, report(**fields))
            decisions += self.feed(happened)
        return decisions

    def plan(self, generation: int | None = None) -> list[do.Decision]:
        number = self.state.generation if generation is None else generation
        return self.feed(inputs.Planned(number, replace(PLAN, failed=sorted(self.state.failed)), 1.5))

    def resume_all(self) -> list[do.Decision]:
        decisions: list[do.Decision] = []
        for name in tuple(self.state.members):
            decisions += self.feed(inputs.Resumed(f"{name}/0", self.state.generation, self.now))
        return decisions

    def commit_all(self, iteration: int, loss: float = 2.5) -> list[do.Decision]:
        decisions: list[do.Decision] = []
        for name in tuple(self.state.members):
            decisions += self.feed(inputs.Committed(f"{name}/0", self.state.generation, iteration, loss))
        return decisions

    def train(self) -> Cluster:
        """All the way to generation 1."""
        for name in self.names:
            self.hello(name)
        for name in self.names:
            self.ready(name)
        self.plan()
        self.resume_all()
        assert self.state.phase is st.Phase.TRAINING
        return self


def told(decisions: list[do.Decision], kind: str) -> list[tuple[set[str], Any]]:
    """Messages of this type, with the workers they go to."""
    return [
        ({who.split("/")[0] for who in decision.to}, decision.message)
        for decision in decisions
        if isinstance(decision, do.Tell) and decision.message.type == kind
    ]


def events(decisions: list[do.Decision], name: str) -> list[dict[str, Any]]:
    return [
        dict(decision.event)
        for decision in decisions
        if isinstance(decision, do.Emit) and decision.event["event"] == name
    ]


def endings(decisions: list[do.Decision]) -> list[do.End]:
    return [decision for decision in decisions if isinstance(decision, do.End)]
