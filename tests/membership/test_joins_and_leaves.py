"""Stories of coming in and going out, on paper."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.open_positions import (
    Offered,
    Reservations,
    failed_too_often,
    free_places,
    promised_before,
)
from megatron_recycle.membership.records import restore
from tests.membership.cluster import Cluster, described, endings, events, report, told


class Joins(Cluster):
    """`1:1` is out, and its second life "1:1/1" may come in."""

    def lost(self) -> Joins:
        self.train()
        self.exit("1:1")
        self.plan()
        self.reports(iteration=0)
        self.resume_all()
        return self

    def comes(self, life: int = 1, **other: Any) -> list[do.Decision]:
        self.hello("1:1", life)
        description = {"grid": self.grid, "block": 2, "reduction": "exact", **other}
        return self.feed(inputs.Ready(f"1:1/{life}", described(description), report(attempt=0)))

    def who(self) -> list[str]:
        return [member.incarnation for member in self.state.members.values()]

    def stand(self, iteration: int = 7) -> list[do.Decision]:
        decisions: list[do.Decision] = []
        for who in self.who():
            decisions += self.feed(inputs.Boundary(who, self.state.generation, iteration, self.now))
        return decisions

    def taken_in(self) -> dict[str, Any]:
        """The go with 1:1/1 in it."""
        self.comes()
        self.stand()
        self.plan()
        ((_, go),) = told(self.reports("0:0", "0:1", "1:0", "2:0", "2:1", iteration=6, holds=6, committed=6), "go")
        return go


def test_a_joiner_that_is_ready_makes_the_members_stop_at_a_boundary_and_is_then_one_of_them() -> None:
    cluster = Joins().lost()
    ((to, offer),) = told(cluster.comes(), "offer")
    assert to == set(cluster.names) - {"1:1"} and offer.plan is None
    ((to, stop),) = told(cluster.stand(), "stop")
    assert to == set(cluster.names) and stop.members["1:1"] == "1:1/1" and stop.out == {}
    cluster.plan()
    ((to, go),) = told(cluster.reports("0:0", "0:1", "1:0", "2:0", "2:1", iteration=6, holds=6, committed=6), "go")
    assert to == set(cluster.names)
    assert (go.resume.joined, go.resume.next, go.resume.redone) == (("1:1",), 7, 0)
    received = inputs.Received(2_000_000, 4.0)
    (joined,) = events(cluster.feed(inputs.Holds("1:1/1", 3, received)), "joined")
    assert (joined["worker"], joined["bytes"], joined["mb_per_s"]) == ("1:1", 2_000_000, 500.0)
    assert cluster.state.arrivals.unproven == {} and cluster.state.absent.out == {}


def test_a_failure_while_it_comes_in_sends_the_joiner_back_to_wait_and_its_word_does_not_count() -> None:
    cluster = Joins().lost()
    cluster.taken_in()
    ((to, stop),) = told(cluster.exit("0:0"), "stop")
    assert "1:1" in to and "1:1" not in stop.members and stop.out["1:1"] == "exit"
    assert "1:1/1" not in cluster.state.absent.fenced
    assert cluster.feed(inputs.Holds("1:1/1", 3, inputs.Received())) == []
    cluster.plan()
    cluster.reports("0:1", "1:0", "2:0", "2:1", iteration=6, holds=6, committed=6)
    assert not told(cluster.resume_all(), "offer")
    description = {"grid": cluster.grid, "block": 2, "reduction": "exact"}
    assert told(cluster.feed(inputs.Ready("1:1/1", described(description), report())), "offer")


def test_a_joiner_that_dies_while_it_comes_in_is_a_failure_like_any_other() -> None:
    cluster = Joins().lost()
    cluster.taken_in()
    decisions = cluster.feed(inputs.Lost((inputs.Loss("1:1/1", FailureKind.EXIT),), cluster.now))
    assert [event["worker"] for event in events(decisions, "suspected")] == ["1:1"]
    assert "1:1/1" in cluster.state.absent.fenced and not cluster.state.arrivals.joiners


def test_one_that_only_waits_is_missed_by_nobody() -> None:
    cluster = Joins().lost()
    cluster.hello("1:1", 1)
    decisions = cluster.feed(inputs.Lost((inputs.Loss("1:1/1", FailureKind.FROZEN),), cluster.now))
    assert events(decisions, "join_failed") and not told(decisions, "stop")
    assert cluster.state.generation == 2 and not cluster.state.arrivals.joiners


def test_a_joiner_with_another_configuration_is_refused_by_the_name_of_the_key() -> None:
    cluster = Joins().lost()
    ((to, end),) = told(cluster.comes(reduction="fast"), "end")
    assert to == {"1:1"} and end.status == 1 and 'reduction = "exact", it has "fast"' in end.message
    assert not cluster.state.arrivals.joiners and cluster.state.phase is st.Phase.TRAINING


def test_no_switch_is_offered_before_a_recovery_is_over() -> None:
    cluster = Joins().train()
    cluster.exit("1:1")
    assert not told(cluster.comes(), "offer")
    cluster.plan()
    assert not told(cluster.reports(iteration=0), "offer")
    assert told(cluster.resume_all(), "offer")


def test_a_member_that_asks_to_leave_is_out_at_the_boundary_and_told_so_with_status_zero() -> None:
    cluster = Joins().train()
    assert told(cluster.feed(inputs.Leave("2:0/0")), "offer")
    decisions = cluster.stand()
    (left,) = events(decisions, "left")
    assert (left["worker"], left["kind"]) == ("2:0", "leave") and not events(decisions, "suspected")
    ((to, end),) = told(decisions, "end")
    assert to == {"2:0"} and end.status == 0
    assert cluster.state.absent.out == {"2:0": "leave"} and not cluster.state.absent.leaving


def test_the_last_of_a_stage_stays_until_a_joiner_has_its_state() -> None:
    cluster = Joins().lost()
    for name in ("0:1", "2:1"):
        cluster.feed(inputs.Leave(f"{name}/0"))
    cluster.comes()
    decisions = cluster.stand()
    assert [event["worker"] for event in events(decisions, "left")] == ["2:1"]
    cluster.plan()
    cluster.reports("0:0", "0:1", "1:0", "2:0", iteration=6, holds=6, committed=6)
    cluster.feed(inputs.Holds("1:1/1", 3, inputs.Received()))
    told_last = [told(cluster.feed(inputs.Resumed(who, 3, cluster.now)), "offer") for who in cluster.who()][-1]
    assert told_last, "now it may go"
    assert [event["worker"] for event in events(cluster.stand(9), "left")] == ["0:1"]


def test_when_the_last_of_a_stage_leaves_the_job_ends_at_the_boundary() -> None:
    cluster = Joins().train()
    for name in ("0:1", "1:1", "2:1"):
        cluster.feed(inputs.Leave(f"{name}/0"))
    (end,) = endings(cluster.stand())
    assert end.status == 1 and "stage 1" in end.message and "0:1, 1:1, 2:1" in end.message


def test_a_coordinator_that_comes_back_takes_in_whom_its_predecessor_had_let_wait_at_the_boundary() -> None:
    cluster = Joins().lost()
    cluster.comes()
    number = cluster.state.round.switch
    cluster.state = restore(len(cluster.names), cluster.journal)
    cluster.feed(inputs.Restarted())
    cluster.comes()
    for name in ("0:0", "0:1", "1:0", "2:0", "2:1"):
        cluster.feed(inputs.Hello(cluster.member(name), 2))
        decisions = cluster.feed(inputs.Boundary(f"{name}/0", 2, 7, cluster.now))
    ((_, stop),) = told(decisions, "stop")
    assert stop.generation == 3 and stop.members["1:1"] == "1:1/1"
    assert cluster.state.offers > number, "what was offered before is not offered again"


def test_a_host_gets_empty_places_that_nobody_else_was_offered() -> None:
    cluster = Joins().lost()
    places = Reservations(Offered({"RECYCLE_SEED": "3"}))
    answer = free_places(cluster.state, places, 4, now=0.0)
    assert (answer.ranks, answer.size) == ((3,), 6)
    assert "others are about to join" in free_places(cluster.state, places, 4, now=1.0).refusal
    assert free_places(cluster.state, places, 4, now=1000.0).ranks == (3,)
    cluster.comes()
    refused = free_places(cluster.state, places, 1, now=1001.0)
    assert "no place" in refused.refusal and refused.again_s > 0
    places.taken("1:1")
    cluster.feed(inputs.Lost((inputs.Loss("1:1/1", FailureKind.EXIT),), cluster.now))
    assert free_places(cluster.state, places, 4, now=1002.0).ranks == (3,), "it came, and has gone again"
    assert "not started by `recycle run`" in free_places(cluster.state, None, 1, now=0.0).refusal


def test_a_host_whose_workers_have_failed_too_often_gets_no_place_and_others_do() -> None:
    cluster, unlimited = Joins().lost(), Joins().lost().state
    cluster.state = unlimited.with_(description=replace(unlimited.job, max_failures_per_host=2))
    places, failures = Reservations(Offered({})), {"n3": 2, "n4": 1}
    refused = free_places(cluster.state, places, 1, 0.0, "n3", failures)
    assert refused.refusal == "workers of n3 have failed in it too often (max_failures_per_host)"
    assert refused.again_s == 0 and not places.kept
    assert free_places(cluster.state, places, 1, 0.0, "n4", failures).ranks == (3,)
    assert not failed_too_often(unlimited, failures), "by default there is no limit"


def test_the_next_coordinator_keeps_the_places_that_were_promised() -> None:
    """The hosts to which they were say so, within the time that all need to find it; nobody is offered one before."""
    cluster = Joins().lost()
    places = Reservations(Offered({}), asked_from=6.0)
    answer = free_places(cluster.state, places, 1, now=1.0)
    assert answer.ranks == () and answer.again_s > 0 and "only just come" in answer.refusal
    promised_before(cluster.state, places, [2, 3], now=2.0)
    assert places.kept.keys() == {"1:1"}, "a rank that has a worker is not promised"
    assert "others are about to join" in free_places(cluster.state, places, 1, now=7.0).refusal
    places.taken("1:1")
    promised_before(cluster.state, places, [3], now=8.0)
    assert free_places(cluster.state, places, 1, now=9.0).ranks == (3,), "it comes back for no place of another's"
