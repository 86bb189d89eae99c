"""What a worker says again on a new connection counts once, and what a coordinator that has just come back is told of a
generation in force counts before all members are back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.records import restore, taken_up
from tests.membership.cluster import PLAN, Cluster, endings, events, told

BETTER, BEST = (replace(PLAN, digest=f"sha256:{name}") for name in ("better", "best"))


class Repeating(Cluster):
    """Whoever says something loses its connection then, and says all that an agent says on a new one."""

    def __init__(self, pipelines: int = 3) -> None:
        super().__init__(pipelines)
        self.said: dict[str, dict[str, inputs.Heard]] = {}
        self.goes: dict[str, int] = {}
        """By incarnation the generation of the last go."""

    def feed(self, happened: Any, after: float = 0.01) -> list[do.Decision]:
        decisions = super().feed(happened, after)
        for decision in decisions:
            if isinstance(decision, do.Tell) and decision.message.type == "go":
                self.goes |= dict.fromkeys(decision.to, decision.message.generation)
        if isinstance(happened, inputs.Heard) and not isinstance(happened, inputs.Ready):
            self.said.setdefault(happened.incarnation, {})[happened.type] = happened
            if happened.incarnation in {one.incarnation for one in self.state.members.values()}:
                self.check_again(happened.incarnation)
        return decisions

    def check_again(self, incarnation: str) -> None:
        before = self.state
        again = [inputs.Hello(before.known[incarnation], self.goes[incarnation]), *self.said[incarnation].values()]
        decisions = [one for happened in again for one in super(Repeating, self).feed(happened, 0.0)]
        assert self.state == before, again
        others = [one for one in decisions if not isinstance(one, do.Tell) or one.to != (incarnation,)]
        assert not others, again


def better(cluster: Cluster, plan: Any) -> list[do.Decision]:
    return cluster.feed(inputs.Improved(cluster.state.generation, plan, 1.0))


def adopt(cluster: Cluster, plan: Any) -> list[do.Decision]:
    return [one for name in cluster.names
            for one in cluster.feed(inputs.Adopted(f"{name}/0", cluster.state.generation, 4, plan.digest))]


def of_each(cluster: Cluster, kind: Any, **fields: Any) -> list[do.Decision]:
    return [one for name in tuple(cluster.state.members)
            for one in cluster.feed(kind(f"{name}/0", generation=cluster.state.generation, **fields))]


def test_an_adoption_that_is_said_again_does_not_withdraw_the_next_offer() -> None:
    cluster = Repeating().train()
    better(cluster, BETTER)
    better(cluster, BEST)
    assert len(events(adopt(cluster, BETTER), "adopted")) == 1
    assert cluster.state.latest == BEST
    adopt(cluster, BETTER)
    assert cluster.state.latest == BEST and cluster.state.round.offered is not None
    assert len(events(adopt(cluster, BEST), "adopted")) == 1
    assert cluster.state.round.plan == BEST and len(events(cluster.log, "adopted")) == 2


def test_a_report_that_is_said_again_is_no_second_standstill() -> None:
    cluster = Repeating().train()
    cluster.commit_all(0)
    cluster.exit("1:1")
    cluster.reports(iteration=1, holds=0)
    cluster.plan()
    cluster.resume_all()
    assert [len(events(cluster.log, name)) for name in ("stopped", "reconciled", "resumed")] == [1, 1, 1]


def test_an_end_that_is_said_again_is_one_end() -> None:
    cluster = Repeating().train()
    of_each(cluster, inputs.Finished)
    assert len(events(cluster.log, "left")) == 6 and endings(cluster.log)[0].status == 0


def test_a_checkpoint_that_is_said_again_after_the_next_one_is_not_the_newest() -> None:
    cluster = Repeating().train()
    for iteration, writer in enumerate(["0:0", "1:0", "2:0"]):
        cluster.commit_all(iteration)
        cluster.feed(inputs.Written(f"{writer}/0", 1, iteration, f"/step{iteration}", {}))
    cluster.check_again("0:0/0")
    assert [one.iteration for one in cluster.state.checkpoints] == [0, 1, 2]


def test_leaves_boundaries_hints_errors_and_saves_that_are_said_again() -> None:
    cluster = Repeating()
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, emergency=True, poison="skip")
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    cluster.feed(inputs.Leave("1:1/0"))
    of_each(cluster, inputs.Boundary, iteration=6, t=cluster.now)
    cluster.reports(iteration=6, holds=5), cluster.plan(), cluster.resume_all()
    cluster.feed(inputs.Hinted("0:1/0", 2, "reset by peer"))
    for name in ("1:0", "2:0"):
        cluster.feed(inputs.Raised(f"{name}/0", Fault("ValueError", "x", 6, "F1.3", whole=True), cluster.now, 1))
    assert events(cluster.log, "skipped")
    cluster.reports(iteration=6, holds=5), cluster.plan(), cluster.resume_all()
    cluster.feed(inputs.Interrupted(143, "interrupted by SIGTERM", saves=True))
    cluster.reports(iteration=6, holds=5), cluster.plan()
    (end,) = endings(of_each(cluster, inputs.Saved, place="/here", error=""))
    assert "is saved in /here" in end.message


def back(cluster: Cluster, plans: Mapping[str, Any], *messages: Any) -> list[do.Decision]:
    """Another coordinator: each member says hello, and at once these of its ``messages``."""
    cluster.state = taken_up(restore(6, cluster.journal), cluster.journal, plans.get)
    decisions = cluster.feed(inputs.Restarted())
    for name in tuple(cluster.state.members):
        decisions += cluster.feed(inputs.Hello(cluster.member(name), cluster.state.generation))
        for kind, fields in messages:
            decisions += cluster.feed(kind(f"{name}/0", cluster.state.generation, **fields))
    return decisions


@pytest.mark.parametrize("first", ["before", "after"])
def test_a_recovery_that_ends_while_the_coordinator_comes_back_is_over_and_others_may_come_in(first: str) -> None:
    cluster = Cluster().train()
    cluster.exit("1:1")
    cluster.reports(), cluster.plan()
    if first == "before":
        cluster.feed(inputs.Resumed("0:0/0", 2, cluster.now))
    decisions = back(cluster, {PLAN.digest: PLAN}, (inputs.Resumed, {"t": cluster.now}))
    assert len(events(decisions, "resumed")) == 1 and cluster.state.since is None
    assert [one for one in decisions if isinstance(one, do.Improve)] == [do.Improve(2, frozenset({"1:1"}), PLAN)]
    offers = cluster.feed(inputs.Leave("0:1/0"))
    assert told(offers, "offer")


def test_an_adoption_that_is_complete_while_the_coordinator_comes_back_is_told_once() -> None:
    cluster = Cluster().train()
    better(cluster, BETTER)
    for name in cluster.names[1:]:
        cluster.feed(inputs.Adopted(f"{name}/0", 1, 4, BETTER.digest))
    plans = {one.digest: one for one in (PLAN, BETTER)}
    again = inputs.Adopted, {"iteration": 4, "digest": BETTER.digest}
    assert len(events(back(cluster, plans, again), "adopted")) == 1
    assert not events(back(cluster, plans, again), "adopted") and cluster.state.round.plan == BETTER
