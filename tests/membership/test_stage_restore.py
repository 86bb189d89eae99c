"""A lost stage that waits for its process, on paper. Whatever else happens meanwhile, every wait has a limit, and no
job ends while a process could still be started somewhere."""

from __future__ import annotations

from typing import Any

from megatron_recycle.membership import commands, inputs
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import state as st
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.protocol import Drop, Start
from megatron_recycle.membership.records import restore
from tests.membership.cluster import Cluster, endings, events, report, told

KEPT = {"iteration": 6, "holds": 5, "asked": 6, "guard": {"own": [3], "of": {"1": [3]}}}


class Waiting(Cluster):
    """3 x 2 workers, each pipeline on a host of its own, that have committed 5 and lost stage 1: 2:1 died last."""

    def __init__(self, parts: int = 1, reported: bool = True, **description: Any) -> None:
        super().__init__(3)
        if parts > 1:
            self.names = [f"{name}.{part}" for name in self.names for part in range(parts)]
            self.state = st.State(size=len(self.names))
        self.description = {"guard": "memory", "parts": parts, **description}
        self.limits: set[tuple[int, int]] = set()
        for name in self.names:
            self.hello(name)
        for name in self.names:
            self.ready(name, **self.description)
        self.plan(), self.resume_all(), self.commit_all(5)
        for name in [name for name in self.names if name[2] == "1" and not name.endswith(".1")]:
            if any(isinstance(one, do.MakePlan) for one in self.exit(name)):
                self.plan(), self.all_report(), self.resume_all()
        if reported:
            self.all_report()

    def member(self, name: str, life: int = 0, host: str | None = None) -> st.Member:
        return st.Member(**{**super().member(name, life).to_json(), "host": host or f"n{name[0]}/{name[0]}"})

    def feed(self, happened: Any, after: float = 0.01) -> list[do.Decision]:
        decisions = super().feed(happened, after)
        self.limits |= {(one.generation, one.move) for one in decisions if isinstance(one, do.AwaitPlace)}
        waits = self.state.phase is st.Phase.RECOVERING and {name[2] for name in self.state.members} == {"0"}
        if waits and self.state.closing is None:
            assert (self.state.generation, self.state.moving.move) in self.limits, "it would wait for ever"
        return decisions

    def all_report(self) -> list[do.Decision]:
        return self.reports(*(name for name in self.state.members if name not in self.state.arrivals.unproven), **KEPT)

    def comes(self, name: str, life: int, host: str | None = None) -> list[do.Decision]:
        return self.feed(inputs.Hello(self.member(name, life, host)))

    def is_ready(self, incarnation: str) -> list[do.Decision]:
        facts = self.state.job.told(next(iter(self.state.forming.models.values())))
        return self.feed(inputs.Ready(incarnation, facts, report(attempt=0)))

    def late(self) -> list[do.Decision]:
        return self.feed(inputs.PlaceLate(self.state.generation, self.state.moving.move))

    def ends_early(self, start: Start) -> list[do.Decision]:
        return self.feed(inputs.Exited(start.rank, 4711, 1, self.now, "log", start.move))


def started(decisions: list[do.Decision]) -> list[Start]:
    return [one.message for one in decisions if isinstance(one, do.Command) and isinstance(one.message, Start)]


def only(decisions: list[do.Decision]) -> Start:
    (start,) = started(decisions)
    return start


def last_start(cluster: Cluster) -> Start:
    return started(cluster.log)[-1]


def check_comes_back(cluster: Waiting, name: str, life: int, host: str | None = None) -> None:
    """This process comes, and all go on."""
    cluster.comes(name, life, host)
    (decided,) = events(cluster.is_ready(f"{name}/{life}"), "decided")
    assert decided["reason"] == "stage 1 comes back"
    cluster.plan()
    ((to, go),) = told(cluster.all_report(), "go")
    assert go.resume.restored == {"1": "0:0"} and to == {*cluster.state.members} and not endings(cluster.log)


def test_another_failure_meanwhile_leaves_the_process_on_its_way_and_the_wait_its_limit() -> None:
    cluster = Waiting()
    cluster.exit("1:0")
    assert not started(cluster.all_report()) and not endings(cluster.log), "one is on its way"
    assert only(cluster.late()).move == 2
    check_comes_back(cluster, "2:1", 1)


