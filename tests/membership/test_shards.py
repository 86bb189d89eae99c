"""Who holds which shard, after any deaths and returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from megatron_recycle.membership import inputs
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.shards import ShardTable, assign, those_that_may_go
from tests.membership.cluster import Cluster, described, endings, events, report


def _on(hosts: Mapping[str, str]) -> dict[str, frozenset[str]]:
    return {name: frozenset([host]) for name, host in hosts.items()}


def _own(count: int) -> list[list[str]]:
    return [[f"{shard}:0"] for shard in range(count)]


def test_twins_are_neighbours_where_each_has_a_host() -> None:
    names = [f"{number}:0" for number in range(4)]
    found = assign(_own(4), names, _on({name: name for name in names}), 2)
    assert found == (("0:0", "1:0"), ("1:0", "2:0"), ("2:0", "3:0"), ("3:0", "0:0"))


def test_twins_lie_on_different_hosts() -> None:
    names = [f"{number}:0" for number in range(4)]
    hosts = dict(zip(names, "aabb"))
    for of in assign(_own(4), names, _on(hosts), 2):
        assert len({hosts[name] for name in of}) == 2


def test_the_shards_of_the_dead_are_adopted_and_given_back() -> None:
    names = [f"{number}:0" for number in range(4)]
    hosts = {name: name for name in names}
    before = assign(_own(4), names, _on(hosts), 2)
    left = ["0:0", "2:0", "3:0"]
    had = [[name for name in of if name in left] for of in before]
    after = assign(had, left, _on(hosts), 2)
    assert len(ShardTable(0, 0, tuple(map(tuple, had)), after).moves) == 2
    again = ShardTable(0, 0, after, assign(after, names, _on(hosts), 2))
    assert {taker for _, _, taker in again.moves} == {"1:0"} and len(again.moves) == 2


def test_twins_that_are_asked_to_leave_go_one_after_the_other() -> None:
    names = [f"{number}:0" for number in range(4)]
    table = ShardTable(0, 0, (), assign(_own(4), names, _on({name: name for name in names}), 2))
    assert those_that_may_go([table], ["0:0", "1:0", "2:0"], names) == ["0:0", "2:0"]


def test_each_speaks_for_one_shard() -> None:
    """Also where all hold all: who speaks for a shard adds up, sends and writes."""
    for count, copies in ((2, 2), (4, 2), (5, 3), (4, 4)):
        names = [f"{number}:0" for number in range(count)]
        found = assign(_own(count), names, _on({name: name for name in names}), copies)
        assert [of[0] for of in found] == names
    left = assign([[name for name in of if name != "1:0"] for of in found], ["0:0", "2:0", "3:0"],
                  _on({name: name for name in names}), 4)
    assert sorted(Counter(of[0] for of in left).values()) == [1, 1, 2]


class Sharded(Cluster):
    """Four pipelines of one stage, and its optimizer in shards, of which each worker begins with its own."""

    def __init__(self, copies: int = 2) -> None:
        super().__init__(4, 1)
        self.copies = copies
        self.held = {name: [int(name[0])] for name in self.names}
        for name in self.names:
            self.feed(inputs.Hello(replace(self.member(name), host=f"n{name}")))
        for name in self.names:
            self.feed(inputs.Ready(f"{name}/0", described({"grid": self.grid, "block": 2, "reduction": "exact"}),
                                   report(attempt=0, **self.shards(name, -1))))
        self.plan(), self.resume_all(), self.adopt()

    def shards(self, name: str, holds: int) -> dict[str, Any]:
        return {"shards": {"of": 4, "copies": self.copies, "held": dict.fromkeys(self.held[name], holds)}}

    def adopt(self) -> None:
        """As the last table wants it."""
        assert self.state.resume is not None
        (table,) = self.state.resume.shards
        self.held = {name: [shard for shard, of in enumerate(table.holders) if name in of] for name in self.names}

    def recover(self, committed: int) -> None:
        self.plan()
        for name in tuple(self.state.proven):
            self.feed(inputs.Reported(f"{name}/0", self.state.generation, report(
                committed + 1, committed, **self.shards(name, committed))))
        self.resume_all()


def test_slow_twins_stay_though_their_stage_has_others() -> None:
    cluster = Sharded()
    cluster.commit_all(0)
    decisions = cluster.declare(FailureKind.STALLED, "1:0/0", "2:0/0")
    assert {(event["worker"], event.get("removed")) for event in events(decisions, "suspected")} == {
        ("1:0", False), ("2:0", False)}
    assert len(cluster.state.members) == 4
    cluster.declare(FailureKind.STALLED, "1:0/0", "3:0/0")
    assert not {"1:0", "3:0"} & cluster.state.members.keys(), "these are no twins"


def test_who_is_slow_stays_until_another_has_its_shards() -> None:
    cluster = Sharded()
    cluster.commit_all(0)
    cluster.exit("1:0")
    cluster.recover(0)
    cluster.declare(FailureKind.STALLED, "2:0/0")
    assert "2:0" in cluster.state.members, "nobody else is known to have shard 1"
    cluster.adopt(), cluster.commit_all(1)
    cluster.declare(FailureKind.STALLED, "2:0/0")
    assert "2:0" not in cluster.state.members


def test_a_worker_that_has_a_shard_alone_hands_it_over_before_it_leaves() -> None:
    cluster = Sharded(copies=1)
    for name in ("1:0", "2:0"):
        cluster.feed(inputs.Leave(f"{name}/0"))
    assert cluster.state.round.switch and cluster.commit_all(0)
    for name in cluster.names:
        cluster.feed(inputs.Boundary(f"{name}/0", 1, 1, cluster.now))
    assert len(cluster.state.members) == 4, "nobody has gone yet"
    cluster.recover(0)
    cluster.adopt()
    assert {shard for name in ("0:0", "3:0") for shard in cluster.held[name]} == {0, 1, 2, 3}
    assert cluster.held["1:0"] == [1] and cluster.held["2:0"] == [2], "they train on"
    cluster.commit_all(1)
    for name in cluster.names:
        cluster.feed(inputs.Boundary(f"{name}/0", 2, 2, cluster.now))
    assert cluster.state.members.keys() == {"0:0", "3:0"}
    cluster.recover(1)
    assert not endings(cluster.log)
    for name in ("0:0", "3:0"):
        cluster.feed(inputs.Leave(f"{name}/0"))
    cluster.commit_all(2)
    for name in ("0:0", "3:0"):
        cluster.feed(inputs.Boundary(f"{name}/0", 3, 3, cluster.now))
    (end,) = endings(cluster.log)
    assert "stage 0 would have no worker any more" in end.message


def test_a_lost_shard_is_told_with_who_had_it_and_not_with_who_was_yet_to_get_it() -> None:
    cluster = Sharded()
    cluster.commit_all(0)
    cluster.exit("1:0")
    cluster.recover(0)
    cluster.exit("2:0")
    cluster.recover(0)
    (end,) = endings(cluster.log)
    assert "stage 0 has lost shard 1 of its optimizer state (2:0 held it): nobody who is left has it" in end.message


def test_an_error_on_the_only_one_that_has_a_shard_ends_the_job() -> None:
    """As one on the last worker of a stage: while it lives, and all that it holds can still be saved."""
    cluster = Sharded(copies=1)
    cluster.commit_all(0)
    cluster.feed(inputs.Raised("1:0/0", Fault("ValueError", "odd", 1, "B1.0"), cluster.now))
    (end,) = endings(cluster.log)
    assert "1:0, the only one that holds shard 1 of stage 0's optimizer state, has failed" in end.message


@given(some.integers(2, 8), some.integers(1, 4), some.integers(1, 4), some.data())
def test_any_history(count: int, copies: int, machines: int, data: some.DataObject) -> None:
    names = [f"{number}:0" for number in range(count)]
    hosts = {name: str(data.draw(some.integers(0, machines - 1))) for name in names}
    copies = min(copies, count)
    held = assign(_own(count), names, _on(hosts), copies)
    live = set(names)
    for _ in range(data.draw(some.integers(1, 5))):
        change = data.draw(some.sampled_from(names))
        live = live ^ {change} if live != {change} else live
        had = [[name for name in of if name in live and name != change] for of in held]
        if not all(had):
            return  # the job has ended
        held = assign(had, live, _on(hosts), copies)
        load = Counter({name: sum(name in of for of in held) for name in live})
        for before, of in zip(had, held):
            assert len(of) == len(set(of)) == min(copies, len(live)) and set(of) <= live
            assert copies == 1 or set(of) & set(before), "somebody has it to begin with"
            if min(copies, len(live)) > 1 and len({hosts[name] for name in live}) > 1:
                assert len({hosts[name] for name in of}) > 1
        if len({hosts[name] for name in live}) == len(live):
            assert max(load.values()) - min(load.values()) <= 1
            missing = sum(max(0, len(of) - len(before)) for before, of in zip(had, held))
            moved = sum(len(set(of) - set(before)) for before, of in zip(had, held))
            share = -(-count * min(copies, len(live)) // len(live))
            assert moved <= max(missing, share) + sum(
                max(0, sum(name in of for of in had) - share) for name in live), "no copy without a reason"
