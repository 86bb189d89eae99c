"""Workers say events, from a table. Who is no member is not heard, and the coordinator's own names are nobody's: the
record of a job and the lines of its launchers cannot be forged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron_recycle.control import Journal, event_feed, process
from megatron_recycle.control.coordinator_spec import CoordinatorSpec
from megatron_recycle.control.wire import GUEST, WireError
from megatron_recycle.launch import summary
from megatron_recycle.membership import inputs
from megatron_recycle.membership.description import Job
from megatron_recycle.membership.detectors import RateLimit
from megatron_recycle.membership.inputs import FROM_WORKER
from megatron_recycle.membership.protocol import EventTold
from megatron_recycle.membership.worker_events import RolledBack, WorkerEvent
from tests.membership.cluster import Cluster, events, report
from tests.membership.service import DESCRIPTION, TOKEN, agent, service
from tests.membership.test_guests import SECRET, WORKERS, visit

SHOWN = {*summary._SHOWN, *summary._AGAIN, "last_copy", "last_host", "planned", "committed", "left"}
OWN = sorted({*SHOWN, *event_feed._KEPT} - {"save_failed"})
"""The coordinator's own events that a launcher makes something of."""
WRONG: list[Any] = [{}, {"iteration": "x", "rank": "x", "pid": {}, "stages": 7, "hosts": 1, "ranks": [], "ms": "x"},
                    {"error": 1, "pid": [], "rank": []}]
RIGHT: dict[str, dict[str, Any]] = {
    "corrupt": {"iteration": 3, "digests": {"0:0": "0f", "1:0": "10"}},
    "guarded": {"iteration": 3, "stages": [0, 1], "bytes": 7, "ms": 1.5},
    "healed": {"iteration": 3, "bytes": 7, "ms": 2, "shards": [1]},
    "rebuilt": {"generation": 1, "ms": 1.5},
    "refuses_itself": {"reason": "it reads other data"},
    "rolled_back": {"iteration": 3, "actions": 5},
    "save_failed": {"iteration": 3, "error": "no space left", "workers": 2},
}


EVENTS = {str(each.__struct_config__.tag): each for each in get_args(WorkerEvent)}


def said(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "event", "said": {**fields, "event": name}}


def test_a_worker_says_what_is_in_the_table_and_no_name_of_the_coordinators() -> None:
    assert not EVENTS.keys() & {*OWN} - {"healed"} and RIGHT.keys() == EVENTS.keys()
    for name, fields in RIGHT.items():
        assert FROM_WORKER.read(said(name, fields))
        for wrong in ({}, {**fields, "t": 1.0}, {**fields, "x": "x"}, {**fields, next(iter(fields)): None},
                      {**fields, next(iter(fields)): True}):
            with pytest.raises(WireError):
                FROM_WORKER.read(said(name, wrong))
    for name in OWN:
        for fields in (*WRONG, *RIGHT.values()):
            with pytest.raises(WireError, match="said"):
                FROM_WORKER.read(said(name, fields))
    for deep in ({"0:0": []}, {"0:0": {}}, {"0:0": None}):
        with pytest.raises(WireError, match="digests"):
            FROM_WORKER.read(said("corrupt", {"iteration": 3, "digests": deep}))


def test_a_launcher_survives_whatever_it_is_to_show(caplog: pytest.LogCaptureFixture) -> None:
    shown = summary.Summary()
    for event in ({}, {"event": []}, *({"event": name, **fields} for name in OWN for fields in WRONG)):
        line = shown.add(event)
        assert line is None or isinstance(line, str)
        shown.rank_of(event)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1, "the log is not filled"
    summary.print_table(shown, [(0, 10, "status 0")], "the end")


def test_words_of_guests_and_outsiders_are_not_recorded_and_nobody_hears_them(tmp_path: Path) -> None:
    """Each forged name ends its own connection, and nothing else."""
    outsider = {"role": "worker", "host": "far", "generation": 0}
    with service(tmp_path) as running:
        agents = [agent(running.address, worker) for worker in WORKERS]
        for one in agents:
            one.ready(DESCRIPTION, report())
        running.await_event("started")
        told: list[Any] = []
        running.coordinator.server.tell_launchers = told.append  # type: ignore[method-assign]
        for secret, life, worker, rank in ((SECRET, f"{GUEST}1", "1:0", 2), (TOKEN, "stranger", "2:0", 4)):
            hello = {**outsider, "incarnation": life, "worker": worker, "rank": rank, "pid": 77}
            right = [said(name, fields) for name, fields in RIGHT.items()]
            ready, hint = inputs.Ready(life, DESCRIPTION, report()), inputs.Hinted(life, 1, "forged")
            with visit(running, secret, hello, ready, *right, hint, said("committed", {}), worker=True):
                running.await_event("waiting", worker=worker, pid=77)
                assert "Invalid value 'committed'" in running.await_event("refused")["reason"]
            with running._changed:
                running.events.clear()
                running.coordinator.server._refusals = RateLimit(60.0)
        for name, fields in RIGHT.items():  # at the coordinator's own door, behind the check
            forged = EVENTS[name].from_json({**fields, "event": name})
            running.call(running.coordinator._event_feed.passed_on, "stranger", forged, running.coordinator.state)
        agents[0].event(RolledBack(1, 2))
        running.await_event("rolled_back", worker="0:0")
        assert {event["event"] for event in running.events} <= {"rolled_back", "refused"}
        names = {message.event["event"] for message in told if isinstance(message, EventTold)}
        assert names <= {"planned", "waiting", "rolled_back"}
        for one in agents:
            one.close()


