"""What a launcher tells of a job, with events that are told again after a reconnect."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_recycle.control.event_feed import brief
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


def test_a_last_copy_is_a_warning_with_what_helps() -> None:
    event = {"event": "last_copy", "t": 2.0, "generation": 2, "stages": {"0": "1:0", "1": "1:1"}}
    line = Summary().add({**event, "kept_by": {"1": "0:0"}})
    assert line is not None and line.startswith(
        "recycle: warning: stage 0 has one worker left (1:0), stage 1 has one worker left (1:1; 0:0 keeps a copy); ")
    assert "--job-restarts" in line
    line = Summary().add({**event, "hosts": {"0": "a", "1": "b"}, "checkpoint": 7}) or ""
    assert "stage 1 has one worker left (1:1 on b); what only it has is lost with it, and all go back to" in line
    assert "the checkpoint of iteration 7: fill" in line
    assert "--job-restarts" not in (Summary().add({**event, "kept_by": {"0": "0:1", "1": "0:0"}}) or "")


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


def test_lines_name_who_is_out_and_leave_lists_to_the_file() -> None:
    summary = Summary()
    many = {f"{d}:{s}": f"life-{d}-{s}" for d in range(2) for s in range(2)}
    ranks = {name: number for number, name in enumerate(many)}
    started = {**STARTED, "members": dict(many), "ranks": ranks, "pids": dict.fromkeys(many, 7),
               "hosts": {"0:0": "n1/0", "1:0": "n1/0", "0:1": "n2/1", "1:1": "n2/1"},
               "grid": {"stages": 2, "microbatches": [4, 4]}}
    told = "recycle: started generation=1 workers=4 pipelines=2 stages=2 hosts=[n1/0,n2/1]"
    assert summary.add(brief(started)) == told
    del many["1:0"]
    decided = {"event": "decided", "t": 1.0, "generation": 2, "members": many, "out": {"1:0": "exit"}, "reason": None}
    assert summary.add(brief(decided)) == "recycle: decided generation=2 out=[1:0(exit)] workers=3"
    assert summary.rank_of({"event": "hint", "worker": "0:1"}) == 1 and summary.rank_of(decided) is None


def test_a_host_without_a_coordinator_does_not_count_losses_and_a_file_gets_no_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(Summary(), [(0, 10, "status 1")], "the coordinator did not say \x1b[31mhow", informed=False)
    output = capsys.readouterr().out
    assert "who else was lost is unknown: the coordinator was lost" in output and "0 workers lost" not in output
    assert output.isascii() and "\x1b" not in output


def test_a_host_that_came_later_says_since_when_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    summary = Summary()
    summary.add({"event": "committed", "t": 1.0, "generation": 3, "iteration": 20, "loss": 5.0})
    print_table(summary, [(0, 10, "status 0")], "the end", late=True)
    assert "(1 iterations committed since this host asked to join, last loss 5.0;" in capsys.readouterr().out


def test_an_iteration_that_a_coordinator_which_took_over_tells_again_counts_once() -> None:
    summary = Summary()
    for iteration in (0, 1, 2, 1, 2, 3):
        summary.add({"event": "committed", "t": 1.0, "generation": 1, "iteration": iteration, "loss": 1.0})
    summary.add({"event": "restored", "t": 2.0, "generation": 2, "iteration": 1})
    summary.add({"event": "committed", "t": 3.0, "generation": 2, "iteration": 2, "loss": 1.0})
    assert summary.committed == 5, "what is made again from a checkpoint counts again"
