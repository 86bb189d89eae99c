"""A host explains a failure once, and failures are counted by host, also by the next coordinator."""

from __future__ import annotations

from typing import Any, cast

import pytest

from megatron_recycle.control.event_feed import EventFeed
from megatron_recycle.membership.inputs import FROM_LAUNCHER
from megatron_recycle.membership.protocol import Explains, WireError
from tests.membership.cluster import Cluster
from tests.observe.events_page import fault

CAUSE = "the link of eth0 is down"


class Launchers:
    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def tell_launchers(self, message: dict[str, Any]) -> None:
        self.told.append(message)


class Job:
    """A job that trains, and what is told of it."""

    def __init__(self, told: tuple[dict[str, Any], ...] = ()) -> None:
        self.state = Cluster().train().state
        self.events: list[dict[str, Any]] = []
        self.launchers = Launchers()
        self.telling = EventFeed(lambda event: self.events.append(dict(event)), cast(Any, self.launchers), told)

    def explain(self, pid: int = 1003) -> None:
        self.telling.explained(Explains(3, pid, (CAUSE,), "", "scontrol ..."), self.state)

    def lose(self, rank: int, generation: int, **fields: Any) -> None:
        member = next(one for one in self.state.members.values() if one.rank == rank)
        self.telling.event({"event": "suspected", "t": 1.0, "generation": generation, "iteration": 4, "kind": "exit",
                            "worker": member.worker, "rank": rank, "pid": member.pid, **fields}, self.state)


def test_a_launcher_that_repeats_itself_after_a_reconnect_is_passed_on_once():
    job = Job()
    job.explain()
    job.explain()
    job.explain(pid=99)  # of nobody
    (event,) = job.events
    assert (event["worker"], event["causes"], event["repair"]) == ("1:1", [CAUSE], "scontrol ...")
    assert "gpu" not in {name for name, value in event.items() if value is not None}
    assert fault({name: value for name, value in event.items() if value is not None}) is None
    assert len(job.launchers.told) == 1
    after = Job((event,))
    after.explain()
    assert not after.events, "the next coordinator does not tell it again"


def test_a_worker_that_tells_the_next_coordinator_that_its_script_has_ended_leaves_once():
    left = {"event": "left", "t": 1.0, "generation": 2, "worker": "1:1", "kind": "leave"}
    after = Job((left,))
    for event in (left, {**left, "worker": "1:0"}, {**left, "generation": 3}):
        after.telling.event(event, after.state)
    assert [(event["worker"], event["generation"]) for event in after.events] == [("1:0", 2), ("1:1", 3)]


def test_a_cause_that_is_no_text_is_refused():
    with pytest.raises(WireError, match="causes"):
        FROM_LAUNCHER.read({"type": "explains", "rank": 3, "pid": 1, "causes": [{}], "gpu": "", "repair": ""})


def test_workers_of_a_host_that_fail_together_count_once_and_one_that_stays_not_at_all():
    job = Job()
    job.lose(3, 1)
    job.lose(4, 1)
    job.lose(5, 1, removed=False)
    assert job.telling.failures == {"host": 1}
    job.lose(2, 2)
    assert job.telling.failures == {"host": 2}
    assert all(event["host"] for event in job.events)
    assert Job(tuple(job.events)).telling.failures == {"host": 2}, "the next coordinator knows it from the events"