def test_another_failure_after_the_process_has_come_in_is_no_wait_for_ever() -> None:
    cluster = Waiting()
    cluster.comes("2:1", 1)
    cluster.is_ready("2:1/1")
    cluster.exit("1:0")
    assert "2:1" in cluster.state.arrivals.joiners, "it comes in again, if it says that it is ready"
    cluster.all_report()
    decisions = cluster.late()
    assert events(decisions, "join_failed") and only(decisions).rank == 5
    check_comes_back(cluster, "2:1", 2)


def test_a_process_that_does_not_come_in_time_is_replaced_on_another_host_until_three_have_failed() -> None:
    cluster = Waiting()
    first = last_start(cluster)
    second = only(decisions := cluster.late())
    assert do.Command(Drop(5, 1)) in decisions
    third = only(cluster.late())
    assert [one.move for one in (first, second, third)] == [1, 2, 3]
    assert (first.beside, len({one.beside for one in (first, second, third)})) == (5, 3)
    assert cluster.feed(inputs.PlaceLate(cluster.state.generation, 1)) == [], "the first one's limit is not the third's"
    (end,) = endings(cluster.late())
    assert end.again and "3 processes for it have failed, or were not ready in time" in end.message


def test_a_process_that_is_there_and_does_not_get_ready_is_replaced() -> None:
    cluster = Waiting()
    cluster.comes("2:1", 1)
    decisions = cluster.late()
    assert told(decisions, "end")[0][0] == {"2:1"} and only(decisions).move == 2
    check_comes_back(cluster, "2:1", 2)


def test_a_process_that_comes_before_all_have_reported_has_a_limit_too() -> None:
    cluster = Waiting(max_restarts=3, reported=False)
    cluster.comes("2:1", 1)
    cluster.all_report()
    assert not events(cluster.log, "restoring")
    cluster.late()
    assert not endings(cluster.log)
    check_comes_back(cluster, "2:1", 2)


def test_a_part_that_does_not_start_is_started_again() -> None:
    cluster = Waiting(parts=2)
    cluster.exit("2:1.1")  # it had no work without 2:1.0
    assert [(one.rank, one.move) for one in started(cluster.log)] == [(10, 1), (11, 2)]
    again = only(cluster.ends_early(last_start(cluster)))
    assert (again.rank, again.move) == (11, 3) and not endings(cluster.log)
    assert only(cluster.ends_early(again)).move == 4, "three of one part are two of it and one of the other"
    cluster.comes("2:1.0", 1), cluster.is_ready("2:1.0/1")
    check_comes_back(cluster, "2:1.1", 1)


def test_a_launcher_that_gives_up_is_not_waited_for() -> None:
    cluster = Waiting(max_restarts=3)
    assert not started(cluster.log) and events(cluster.log, "restoring"), "it is started again by itself"
    assert cluster.feed(inputs.Exited(5, 4711, 1, cluster.now, "log")) == [], "it tries once more"
    start = only(cluster.feed(inputs.StaysOut(5)))
    assert start.rank in (1, 3, 5) and start.beside in (0, 2, 4)
    check_comes_back(cluster, cluster.names[start.rank], 1)
    slow = Waiting(max_restarts=3)
    assert only(slow.late()).beside in (0, 2, 4)


def test_a_launcher_that_was_not_connected_hears_of_the_start_when_it_is_back() -> None:
    cluster = Waiting()
    in_force = [one.message for one in commands.in_force(cluster.state, "n2/2")]
    assert in_force[-1] == last_start(cluster) == Start(5, 5, 1005, 1)
    cluster.comes("2:1", 1)
    assert not started([*commands.in_force(cluster.state, "n2/2")])


def test_a_process_whose_host_is_lost_is_started_elsewhere() -> None:
    cluster = Waiting()
    cluster.declare(FailureKind.UNREACHABLE, "2:0/0")
    start = only(cluster.all_report())
    assert start.move == 2 and start.beside in (0, 2)
    check_comes_back(cluster, cluster.names[start.rank], 1)


def test_a_restarted_coordinator_starts_another_process_and_not_the_same_again() -> None:
    """A launcher would take the same number for a repeated command."""
    cluster = Waiting()
    assert last_start(cluster).move == 1
    cluster.state = restore(6, cluster.journal)
    cluster.feed(inputs.Restarted())
    cluster.feed(inputs.Hello(cluster.member("0:0"), 3))
    start = only(cluster.all_report())
    assert start.move == 2
    assert cluster.ends_early(Start(5, 5, 1005, 1)) == [], "launchers repeat what they have seen"
    check_comes_back(cluster, "2:1", 1)
