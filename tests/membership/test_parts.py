"""Workers of several processes (tensor parallelism): lost as a whole when one part is, the other parts idle."""

from __future__ import annotations

import pytest

from megatron_recycle.control.wire import WireError
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import FROM_WORKER
from megatron_recycle.membership.names import Process, in_order, siblings, workers_of
from megatron_recycle.membership.open_positions import Offered, Reservations, free_places
from megatron_recycle.membership.records import restore
from megatron_recycle.membership.resume import DeadEnd, Resume, decide
from megatron_recycle.plan import Worker
from tests.membership.cluster import Cluster, described, endings, events, report, told


class Parts(Cluster):
    """2 x 2 workers of two processes each."""

    def __init__(self) -> None:
        super().__init__(pipelines=2, stages=2)
        self.names = [f"{worker}.{part}" for worker in self.names for part in range(2)]
        self.state = st.State(size=len(self.names))

    def train(self) -> Parts:
        for name in self.names:
            self.hello(name)
        for name in self.names:
            self.ready(name, parts=2)
        self.plan()
        self.resume_all()
        assert self.state.phase is st.Phase.TRAINING
        return self


def test_names() -> None:
    assert Process.parse("10:2.1") == Process(Worker(10, 2), 1) and str(Process(Worker(10, 2), 1)) == "10:2.1"
    assert Process.parse("1:2") == Process(Worker(1, 2)) and str(Process(Worker(1, 2))) == "1:2"
    assert in_order(["1:0.0", "0:1.1", "0:1.0"]) == ["0:1.0", "0:1.1", "1:0.0"]
    assert workers_of(["0:1.1", "0:1.0", "0:0.1"]) == [Worker(0, 0), Worker(0, 1)]
    assert siblings(["0:1.0", "0:1.1", "1:1.0"], ["0:1.1"]) == ["0:1.0"]


@pytest.mark.parametrize("name", ["1:2.", "1:2.x", "1:2.01", "1.2", ".1"])
def test_other_names_are_refused_at_the_door(name) -> None:
    hello = {"worker": name, "rank": 0, "incarnation": "a", "pid": 1, "host": "h", "generation": 0}
    with pytest.raises(WireError):
        FROM_WORKER.read({"type": "hello", **hello})


def test_a_wrong_number_of_parts_is_told() -> None:
    cluster = Parts()
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names[:-1]:
        cluster.ready(name, parts=4)
    (end,) = endings(cluster.ready(cluster.names[-1], parts=4))
    assert "x 4 parts" in end.message and "start 16 processes" in end.message


def test_one_lost_part_takes_its_worker_out_and_the_other_part_is_told_to_idle() -> None:
    cluster = Parts().train()
    decisions = cluster.exit("0:1.1")
    ((to, stop),) = told(decisions, "stop")
    assert to == set(cluster.names) - {"0:1.1"}
    assert set(stop.members) == to - {"0:1.0"}
    assert stop.out == {"0:1.1": "exit", "0:1.0": "stranded"}
    assert do.MakePlan(2, frozenset({"0:1"})) in decisions
    assert [event["worker"] for event in events(decisions, "suspected")] == ["0:1.1"]
    ((to, _),) = told(decisions, "end")
    assert to == {"0:1.1"}
    assert set(cluster.state.absent.stranded) == {"0:1.0"}
    cluster.plan()
    ((to, _),) = told(cluster.reports(), "go")
    assert to == set(stop.members)
    (resumed,) = events(cluster.resume_all(), "resumed")
    assert resumed["survivors"] == 3
    # What it says counts for nothing, and it is told how the job ends.
    before = cluster.state
    assert cluster.feed(inputs.Reported("0:1.0/0", 2, report())) == [] and cluster.state is before
    for name in stop.members:
        decisions = cluster.feed(inputs.Finished(f"{name}/0", 2))
    ((to, end),) = told(decisions, "end")
    assert end.status == 0 and to == {*stop.members, "0:1.0"}


