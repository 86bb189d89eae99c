"""Agents and a coordinator over real sockets, in one process: the API that the runtime builds on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from msgspec.structs import replace

from megatron_recycle.control import Agent, End, Stop, Timeouts
from megatron_recycle.errors import JobEnded
from megatron_recycle.membership import inputs
from megatron_recycle.membership.protocol import LauncherHello
from megatron_recycle.membership.worker_events import Rebuilt, RolledBack
from megatron_recycle.plan.plan_file import PlanFile
from tests.membership.cluster import report
from tests.membership.service import DESCRIPTION, LIMIT, Service, agent, service

NAMES = [f"{d}:{s}" for d in range(3) for s in range(2)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path) as found:
        yield found


def _all_ready(running: Service, **options: Any) -> dict[str, Agent]:
    agents = {name: agent(running.address, name, **options) for name in NAMES}
    for one in agents.values():
        one.ready(DESCRIPTION, report(attempt=0))
    for one in agents.values():
        go = one.wait_go(1, LIMIT)
        assert go is not None and go.resume.next == 0
        one.resumed(1)
    return agents


def _close(agents: dict[str, Agent]) -> None:
    for one in agents.values():
        one.close()


def _kill(running: Service, name: str) -> None:
    """What a launcher would say."""
    rank = NAMES.index(name)
    happened = inputs.Exited(rank, 1000 + rank, -9, time.time())
    running.call(running.coordinator.feed, happened)


def test_six_agents_live_through_a_failure(running: Service) -> None:
    stops: queue.Queue[tuple[str, Stop]] = queue.Queue()
    agents = _all_ready(running)
    for name, one in agents.items():
        one._on_stop = lambda stop, name=name: stops.put((name, stop))
    for one in agents.values():
        one.committed(0, 2.5)
    assert running.await_event("committed", iteration=0)["loss"] == 2.5
    _kill(running, "1:1")
    reached = {stops.get(timeout=LIMIT)[0] for _ in range(5)}
    assert reached == set(NAMES) - {"1:1"}
    survivors = {name: agents[name] for name in sorted(reached)}
    for one in survivors.values():
        assert one.stop_generation == 2
        one.report(2, report(iteration=1, holds=0, actions=2))
    for one in survivors.values():
        go = one.wait_go(2, LIMIT)
        assert go is not None
        assert (go.generation, go.attempt, go.resume.next, go.plan.failed) == (2, 2, 1, ["1:1"])
        one.event(Rebuilt(2, 3.0))
        one.resumed(2)
    assert running.await_event("resumed", generation=2)["survivors"] == 5
    assert running.await_event("rebuilt")["worker"] in survivors
    with pytest.raises(JobEnded, match="declared out"):
        agents["1:1"].wait_go(2, LIMIT)
    done = [threading.Thread(target=one.finished, args=(LIMIT,)) for one in survivors.values()]
    for thread in done:
        thread.start()
    for thread in done:
        thread.join(LIMIT)
    assert running.await_event("finished")["status"] == 0
    _close(agents)


def test_a_wait_for_a_go_ends_when_a_newer_stop_comes_instead(running: Service) -> None:
    agents = _all_ready(running)
    _kill(running, "1:1")
    first = agents["0:0"]
    running.await_event("decided", generation=2)
    found: queue.Queue[Any] = queue.Queue()
    waiting = threading.Thread(target=lambda: found.put(first.wait_go(2, LIMIT)))
    waiting.start()
    _kill(running, "2:0")
    assert found.get(timeout=LIMIT) is None
    assert first.stop_generation == 3
    _close(agents)


def test_a_finished_worker_is_called_back_when_another_fails(running: Service) -> None:
    agents = _all_ready(running)
    found: queue.Queue[bool] = queue.Queue()
    waiting = threading.Thread(target=lambda: found.put(agents["0:0"].finished(LIMIT)))
    waiting.start()
    running.await_event("left", worker="0:0")
    _kill(running, "1:1")
    assert found.get(timeout=LIMIT) is False
    _close(agents)


def test_missing_heartbeats_are_found_and_named_frozen(tmp_path: Path) -> None:
    with service(tmp_path, timeouts=Timeouts(heartbeat_interval=0.05, heartbeat_timeout=2.0)) as running:
        agents = _all_ready(running, heartbeat_interval=0.05)
        agents["2:1"].close()  # nobody reports an exit: only the silence tells
        suspected = running.await_event("suspected", worker="2:1")
        assert suspected["kind"] == "frozen" and suspected["ms"] > 2000
        assert running.await_event("decided", generation=2)["out"] == {"2:1": "frozen"}
        _close(agents)


@pytest.mark.parametrize("deposed", [False, True])
def test_a_coordinator_that_may_not_lead_any_more_first_finds_that_out(tmp_path: Path, deposed: bool) -> None:
    """What happens meanwhile is decided afterwards, in order, or by the one that leads then."""
    leads = threading.Event()
    leads.set()
    with service(tmp_path, leads=leads.is_set) as running:
        agents = _all_ready(running)
        leads.clear()
        _kill(running, "1:0")
        _kill(running, "2:0")
        heard = threading.Event()
        running.call(heard.set)
        assert heard.wait(LIMIT) and not [event for event in running.events if event["event"] == "suspected"]
        if deposed:
            running.call(running.coordinator.deposed, "another one leads")
            running.call(running.coordinator.feed, inputs.Interrupted(1, "nobody hears this"))
        leads.set()
        if not deposed:
            suspected = [running.await_event("suspected", worker=name)["t"] for name in ("1:0", "2:0")]
            assert suspected == sorted(suspected)
        _close(agents)
    assert deposed == (not any(event["event"] in ("suspected", "finished") for event in running.events))


def test_without_a_launcher_the_end_of_a_connection_is_an_exit(tmp_path: Path) -> None:
    with service(tmp_path, launched=False) as running:
        agents = _all_ready(running)
        agents["1:0"].close()
        assert running.await_event("suspected")["kind"] == "exit"
        _close(agents)


def test_a_coordinator_that_follows_another_does_not_go_before_launchers_have_found_it(tmp_path: Path) -> None:
    """They would be told by nobody how the job has ended, and say that it has failed."""
    patient = Timeouts(heartbeat_interval=0.1, heartbeat_timeout=1000.0, report_timeout=1000.0)
    with service(tmp_path, follows=True, timeouts=patient) as running:
        _close(_all_ready(running))
        waits = asyncio.run_coroutine_threadsafe(running.coordinator.wait_quiet(LIMIT), running._loop)
        with pytest.raises(concurrent.futures.TimeoutError):
            waits.result(0.3)
        launcher = MagicMock(guest=False)
        hello = LauncherHello("test", tuple(range(6)), 0)
        running.call(running.coordinator.server._from_launcher, launcher, hello)
        waits.result(LIMIT)


def test_a_process_whose_script_has_failed_is_out_before_it_has_ended(running: Service) -> None:
    agents = _all_ready(running)
    agents["1:0"].ending()
    suspected = running.await_event("suspected")
    assert (suspected["worker"], suspected["kind"]) == ("1:0", "exit")
    _kill(running, "1:0")
    _kill(running, "2:1")
    assert running.await_event("decided", generation=3)["out"] == {"1:0": "exit", "2:1": "exit"}
    assert len([event for event in running.events if event["event"] == "suspected"]) == 2
    _close(agents)


def test_a_lost_connection_comes_back_and_hears_what_it_missed(running: Service) -> None:
    agents = _all_ready(running)
    connection = running.coordinator.server.workers["0:0/0"]
    running.call(connection._transport.abort)
    _kill(running, "1:1")
    for name in NAMES:
        if name != "1:1":
            one = agents[name]
            limit = time.monotonic() + LIMIT
            while one.stop_generation < 2:
                assert time.monotonic() < limit, name
                os.sched_yield()
            one.report(2, report(iteration=0))
    assert agents["0:0"].wait_go(2, LIMIT) is not None
    _close(agents)


def test_a_hint_is_repeated_after_a_reconnect_and_recorded_once(running: Service) -> None:
    agents = _all_ready(running)
    agents["0:0"].hint(1, "connection reset")
    running.await_event("hint")
    connection = running.coordinator.server.workers["0:0/0"]
    running.call(connection._transport.abort)
    limit = time.monotonic() + LIMIT
    while running.coordinator.server.workers.get("0:0/0", connection) is connection:
        assert time.monotonic() < limit
        os.sched_yield()
    agents["0:0"].event(RolledBack(1, 0))
    running.await_event("rolled_back")
    assert [event["event"] for event in running.events].count("hint") == 1
    _close(agents)


def test_different_descriptions_end_the_job_everywhere(running: Service) -> None:
    ends: queue.Queue[End] = queue.Queue()
    one = agent(running.address, "0:0", on_end=ends.put)
    two = agent(running.address, "1:1")
    one.ready(DESCRIPTION, report(attempt=0))
    two.ready(replace(DESCRIPTION, block=2), report(attempt=0))
    assert "block" in ends.get(timeout=LIMIT).message
    for waiting in (one, two):
        with pytest.raises(JobEnded, match="block"):
            waiting.wait_go(1, LIMIT)
        waiting.close()


def test_training_threads_wait_for_an_unreachable_coordinator_only_so_long() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        one = agent(f"127.0.0.1:{taken.getsockname()[1]}", "0:0", patience=0.2)
        with pytest.raises(JobEnded, match="cannot be reached"):
            one.wait_go(1, LIMIT)
        one.close()


def test_wait_go_has_a_limit(running: Service) -> None:
    one = agent(running.address, "0:0")
    with pytest.raises(TimeoutError, match="0:0"):
        one.wait_go(1, 0.05)
    one.close()


def test_a_failing_callback_does_not_end_the_heartbeats(running: Service) -> None:
    agents = _all_ready(running)
    agents["0:0"]._on_stop = lambda stop: 1 / 0  # type: ignore[assignment]
    _kill(running, "1:1")
    agents["0:0"].event(RolledBack(1, 0))
    running.await_event("rolled_back", worker="0:0")
    running.await_event("decided", generation=2)
    agents["0:0"].event(RolledBack(2, 0))
    running.await_event("rolled_back", iteration=2)
    _close(agents)


def test_a_worker_with_a_wrong_token_is_refused_and_harms_nobody(running: Service) -> None:
    agents = _all_ready(running)
    stranger = Agent(running.address, "another token", "0:0", 0, "x", patience=0.3)
    stranger.start()
    with pytest.raises(JobEnded, match="token"):
        stranger.wait_go(1, LIMIT)
    stranger.close()
    agents["0:0"].event(RolledBack(1, 0))
    running.await_event("rolled_back")
    _close(agents)


def test_strangers_are_refused_and_logged_once(running: Service) -> None:
    host, _, port = running.address.rpartition(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 10, struct.pack(">I", 10) + bytes(42), b"\xff" * 64):
        with closing(socket.create_connection((host, int(port)), timeout=LIMIT)) as connection:
            connection.sendall(noise)
            while connection.recv(1 << 16):
                continue  # the greeting, then the end
    assert len([event for event in running.events if event["event"] == "refused"]) == 1


def test_a_silent_stranger_is_closed(tmp_path: Path) -> None:
    with service(tmp_path, timeouts=Timeouts(hello_timeout=0.1)) as running:
        host, _, port = running.address.rpartition(":")
        with closing(socket.create_connection((host, int(port)), timeout=LIMIT)) as connection:
            while connection.recv(1 << 16):
                continue
        assert "in time" in running.await_event("refused")["reason"]


def test_a_crowd_of_strangers_is_not_let_in_and_workers_still_are(running: Service) -> None:
    running.coordinator.server.strangers._room = 64
    host, _, port = running.address.rpartition(":")
    with contextlib.ExitStack() as crowd:
        for _ in range(80):
            crowd.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT))
        assert "not said hello" in running.await_event("refused")["reason"]
    one = agent(running.address, "0:0")
    one.ready(DESCRIPTION, report(attempt=0))
    limit = time.monotonic() + LIMIT
    while "0:0/0" not in running.coordinator.state.known:  # refused until the server has seen the crowd go
        assert time.monotonic() < limit
        time.sleep(0.01)
    one.close()


def test_decisions_are_on_disk_before_they_are_heard_of(running: Service, tmp_path: Path) -> None:
    seen: queue.Queue[str] = queue.Queue()
    agents = _all_ready(running)
    agents["0:0"]._on_stop = lambda stop: seen.put((tmp_path / "journal.jsonl").read_text())
    _kill(running, "1:1")
    lines = [json.loads(line) for line in seen.get(timeout=LIMIT).splitlines()]
    assert any((line.get("kind"), line.get("generation")) == ("decided", 2) for line in lines)
    _close(agents)


def test_a_coordinator_that_was_closed_decides_nothing_more(tmp_path: Path) -> None:
    """Its own closing of the connections is not the end of the workers."""
    with service(tmp_path, launched=False) as running:
        agents = _all_ready(running)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert kinds == ["decided", "go"]
    assert not [event for event in running.events if event["event"] == "suspected"]
    _close(agents)


def test_a_forked_child_does_not_keep_the_connection(tmp_path: Path) -> None:
    """A data loader's worker process must not hide the end of its parent."""
    with service(tmp_path, launched=False) as running:
        agents = _all_ready(running)
        hold, release = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        agents["0:1"].close()
        assert running.await_event("suspected")["worker"] == "0:1"
        os.close(release)
        os.waitpid(child, 0)
        os.close(hold)
        _close(agents)


