"""Who is slow, from what the workers have measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle.control.planning import Planning
from megatron_recycle.control.profiles import Conclusions, Profiles, Slowness
from megatron_recycle.membership.description import Job
from megatron_recycle.membership.protocol import Measured
from megatron_recycle.membership.state import Member, State
from megatron_recycle.membership.worker_events import RolledBack
from megatron_recycle.plan import Worker
from tests.membership.cluster import report
from tests.membership.service import DESCRIPTION, agent, service
from tests.membership.test_agent import NAMES

JOB = Job.of(DESCRIPTION, ())
MEMBERS = {name: f"{name}/0" for name in NAMES}


def profile(worker: str, factor: float = 1.0, times: int = 3) -> dict[str, Any]:
    took = {"F": 0.02 * factor, "B": 0.022 * factor, "W": 0.018 * factor}
    return {"worker": worker, "iterations": [took] * times, "t": 1.0, "generation": 1}


def test_a_slow_worker_is_news_once_until_it_is_well_again() -> None:
    slowness = Slowness()
    assert [slowness.news(slow, MEMBERS) for slow in ({}, {"1:0": 1.5}, {"1:0": 1.6}, {}, {"1:0": 1.7})] == [
        {}, {"1:0": 1.5}, {}, {}, {"1:0": 1.7}]
    again = {**MEMBERS, "1:0": "1:0/1"}
    assert slowness.news({"1:0": 1.5, "9:0": 2.0}, again) == {"1:0": 1.5}, "another process, and no member"


def test_a_worker_is_compared_with_its_peers_once_all_have_been_heard() -> None:
    planning = Planning()
    planning.plan(JOB, frozenset())
    # All of stage 1 take five times as long as stage 0; 2:0 takes twice as long as its peers.
    for name in NAMES:
        assert not planning.slow
        found = planning.measured(profile(name, {"2:0": 2.0}.get(name, 5.0 if name[2] == "1" else 1.0)), MEMBERS[name])
    assert planning.slow == {"2:0": pytest.approx(2.0)}
    assert found is not None and found.costs.speed == {Worker(2, 0): 2.0} and found.costs.forward == (20000, 100000)


def test_who_came_in_anew_is_not_judged_by_what_its_predecessor_was() -> None:
    planning = Planning()
    planning.plan(JOB, frozenset())
    for name in NAMES:
        planning.measured(profile(name, 9.0 if name == "1:0" else 1.0), MEMBERS[name])
    assert set(planning.slow) == {"1:0"}
    *_, known = [planning.measured(profile(name), "another" if name == "1:0" else MEMBERS[name]) for name in NAMES]
    assert not planning.slow and known is not None and not known.costs.speed


def test_a_worker_that_becomes_slow_changes_the_costs_after_three_iterations() -> None:
    planning = Planning()
    planning.plan(JOB, frozenset())

    def iteration(factor: float, times: int = 1) -> Any:
        *_, found = [planning.measured(profile(name, factor if name == "2:0" else 1.0, times)) for name in NAMES]
        return found

    first = iteration(1.0, 3)
    assert first is not None and not first.costs.speed
    assert [iteration(factor) for factor in (1.02, 0.97, 1.5, 1.5)] == [None] * 4
    slow = iteration(1.5)
    assert slow is not None and slow.costs.speed == {Worker(2, 0): 1.5}
    assert [iteration(factor) for factor in (1.5, 1.45, 1.55, 1.5)] == [None] * 4


def told(factor: float = 1.0) -> Measured:
    """A worker's `measured` message."""
    return Measured(tuple(profile("0:0", factor)["iterations"]), (), None)


def test_who_takes_the_place_of_a_slow_worker_is_not_removed_for_it() -> None:
    planning = Planning()
    planning.plan(JOB, frozenset())
    members = {name: Member(name, rank, f"{name}/0", 1000 + rank, "host") for rank, name in enumerate(NAMES)}
    state = State(size=6, generation=1, description=replace(JOB, slow_factor_out=3.0),
                  members=members).with_(committed=5)
    profiles = Profiles(planning)
    found = [profiles.take(state, members[name], told(9.0 if name == "1:0" else 1.0)) for name in NAMES]
    assert [one.out for one in found] == [()] * 5 + [("1:0",)]
    del members["1:0"]
    assert not profiles.take(state, members["0:0"], told()).out
    members["1:0"] = Member("1:0", 2, "1:0/1", 2002, "host")
    assert not any(profiles.take(state, members[name], told()).out for name in (*NAMES[:2], "1:0", *NAMES))


@pytest.mark.parametrize("limit", [0, 3])
def test_a_slow_worker_is_reported_and_removed_only_if_the_user_asks(limit: float, tmp_path: Path) -> None:
    planning = Planning()
    planning.plan(JOB, frozenset())
    with service(tmp_path, measure=Profiles(planning).take) as running:
        agents = {name: agent(running.address, name) for name in NAMES}
        for one in agents.values():
            one.ready(replace(DESCRIPTION, slow_factor_out=limit), report(attempt=0))
        running.await_event("started")
        for name, one in agents.items():
            one.measured(told(4.0 if name == "2:1" else 1.0).iterations, (), None)
        running.await_event("suspected" if limit else "slow", worker="2:1")
        assert running.await_event("profiled")["costs"]
        assert running.coordinator.state.failed == (frozenset({"2:1"}) if limit else frozenset())
        for one in agents.values():
            one.close()


def test_measurements_that_cannot_be_used_cost_nobody_the_connection(tmp_path: Path) -> None:
    def unusable(state: State, member: Member, message: Measured) -> Conclusions | None:
        raise ArithmeticError(f"{member.worker} has measured nonsense")

    with service(tmp_path, measure=unusable) as running:
        agents = {name: agent(running.address, name) for name in NAMES}
        for one in agents.values():
            one.ready(DESCRIPTION, report(attempt=0))
        running.await_event("started")
        workers = running.coordinator.server.workers
        connection = workers["2:1/0"]
        agents["2:1"].measured(told().iterations, (), None)
        agents["2:1"].event(RolledBack(iteration=1, actions=0))
        running.await_event("rolled_back", worker="2:1")
        assert workers["2:1/0"] is connection
        for one in agents.values():
            one.close()