def test_a_member_s_words_are_recorded_under_its_own_name(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        agents = [agent(running.address, worker) for worker in WORKERS]
        for one in agents:
            one.ready(DESCRIPTION, report())
        running.await_event("started")
        for name, fields in RIGHT.items():
            agents[3].event(EVENTS[name].from_json({**fields, "event": name}))
        failed = running.await_event("join_failed")
        assert (failed["worker"], failed["rank"], failed["pid"]) == ("1:1", 3, 1003)
        odd = running.await_event("suspected")
        assert (odd["worker"], odd["kind"], odd["removed"], odd["pid"]) == ("1:1", "corrupt", False, 1003)
        assert running.await_event("healed")["kind"] == "corrupt"
        for one in agents:
            one.close()


def test_a_forged_event_log_changes_nothing_for_the_next_coordinator(tmp_path: Path) -> None:
    """It is for people: what is committed follows from the journal, and from what workers say again."""
    cluster = Cluster().train()
    cluster.commit_all(4)
    journal = Journal.create(tmp_path / "journal.jsonl")
    for record in cluster.journal:
        (journal.note if record["kind"] == "committed" else journal.append)(record)
    journal.close()
    forged = [{"event": "committed", "t": 9e9, "generation": 1, "iteration": 77777}, {"event": "committed"},
              {"event": "committed", "iteration": {}}, {"t": 1.0}, {"event": []}, {"event": "hint", "worker": "0:0"},
              {"event": "decided", "t": [], "generation": {}, "worker": []}, {"event": "profiled", "costs": 3},
              *({"event": name} for name in OWN), {"event": "hint", "worker": [], "error": {}},
              {"event": "started", "hosts": {"0:0": []}, "members": 3}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in forged))
    journal, past = process.open_journal(CoordinatorSpec(6, resume=True), tmp_path)
    journal.close()
    assert past.state is not None and past.state.progress.committed == 4
    assert {event["event"] for event in past.untold} >= {"started"}
    process.Planning(lambda plan: None).resume(
        Job.from_json({"grid": cluster.grid, "block": 2}), frozenset(), past.told)
    told = event_feed.EventFeed(lambda event: None, None, past.told)  # type: ignore[arg-type]
    assert {event["event"] for event in told.again()} == {*event_feed._KEPT}
    cluster.state = past.state
    cluster.feed(inputs.Restarted())
    for name in cluster.names:
        cluster.feed(inputs.Hello(cluster.member(name), 1))
    assert [event["iteration"] for event in events(cluster.commit_all(6), "committed")] == [5, 6]


class _Launchers:
    """Nobody listens."""

    def tell_launchers(self, message: dict[str, Any]) -> None:
        pass


def test_a_commit_that_was_told_just_before_a_coordinator_died_is_not_told_again():
    """A killed coordinator may have told of a commit that its journal lacks. A job that goes back commits it anew."""
    heard: list[Any] = []
    before = [{"event": "committed", "iteration": k} for k in (0, 1)]
    launchers: Any = _Launchers()
    after = event_feed.EventFeed(lambda said: heard.append(said["iteration"]), launchers, before)
    state = Cluster().train()
    for event in (*before, {"event": "committed", "iteration": 2}, {"event": "restored", "iteration": 0},
                  {"event": "committed", "iteration": 1}):
        after.event(event, state.state)
    assert heard == [2, 0, 1]


def test_a_script_s_handler_of_sigterm_is_known_by_its_signs_of_life() -> None:
    state = Cluster().train().state
    feed = event_feed.EventFeed(lambda event: None, None)  # type: ignore[arg-type]
    for progress, known in (({}, False), ({"sigterm": True, "doing": []}, True), ({"sigterm": "yes"}, False)):
        feed.progress = {next(iter(state.known)): progress}
        assert feed.handled(state) is known
    feed.progress = {"stranger": {"sigterm": True}}
    assert not feed.handled(state)