def test_a_planner_that_fails_ends_the_job(tmp_path: Path) -> None:
    def broken(description: Any, failed: Any) -> PlanFile:
        raise ValueError("no plan today")

    with service(tmp_path, plan=broken) as running:
        one = [agent(running.address, name) for name in NAMES]
        for item in one:
            item.ready(DESCRIPTION, report(attempt=0))
        with pytest.raises(JobEnded, match="no plan today"):
            one[0].wait_go(1, LIMIT)
        for item in one:
            item.close()


def test_a_search_ends_before_the_next_one_for_the_same_membership(tmp_path: Path) -> None:
    """Where costs change more often than a search takes, each would otherwise cancel the one before."""
    asked: queue.Queue[threading.Event] = queue.Queue()
    ended: queue.Queue[None] = queue.Queue()

    def improve(description: Any, failed: Any, plan: Any, stop: threading.Event) -> None:
        asked.put(stop)
        ended.get(timeout=LIMIT)

    with service(tmp_path, improve=improve) as running:
        agents = _all_ready(running)
        first = asked.get(timeout=LIMIT)
        for _ in range(3):
            running.call(running.coordinator.search_again)
        assert not first.is_set() and asked.empty()
        ended.put(None)
        second = asked.get(timeout=LIMIT)
        running.call(running.coordinator.search_again)
        assert not second.is_set() and asked.empty(), "three changes of costs are one search more"
        for _ in range(2):
            ended.put(None)
        assert asked.get(timeout=LIMIT) is not second
        _close(agents)