def test_both_parts_lost_at_once_are_one_decision_without_a_stranded() -> None:
    cluster = Parts().train()
    lost = tuple(inputs.Loss(f"0:1.{part}/0", FailureKind.FROZEN) for part in range(2))
    decisions = cluster.feed(inputs.Lost(lost, cluster.now))
    ((_, stop),) = told(decisions, "stop")
    assert stop.out == {"0:1.0": "frozen", "0:1.1": "frozen"} and not cluster.state.absent.stranded


def test_a_stranded_that_ends_disturbs_nobody_but_is_known_to_have_failed() -> None:
    cluster = Parts().train()
    cluster.exit("0:1.1")
    command, emitted = cluster.exit("0:1.0")
    assert isinstance(command, do.Command) and command.message.type == "out"
    assert isinstance(emitted, do.Emit) and emitted.event["event"] == "suspected" and emitted.event["stranded"]
    assert cluster.state.generation == 2 and not cluster.state.absent.stranded


def test_a_stranded_that_comes_back_to_another_coordinator_idles_on() -> None:
    cluster = Parts().train()
    cluster.exit("0:1.1")
    cluster.state = restore(8, cluster.journal)
    ((to, stop),) = told(cluster.hello("0:1.0"), "stop")
    assert to == {"0:1.0"} and "0:1.0" not in stop.members


def test_a_stage_without_a_whole_worker_ends_the_job() -> None:
    cluster = Parts().train()
    cluster.exit("0:1.1")
    (end,) = endings(cluster.exit("1:1.0"))
    assert end.status == 1 and "stage 1 has lost its last worker" in end.message


def test_a_stage_holds_only_what_each_part_holds() -> None:
    reports = {f"{d}:{s}.{p}": report(iteration=5, holds=4, actions=3) for d in (0, 1) for s in (0, 1) for p in (0, 1)}
    for name in ("0:0.0", "0:0.1", "1:1.0", "0:1.1"):
        reports[name] = report(iteration=5, holds=5, stepped=4, actions=8)
    members = dict.fromkeys(reports, "x")
    assert decide(2, members, reports) == Resume(
        5, 6, 1, None, {"1:0.0": "0:0.0", "1:0.1": "0:0.1", "0:1.0": "1:1.0", "1:1.1": "0:1.1"})
    reports["0:1.1"] = report(iteration=5, holds=4, actions=3)  # part 1 of stage 1 is held nowhere
    resume = decide(2, members, reports)
    assert isinstance(resume, Resume) and (resume.target, resume.next) == (4, 5)
    assert resume.redone == 8 + 3 + 3 + 8
    for name in reports:
        if name.endswith(".0"):
            reports[name] = report(iteration=7, holds=6, stepped=6)
    stop = decide(2, members, reports)
    assert isinstance(stop, DeadEnd) and "stage 1 holds nothing newer than iteration 4" in stop.message


# ---- coming back

DESCRIPTION = {"grid": {"stages": 2, "microbatches": [4, 4]}, "block": 2, "reduction": "exact", "parts": 2}


def says_ready(cluster: Parts, incarnation: str) -> list[do.Decision]:
    return cluster.feed(inputs.Ready(incarnation, described(DESCRIPTION), report(attempt=0)))


def without_a_part() -> Parts:
    """0:1.1 has died, 0:1.0 idles, the others train on."""
    cluster = Parts().train()
    cluster.exit("0:1.1")
    recover(cluster, 1)
    assert says_ready(cluster, "0:1.0/0") == []
    return cluster


def recover(cluster: Parts, iteration: int) -> None:
    generation = cluster.state.generation
    for member in list(cluster.state.proven.values()):
        cluster.feed(inputs.Reported(member.incarnation, generation, report(iteration=iteration, holds=iteration - 1)))
    cluster.plan()
    for member in list(cluster.state.proven.values()):
        cluster.feed(inputs.Resumed(member.incarnation, generation, cluster.now))


