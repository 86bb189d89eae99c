"""What launchers are told to do: from decisions, and again from the state after a lost connection."""

from __future__ import annotations

from typing import Any

from megatron_recycle.membership import commands, records
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.messages import TO_LAUNCHER, check
from tests.membership.cluster import Cluster, told


def commanded(decisions: list[do.Decision]) -> list[dict[str, Any]]:
    """The commands among them, each a legal message."""
    found = [dict(one.message) for one in decisions if isinstance(one, do.Command)]
    assert all(check(one, TO_LAUNCHER) for one in found)
    return found


def test_a_launcher_that_comes_back_is_told_what_still_holds() -> None:
    cluster = Cluster().train()
    assert commanded(cluster.log)[0] == {"type": "begun", "max_restarts": 0, "max_failures_per_host": 0,
                                        "leave_timeout": None}
    lost = cluster.declare(FailureKind.FROZEN, "1:1/0")
    out = {"type": "out", "rank": 3, "pid": 1003, "kind": "frozen", "error": ""}
    assert commanded(lost) == [out] and told(lost, "end")
    again = [dict(one.message) for one in commands.in_force(cluster.state, "host")]
    assert again[:2] == [{"type": "begun", "max_restarts": 0, "max_failures_per_host": 0,
                                        "leave_timeout": None}, out]
    assert again[2:] == [{"type": "joined", "rank": rank, "pid": 1000 + rank} for rank in (0, 1, 2, 4, 5)]
    assert [dict(one.message) for one in commands.in_force(cluster.state, "elsewhere")] == again[:2]


def test_a_coordinator_that_comes_back_commands_the_same() -> None:
    cluster = Cluster().train()
    cluster.declare(FailureKind.FROZEN, "1:1/0")
    before = commands.in_force(cluster.state, "host")
    assert commands.in_force(records.restore(6, cluster.journal), "host") == before
    assert commands.in_force(records.restore(6, []), "host") == [], "nothing has begun"


def test_an_iteration_is_progress_for_services_that_have_died() -> None:
    assert {"type": "progress"} in commanded(Cluster().train().commit_all(0))