def test_a_better_plan_reaches_the_workers_and_a_failure_cancels_the_search(tmp_path: Path) -> None:
    cancelled: queue.Queue[bool] = queue.Queue()

    def improve(description: Any, failed: Any, plan: Any, stop: threading.Event) -> PlanFile | None:
        if failed:
            cancelled.put(stop.wait(LIMIT))
            return None
        return PlanFile(source="cpsat", digest="sha256:better")

    with service(tmp_path, improve=improve) as running:
        agents = _all_ready(running)
        running.await_event("planned", source="cpsat")
        limit = time.monotonic() + LIMIT
        while agents["0:0"].offer is None:
            assert time.monotonic() < limit
            os.sched_yield()
        assert agents["0:0"].offer.plan.digest == "sha256:better"
        for one in agents.values():
            one.adopted(1, 4, "sha256:better")
        assert running.await_event("adopted")["iteration"] == 4
        _kill(running, "1:1")
        running.await_event("decided", generation=2)
        del agents["1:1"]
        for one in agents.values():
            one.report(2, report(iteration=5, holds=4))
        for one in agents.values():
            assert one.wait_go(2, LIMIT) is not None
            one.resumed(2)
        running.await_event("resumed", generation=2)
        _kill(running, "0:0")
        assert cancelled.get(timeout=LIMIT)
        _close(agents)