def taken_in() -> Parts:
    """Both parts of 0:1 are members again, with no state yet."""
    cluster = without_a_part()
    cluster.hello("0:1.1", life=1)
    assert not cluster.state.round.switch
    says_ready(cluster, "0:1.1/1")
    assert cluster.state.round.switch
    for member in list(cluster.state.members.values()):
        cluster.feed(inputs.Boundary(member.incarnation, cluster.state.generation, 3, cluster.now))
    recover(cluster, 3)
    assert cluster.state.arrivals.unproven == {"0:1.0": "stranded", "0:1.1": "exit"}
    return cluster


def acknowledges(cluster: Parts, incarnation: str) -> list[do.Decision]:
    return cluster.feed(inputs.Holds(incarnation, cluster.state.generation, inputs.Received(4000, 2.0)))


def test_a_new_part_and_the_spare_come_in_together() -> None:
    cluster = taken_in()
    assert not cluster.state.absent.stranded and not cluster.state.arrivals.joiners and not cluster.state.absent.out
    assert set(cluster.state.members) == set(cluster.names)
    acknowledges(cluster, "0:1.0/0")
    acknowledges(cluster, "0:1.1/1")
    assert not cluster.state.arrivals.unproven and not cluster.state.round.acknowledged
    assert [event["worker"] for event in events(cluster.log, "joined")] == ["0:1.0", "0:1.1"]
    cluster.exit("1:1.0")
    assert cluster.state.phase is st.Phase.RECOVERING and set(cluster.state.absent.stranded) == {"1:1.1"}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_part_alone_is_no_copy_of_its_stage(restarted: bool) -> None:
    cluster = taken_in()
    acknowledges(cluster, "0:1.1/1")
    if restarted:
        cluster.state = restore(8, cluster.journal)
        assert cluster.state.round.acknowledged == {"0:1.1"}
        assert set(cluster.state.arrivals.unproven) == {"0:1.0", "0:1.1"}
    (end,) = endings(cluster.exit("1:1.0"))
    assert "stage 1 has lost its last worker" in end.message


def test_a_part_that_dies_before_it_has_its_state_leaves_the_other_a_stranded_again() -> None:
    cluster = taken_in()
    acknowledges(cluster, "0:1.0/0")
    member = cluster.state.members["0:1.1"]
    cluster.feed(inputs.Exited(member.rank, member.pid, -9, cluster.now))
    assert set(cluster.state.absent.stranded) == {"0:1.0"}
    assert cluster.state.absent.out == {"0:1.1": "exit", "0:1.0": "stranded"}
    assert not cluster.state.arrivals.unproven and not endings(cluster.log)
    recover(cluster, 3)
    says_ready(cluster, "0:1.0/0")
    cluster.hello("0:1.1", life=2)
    says_ready(cluster, "0:1.1/2")
    assert cluster.state.round.switch


def test_a_failure_elsewhere_sends_both_parts_back_to_wait() -> None:
    cluster = taken_in()
    acknowledges(cluster, "0:1.0/0")
    cluster.exit("1:0.0")
    assert set(cluster.state.arrivals.joiners) == {"0:1.0", "0:1.1"} and set(cluster.state.absent.stranded) == {"1:0.1"}
    recover(cluster, 3)
    assert not cluster.state.round.switch
    says_ready(cluster, "0:1.0/0")
    says_ready(cluster, "0:1.1/1")
    assert cluster.state.round.switch


def test_a_stranded_keeps_its_place_until_it_is_silent() -> None:
    cluster = without_a_part()
    ((_, refusal),) = told(cluster.hello("0:1.0", life=1), "end")
    assert "another process" in refusal.message
    places = Reservations(Offered({}))
    assert free_places(cluster.state, places, 8, cluster.now).ranks == (cluster.names.index("0:1.1"),)
    decisions = cluster.feed(inputs.Lost((inputs.Loss("0:1.0/0", FailureKind.FROZEN),), cluster.now))
    assert told(decisions, "end") and events(decisions, "suspected")[0]["kind"] == "frozen"
    assert not cluster.state.absent.stranded and cluster.state.phase is st.Phase.TRAINING
    for name in ("0:1.0", "0:1.1"):
        cluster.hello(name, life=2)
        assert not cluster.state.round.switch
        says_ready(cluster, f"{name}/2")
    assert cluster.state.round.switch
