"""Who is slow, from what the workers have measured."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.launch.planning import Planning
from megatron_recycle.launch.slowness import Profiles, Slowness
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.profiling import notable
from tests.membership.cluster import report
from tests.membership.service import DESCRIPTION, agent, service
from tests.membership.test_agent import NAMES

MEMBERS = {name: f"{name}/0" for name in NAMES}


def profile(worker: str, factor: float = 1.0, early: bool = False) -> dict[str, Any]:
    return {"worker": worker, "F": 0.02 * factor, "B": 0.022 * factor, "W": 0.018 * factor, "early": early,
            "t": 1.0, "generation": 1}


def test_a_worker_is_compared_with_its_peers_and_not_with_itself() -> None:
    slowness = Slowness()
    assert slowness.take(profile("0:0"), MEMBERS) is None, "nobody to compare with"
    assert slowness.take(profile("0:1", 5.0), MEMBERS) is None, "another stage"
    assert slowness.take(profile("1:0", 2.0), MEMBERS) == pytest.approx(2.0)
    assert slowness.take(profile("2:0", 2.0), MEMBERS) == pytest.approx(4 / 3)


def test_who_came_in_anew_is_not_judged_by_what_its_predecessor_was() -> None:
    slowness = Slowness()
    slowness.take(profile("1:0", 9.0), MEMBERS)
    slowness.take(profile("0:0"), MEMBERS)
    again = {**MEMBERS, "1:0": "1:0/1"}
    assert slowness.take(profile("2:0"), again) == pytest.approx(1.0)
    assert slowness.take(profile("9:0"), again) is None, "no member"


def test_a_slow_worker_is_news_once_until_it_is_well_again() -> None:
    slowness = Slowness()
    assert [slowness.news("1:0", "a", factor) for factor in (1.2, 1.5, 1.6, 1.1, 1.5)] == [
        False, True, False, False, True]
    assert slowness.news("1:0", "b", 1.5), "another process"


def test_a_change_is_notable_from_a_quarter_of_a_micro_batch_on() -> None:
    told = {"F": 0.02, "B": 0.02, "W": 0.02, "step": 1.0}
    assert not notable(told, {**told, "F": 0.034, "step": 9.0})
    assert notable(told, {**told, "F": 0.036})
    assert notable(told, dict.fromkeys("FBW", 0.01))
    assert not notable({}, told)


def test_an_early_profile_is_taken_up_before_the_others_are_heard_again() -> None:
    planning = Planning()
    planning.plan({**DESCRIPTION, "planner_budget": 0}, frozenset())
    assert planning.measured(profile("2:0", 4.0, early=True)) is None, "nobody knows how long the others take"
    *_, found = [planning.measured(profile(name)) for name in NAMES]
    assert found is not None and not found.costs.speed
    slow = planning.measured(profile("2:0", 4.0, early=True))
    assert slow is not None and slow.costs.speed == {Worker(2, 0): 4.0}


@pytest.mark.parametrize("limit", [0, 3])
def test_a_slow_worker_is_reported_and_removed_only_if_the_user_asks(limit: float, tmp_path: Path) -> None:
    with service(tmp_path) as running:
        profiles = Profiles(Planning(), running.coordinator, running._emit)
        agents = {name: agent(running.address, name) for name in NAMES}
        for one in agents.values():
            one.ready({**DESCRIPTION, "slow_factor_out": limit}, report(attempt=0))
        running.await_event("started")
        taken = threading.Event()
        for name in NAMES:
            running.call(profiles.take, profile(name, 4.0 if name == "2:1" else 1.0))
        running.call(taken.set)
        running.await_event("suspected" if limit else "slow", worker="2:1")
        assert taken.wait(20)
        assert running.coordinator.state.failed == (frozenset({"2:1"}) if limit else frozenset())
        for one in agents.values():
            one.close()
