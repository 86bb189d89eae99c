"""The coordinator of a job that another launcher has started."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Agent
from megatron_recycle.launch import embedded
from megatron_recycle.membership.description import Description
from megatron_recycle.observe.events import read_events
from megatron_recycle.plan import Grid
from tests.membership.cluster import report

LIMIT = 60.0


def _events(folder: Path, name: str) -> list[dict[str, object]]:
    """Events of this name, once there is one."""
    limit = time.monotonic() + LIMIT
    while True:
        found = [event for event in read_events(folder / "events.jsonl") if event["event"] == name]
        if found:
            return found
        assert time.monotonic() < limit, f"no {name}: {(folder / 'coordinator.log').read_text()}"
        time.sleep(0.005)


def test_the_end_of_a_connection_is_an_exit_and_the_coordinator_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RECYCLE_TOKEN", raising=False)
    folder = tmp_path / "run"
    address, token = embedded.start(dataclasses.replace(RecycleConfig(), run_dir=str(folder)))
    assert address.startswith("127.0.0.1:") and len(token) == 64
    agents = [Agent(address, token, f"{d}:0", d, f"life{d}", 0.1, pid=1000 + d) for d in range(2)]
    description = Description(grid=Grid(1, (2, 2)))
    for agent in agents:
        agent.start()
        agent.ready(description, report(attempt=0))
    for agent in agents:
        go = agent.wait_go(1, LIMIT)
        assert go is not None and go.plan.source == "greedy"
        agent.resumed(1)
    agents[1].close()
    (suspected,) = _events(folder, "suspected")
    assert (suspected["worker"], suspected["kind"]) == ("1:0", "exit")
    agents[0].report(2, report())
    go = agents[0].wait_go(2, LIMIT)
    assert go is not None and go.plan.failed == ["1:0"]
    assert agents[0].finished(LIMIT)
    agents[0].close()
    assert _events(folder, "finished")[0]["status"] == 0
    # Not a child of this test any more than of a dead rank 0: look for it by its folder.
    limit = time.monotonic() + LIMIT
    while _coordinators(folder):
        assert time.monotonic() < limit, "the coordinator stays"
        time.sleep(0.01)


def _coordinators(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and str(folder).encode() in command and entry.name != str(os.getpid()):
            found.append(entry.name)
    return found
