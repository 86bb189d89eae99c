"""What launchers are told to do: from decisions, and again from the state after a lost connection."""

from __future__ import annotations

import json

from megatron_recycle.membership import commands, records
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.protocol import TO_LAUNCHER, Begun, Joined, Ordered, Out, Progress
from tests.membership.cluster import Cluster, told


def commanded(decisions: list[do.Decision]) -> list[Ordered]:
    """The commands among them, each a legal message."""
    found = [one.message for one in decisions if isinstance(one, do.Command)]
    assert all(TO_LAUNCHER.read(json.loads(json.dumps(one.to_json()))) == one for one in found)
    return found


def test_a_launcher_that_comes_back_is_told_what_still_holds() -> None:
    cluster = Cluster().train()
    assert commanded(cluster.log)[0] == Begun(0, None)
    lost = cluster.declare(FailureKind.FROZEN, "1:1/0")
    out = Out(3, 1003, FailureKind.FROZEN, "")
    assert commanded(lost) == [out] and told(lost, "end")
    again = [one.message for one in commands.in_force(cluster.state, "host")]
    assert again[:2] == [Begun(0, None), out]
    assert again[2:] == [Joined(rank, 1000 + rank) for rank in (0, 1, 2, 4, 5)]
    assert [one.message for one in commands.in_force(cluster.state, "elsewhere")] == again[:2]


def test_a_coordinator_that_comes_back_commands_the_same() -> None:
    cluster = Cluster().train()
    cluster.declare(FailureKind.FROZEN, "1:1/0")
    before = commands.in_force(cluster.state, "host")
    assert commands.in_force(records.restore(6, cluster.journal), "host") == before
    assert commands.in_force(records.restore(6, []), "host") == [], "nothing has begun"


def test_an_iteration_is_progress_for_services_that_have_died() -> None:
    assert Progress() in commanded(Cluster().train().commit_all(0))
