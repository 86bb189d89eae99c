"""What a launcher tells of a job, with events that are told again after a reconnect."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_recycle.launch.summary import Summary, print_table

STARTED = {"event": "started", "t": 1.0, "generation": 1, "ranks": {"0:0": 0, "1:0": 1}}


def suspected(pid: int, generation: int, kind: str = "exit", rank: int = 0, **other: Any) -> dict[str, Any]:
    event = {"event": "suspected", "t": 2.0, "generation": generation, "iteration": 5, "worker": f"{rank}:0"}
    return {**event, "kind": kind, "rank": rank, "pid": pid, "ms": 20.0, **other}


def joined(pid: int, generation: int, **other: Any) -> dict[str, Any]:
    return {"event": "joined", "t": 3.0, "generation": generation, "worker": "0:0", "rank": 0, "pid": pid, **other}


def test_what_is_told_again_counts_once_and_makes_no_line() -> None:
    summary = Summary()
    told = [STARTED, suspected(10, 1, "slow", removed=False), suspected(10, 1), joined(11, 2), suspected(11, 3)]
    told += [{"event": "moving", "t": 4.0, "generation": 4, "worker": "1:1", "to": "0:0", "number": 1}]
    assert all(summary.add(event) for event in told)
    assert not any(summary.add({**event, "t": 9.0}) for event in told)
    assert summary.add(joined(12, 4, moved_from="1:1"))
    assert (len(summary.failures), summary.joined, summary.moved) == (2, 1, 1)


def test_each_process_has_its_own_row_and_its_own_failure(capsys: pytest.CaptureFixture[str]) -> None:
    summary = Summary()
    for event in (STARTED, suspected(10, 1), {"event": "resumed", "t": 2.5, "generation": 2, "ms": 400.0},
                  joined(11, 3), suspected(11, 3, "frozen"), joined(12, 5, moved_from="1:1")):
        summary.add(event)
    print_table(summary, [(0, 10, "signal SIGKILL"), (0, 11, "signal SIGTERM"), (0, 12, "status 0")], "the end")
    output = capsys.readouterr().out
    first, second, third = (next(line for line in output.splitlines() if f" {pid} " in line) for pid in (10, 11, 12))
    assert "exit" in first and "400 ms" in first and "frozen" in second and "never" in second
    assert "exit" not in third and "frozen" not in third and "status 0" in third
    assert "2 workers lost, after 1 of them training went on, 1 joined, 1 moved" in output
