"""Stories of moves, on paper: 4 pipelines of 2 stages, two workers of stage 0 are out."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_recycle.membership import commands, inputs
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import state as st
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.open_positions import Offered, Reservations, free_places
from megatron_recycle.membership.records import restore
from tests.membership.cluster import Cluster, described, events, report, told

MOVER, TO = "1:1", "0:0"


class Moves(Cluster):
    def __init__(self, **settings: Any) -> None:
        super().__init__(pipelines=4)
        self.settings = {"moves": True, **settings}

    def describe(self) -> dict[str, Any]:
        return {"grid": self.grid, "block": 2, "reduction": "exact", **self.settings}

    def ready(self, name: str, **other: Any) -> list[do.Decision]:
        return self.feed(inputs.Ready(f"{name}/0", described(self.describe()), report(attempt=0)))

    def lost(self) -> list[do.Decision]:
        """0:0 and 1:0 have died; what was decided when training had resumed."""
        self.train()
        self.exit("0:0")
        self.exit("1:0")
        self.plan()
        self.reports(iteration=0)
        return self.resume_all()

    def moving(self) -> list[do.Decision]:
        self.lost()
        return self.found()

    def found(self) -> list[do.Decision]:
        return self.feed(inputs.MovesFound(self.state.generation, {MOVER: TO}))

    def comes(self, life: int = 1, host: str = "host") -> list[do.Decision]:
        """The process for the new position says hello and is ready."""
        told = self.member(TO, life)
        self.feed(inputs.Hello(st.Member(told.worker, told.rank, told.incarnation, told.pid, host)))
        return self.feed(inputs.Ready(told.incarnation, described(self.describe()), report(attempt=0)))

    def who(self) -> list[str]:
        return [member.incarnation for member in self.state.members.values()]

    def stand(self, iteration: int) -> list[do.Decision]:
        generation, decisions = self.state.generation, []
        for who in self.who():
            decisions += self.feed(inputs.Boundary(who, generation, iteration, self.now))
        return decisions

    def taken_in(self) -> list[do.Decision]:
        """The new process trains; iteration 7 is the first with it."""
        self.moving()
        self.comes()
        self.stand(7)
        self.plan()
        for who in self.who():
            if who != f"{TO}/1":
                self.feed(inputs.Reported(who, self.state.generation, report(iteration=6, holds=6, committed=6)))
        decisions = self.feed(inputs.Holds(f"{TO}/1", self.state.generation, inputs.Received(8, 1.0)))
        for who in self.who():
            decisions += self.feed(inputs.Resumed(who, self.state.generation, self.now))
        return decisions

    def commit(self, iteration: int) -> list[do.Decision]:
        decisions: list[do.Decision] = []
        for who in self.who():
            decisions += self.feed(inputs.Committed(who, self.state.generation, iteration, 2.5))
        return decisions


def searches(decisions: list[do.Decision]) -> list[do.FindMoves]:
    return [decision for decision in decisions if isinstance(decision, do.FindMoves)]


def test_the_planner_is_asked_once_the_recovery_is_over_and_only_where_moves_are_wanted() -> None:
    (search,) = searches(Moves().lost())
    assert search.failed == {"0:0", "1:0"}
    assert not searches(Moves(moves=False).lost())


def test_a_move_is_a_join_and_one_committed_iteration_later_a_leave() -> None:
    cluster = Moves()
    (event,) = events(cluster.moving(), "moving")
    assert (event["worker"], event["to"], event["rank"], event["to_rank"]) == (MOVER, TO, 3, 0)
    assert event["pid"] == cluster.member(MOVER).pid, "which launcher is to start it"
    cluster = Moves()
    (joined,) = events(cluster.taken_in(), "joined")
    assert joined["moved_from"] == MOVER
    assert MOVER in cluster.state.members and not cluster.state.round.switch, "no iteration has committed yet"
    ((to, offer),) = told(cluster.commit(7), "offer")
    assert MOVER in to and offer.plan is None
    decisions = cluster.stand(9)
    (left,) = events(decisions, "left")
    assert (left["worker"], left["kind"]) == (MOVER, "move") and not events(decisions, "suspected")
    ((to, end),) = told(decisions, "end")
    assert to == {MOVER} and end.status == 0 and "has moved" in end.message
    assert cluster.state.absent.out == {"1:0": "exit", MOVER: "move"} and not cluster.state.moving.moves


def test_of_two_moves_each_waits_for_its_own_process_and_none_is_sought_after_them() -> None:
    cluster = Moves()
    cluster.lost()
    cluster.feed(inputs.MovesFound(cluster.state.generation, {MOVER: TO, "0:1": "1:0"}))
    cluster.comes()
    assert not events(cluster.stand(7), "move_failed"), "one comes in, the other is not ready yet"
    cluster.plan()
    for who in cluster.who():
        if who != f"{TO}/1":
            cluster.feed(inputs.Reported(who, cluster.state.generation, report(iteration=6, holds=6, committed=6)))
    cluster.feed(inputs.Holds(f"{TO}/1", cluster.state.generation, inputs.Received(8, 1.0)))
    for who in cluster.who():
        cluster.feed(inputs.Resumed(who, cluster.state.generation, cluster.now))
    cluster.commit(7)
    assert [event["worker"] for event in events(cluster.stand(9), "left")] == [MOVER]
    assert cluster.state.moving.moves == {"1:0": "0:1/0"}
    cluster.feed(inputs.Exited(2, 4242, 1, cluster.now, "worker-2.log", move=1))
    cluster.plan()
    for who in cluster.who():
        cluster.feed(inputs.Reported(who, cluster.state.generation, report(iteration=8, holds=8, committed=8)))
    found = [search for who in cluster.who()
             for search in searches(cluster.feed(inputs.Resumed(who, cluster.state.generation, cluster.now)))]
    assert len(found) == 1, "the second has failed: another try"


def test_nothing_is_sought_after_a_move_until_something_else_happens() -> None:
    cluster = Moves()
    cluster.taken_in()
    cluster.commit(7)
    cluster.stand(9)
    for name in ("", "3:0"):
        if name:
            cluster.exit(name)
        cluster.plan()
        for who in cluster.who():
            cluster.feed(inputs.Reported(who, cluster.state.generation, report(iteration=8, holds=8, committed=8)))
        found = [search for who in cluster.who()
                 for search in searches(cluster.feed(inputs.Resumed(who, cluster.state.generation, cluster.now)))]
        assert len(found) == bool(name)


def test_a_process_that_ends_before_its_hello_ends_the_move_and_there_is_no_other_in_this_generation() -> None:
    cluster = Moves()
    cluster.moving()
    (failed,) = events(cluster.feed(inputs.Exited(0, 4242, 1, cluster.now, "worker-0.log", move=1)), "move_failed")
    assert failed["reason"] == "its process ended with status 1; see worker-0.log"
    assert cluster.state.generation == 3 and MOVER in cluster.state.members and not cluster.state.moving.moves


def test_after_three_processes_in_a_row_have_failed_nothing_is_moved_any_more() -> None:
    cluster = Moves()
    cluster.moving()
    for life in (1, 2, 3):
        assert cluster.state.moving.moves or events(cluster.found(), "moving")
        cluster.hello(TO, life)
        assert events(cluster.declare(FailureKind.EXIT, f"{TO}/{life}"), "move_failed")
    assert not cluster.found()


@pytest.mark.parametrize("how", ["failure", "leave"])
def test_a_change_before_the_process_is_in_ends_the_move_and_the_process(how: str) -> None:
    cluster = Moves()
    cluster.moving()
    cluster.comes()
    decisions = cluster.exit("3:0") if how == "failure" else cluster.feed(inputs.Leave(f"{MOVER}/0"))
    (failed,) = events(decisions, "move_failed")
    assert failed["reason"] in ("the membership has changed", "the worker was asked to leave")
    assert [(to, end.status) for to, end in told(decisions, "end") if TO in to] == [({TO}, 1)]
    assert not cluster.state.arrivals.joiners and not cluster.state.moving.moves


def test_when_the_mover_fails_its_process_comes_in_as_any_other() -> None:
    cluster = Moves()
    cluster.moving()
    cluster.comes()
    decisions = cluster.exit(MOVER)
    assert not events(decisions, "move_failed") and not cluster.state.moving.moves
    assert TO in cluster.state.arrivals.joiners


def test_the_process_fails_once_it_is_in_and_the_mover_stays() -> None:
    cluster = Moves()
    cluster.taken_in()
    cluster.commit(7)
    decisions = cluster.declare(FailureKind.EXIT, f"{TO}/1")
    assert events(decisions, "move_failed") and MOVER in cluster.state.members
    cluster.plan()
    cluster.reports(*list(cluster.state.members), iteration=8, holds=7, committed=7)
    assert not told(cluster.resume_all(), "offer"), "nobody is to go"


def test_the_last_of_its_stage_stays_though_its_new_process_is_in() -> None:
    cluster = Moves()
    cluster.taken_in()
    for name in ("0:1", "2:1", "3:1"):
        cluster.exit(name)
    cluster.plan()
    for who in cluster.who():
        cluster.feed(inputs.Reported(who, cluster.state.generation, report(iteration=7, holds=6, committed=6)))
    for who in cluster.who():
        cluster.feed(inputs.Resumed(who, cluster.state.generation, cluster.now))
    assert not told(cluster.commit(7), "offer") and MOVER in cluster.state.members


def test_a_process_of_another_host_that_came_first_ends_the_move_and_is_taken_in() -> None:
    cluster = Moves()
    cluster.moving()
    cluster.comes(host="other")
    assert not cluster.state.moving.moves and TO in cluster.state.arrivals.joiners and cluster.state.round.switch


def test_the_position_is_offered_to_no_host() -> None:
    cluster = Moves()
    cluster.moving()
    places = Reservations(Offered({}))
    assert free_places(cluster.state, places, 4, now=0.0).ranks == (cluster.names.index("1:0"),)


def test_no_move_while_a_launcher_will_start_the_dead_again() -> None:
    cluster = Moves(max_restarts=2)
    assert not searches(cluster.lost()) and not cluster.found()
    assert not searches(cluster.feed(inputs.StaysOut(0)))
    assert searches(cluster.feed(inputs.StaysOut(2))), "both stay out"
    assert events(cluster.found(), "moving")


def come_back(cluster: Moves) -> None:
    """The coordinator has died, and another has read its journal."""
    cluster.state = restore(8, cluster.journal)
    cluster.feed(inputs.Restarted())


def return_all(cluster: Moves) -> list[do.Decision]:
    generation = cluster.state.generation
    return [decision for name in [*cluster.state.members]
            for decision in cluster.feed(inputs.Hello(cluster.member(name), generation))]


def test_a_launcher_that_gives_a_rank_up_says_so_before_the_recovery_is_over() -> None:
    cluster = Moves(max_restarts=1)
    cluster.train()
    cluster.exit("0:0")
    cluster.feed(inputs.StaysOut(0))
    cluster.exit("1:0")
    cluster.feed(inputs.StaysOut(2))
    cluster.plan()
    cluster.reports(iteration=0)
    assert searches(cluster.resume_all())


def test_the_ends_of_earlier_processes_of_the_rank_are_told_again_and_do_not_end_the_move() -> None:
    cluster = Moves()
    cluster.moving()
    come_back(cluster)
    for pid in (cluster.member(TO).pid, 4241):
        assert not events(cluster.feed(inputs.Exited(0, pid, -9, 50.0)), "move_failed")
    return_all(cluster)
    assert events(cluster.feed(inputs.Exited(0, 4242, 1, 50.0, move=1)), "move_failed")
    cluster.found()
    assert not events(cluster.feed(inputs.Exited(0, 4242, 1, 50.0, move=1)), "move_failed"), "that was the one before"
    assert cluster.state.moving.fruitless == 1 and cluster.state.moving.moves


def test_a_coordinator_that_comes_back_knows_who_stays_out_and_how_often_moves_have_failed() -> None:
    cluster = Moves(max_restarts=1)
    cluster.lost()
    cluster.feed(inputs.StaysOut(0))
    come_back(cluster)
    cluster.feed(inputs.StaysOut(2))
    assert searches(return_all(cluster)), "nobody asks later"
    cluster.found()
    cluster.feed(inputs.Exited(0, 4242, 1, cluster.now, move=1))
    come_back(cluster)
    return_all(cluster)
    assert (cluster.state.moving.fruitless, cluster.state.moving.move) == (1, 1)
    assert cluster.state.absent.given_up == {"0:0", "1:0"}
    cluster.found()
    assert cluster.state.moving.move == 2


def test_a_coordinator_that_comes_back_knows_of_the_move_and_tells_the_launchers_again() -> None:
    cluster = Moves()
    (begun,) = (one for one in cluster.moving() if isinstance(one, do.Command))
    assert begun.message.type == "start"
    come_back(cluster)
    assert commands.in_force(cluster.state, "another host")[-1] == begun
    return_all(cluster)
    assert told(cluster.comes(), "offer") and cluster.state.moving.moves == {TO: f"{MOVER}/0"}
