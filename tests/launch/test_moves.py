"""A launcher starts the process that a worker of its host moves to: real processes that compute nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle.control.moves import moves_of
from megatron_recycle.control.planning import problem_of
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.launch.starting import Starting
from megatron_recycle.membership.description import Job
from megatron_recycle.plan import Grid
from tests.launch.running import Running, launched

ITERATIONS = 50
MOVES: dict[str, Any] = {"moves": True, "move_cost": 1.0, "horizon": 100.0}
ORDERS = {"iterations": ITERATIONS, "pause": {"0": 2, "1": 2, "2": 5}, "offered": 6, "description": MOVES}
"""Of 3 pipelines; ranks 0 and 1 are 0:0 and 1:0, to be killed before iteration 2. Rank 2 (2:0) lets nobody go beyond 5
until it is released; 6 is not held before all know that the process is ready to which rank 4 (1:1) moves, at 0:0."""


def lose_two(job: Running) -> int:
    """Two of stage 0 are killed, and a process for 0:0 is ready to come in; returns its pid."""
    job.kill(0, 1)
    moving = job.event("moving", worker="1:1")
    assert (moving["to"], moving["rank"], moving["to_rank"]) == ("0:0", 4, 0)
    pid: int = job.event("waiting", worker="0:0")["pid"]
    job.paused(2)
    return pid


def check(job: Running, out: dict[str, str]) -> None:
    assert job.wait() == 0, job.where()
    assert [event["iteration"] for event in job.events if event["event"] == "committed"] == list(range(ITERATIONS))
    assert [event for event in job.events if event["event"] == "decided"][-1]["out"] == out
    assert job.children() == []


def environment(pid: int) -> dict[str, str]:
    pairs = (Path("/proc") / str(pid) / "environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


@pytest.mark.processes
def test_a_worker_moves_on_its_own_device_and_its_old_process_ends_well(tmp_path: Path) -> None:
    with launched(tmp_path / "run", ORDERS) as job:
        given = environment(lose_two(job))
        assert (given["RANK"], given["LOCAL_RANK"]) == ("0", "4")
        job.go_on(2)
        check(job, {"1:0": "exit", "1:1": "move"})
        assert job.event("joined")["moved_from"] == "1:1"
        assert job.event("left", kind="move")["worker"] == "1:1"
    output = job.output.read_text()
    assert "recycle: moving generation" in output and "worker=1:1 kind=move" in output, output


@pytest.mark.processes
@pytest.mark.night
def test_the_coordinator_is_killed_while_the_new_process_waits(tmp_path: Path) -> None:
    with launched(tmp_path / "run", ORDERS) as job:
        lose_two(job)
        os.kill(job.coordinator(), signal.SIGKILL)
        job.event("restarted")
        job.until(lambda: len([e for e in job.events if e["event"] == "waiting"]) == 2, "the process at the new one")
        job.go_on(2)
        check(job, {"1:0": "exit", "1:1": "move"})


@pytest.mark.processes
@pytest.mark.night
def test_the_coordinator_is_killed_while_the_new_process_starts(tmp_path: Path) -> None:
    """The launcher tells the next one of the ends of the processes that had the rank before."""
    with launched(tmp_path / "run", ORDERS) as job:
        job.kill(0, 1)
        number = job.event("moving")["number"]
        os.kill(job.coordinator(), signal.SIGKILL)
        job.event("restarted")
        job.event("waiting", worker="0:0")
        job.paused(2)
        job.go_on(2)
        check(job, {"1:0": "exit", "1:1": "move"})
        assert {event["number"] for event in job.events if event["event"] == "moving"} == {number}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.night
def test_a_worker_moves_to_the_place_of_one_that_stands_still(tmp_path: Path) -> None:
    frozen = {**ORDERS, "description": {**MOVES, "heartbeat_timeout": 3.0}}
    with launched(tmp_path / "run", frozen) as job:
        job.kill(0, number=signal.SIGSTOP)
        job.kill(1)
        job.event("waiting", worker="0:0")
        job.paused(2)
        job.go_on(2)
        check(job, {"1:0": "exit", "1:1": "move"})
        assert job.event("suspected", worker="0:0")["kind"] == "frozen"


@pytest.mark.processes
@pytest.mark.night
def test_the_launcher_ends_the_new_process_when_the_move_ends(tmp_path: Path) -> None:
    """Another failure comes first: 0:1 dies, and stage 1 has nobody to spare."""
    with launched(tmp_path / "run", {**ORDERS, "offered": None, "pause": {**ORDERS["pause"], "3": 5}}) as job:
        lose_two(job)
        job.kill(3)
        assert job.event("move_failed")["reason"] == "the membership has changed"
        check(job, {"0:0": "exit", "1:0": "exit", "0:1": "exit"})


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.night
def test_max_restarts_comes_first_and_a_rank_that_stays_out_is_moved_to(tmp_path: Path) -> None:
    description = {**MOVES, "max_restarts": 1}
    with launched(tmp_path / "run", {**ORDERS, "description": description}) as job:
        job.kill(0, 1)
        for name in ("0:0", "1:0"):
            os.kill(job.event("waiting", worker=name)["pid"], signal.SIGKILL)
        moving = job.event("moving")
        assert (moving["worker"], moving["to"]) == ("1:1", "0:0")
        job.until(lambda: len([e for e in job.events if e["event"] == "waiting"]) == 3, "its process")
        job.go_on(2)
        check(job, {"1:0": "exit", "1:1": "move"})
    output = job.output.read_text()
    assert "rank 0 stays out: it has been started again 1 times" in output


def test_a_move_to_the_place_of_a_process_that_still_ends_and_the_same_move_told_again() -> None:
    spawned: list[tuple[int, int]] = []
    signals: list[int] = []

    def process(rank: int, move: int) -> Any:
        child = SimpleNamespace(signal=signals.append)
        return SimpleNamespace(rank=rank, move=move, lives=True, out="exit", child=child)

    def spawn(rank: int, out: str, move: int) -> None:
        spawned.append((rank, move))
        processes.workers[rank] = process(rank, move)

    processes: Any = SimpleNamespace(workers={0: process(0, 0), 4: process(4, 0)}, devices={0: 0, 4: 4}, log=str)
    starting = Starting(processes, Restarts(lambda line: None), lambda line: None, spawn, lambda message: None)
    starting.begin_move(0, beside=4, number=1)
    starting.moves()
    assert processes.devices == {0: 4, 4: 4} and signals == [signal.SIGKILL] and not spawned, "its successor waits"
    processes.workers[0].lives = False
    starting.failed(processes.workers[0])  # made room
    starting.begin_move(0, beside=4, number=1)
    starting.moves()
    starting.moves()
    assert spawned == [(0, 1)]
    processes.workers[0].lives = False
    starting.failed(processes.workers[0])
    starting.begin_move(0, beside=4, number=1)
    starting.moves()
    assert spawned == [(0, 1)], "that one has failed already"
    starting.begin_move(0, beside=4, number=2)
    starting.moves()
    assert spawned == [(0, 1), (0, 2)]
    starting.drop_move(0, number=1)
    assert signals == [signal.SIGKILL]
    starting.drop_move(0, number=2)
    assert signals == [signal.SIGKILL] * 2


def test_who_moves_leaves_the_pipeline_that_is_broken_anyway() -> None:
    description = Job.from_json({"grid": {"stages": 2, "microbatches": [4] * 4}, **MOVES})
    failed = frozenset({"0:0", "1:0"})
    assert moves_of(problem_of(description, failed), description) == {"1:1": "0:0"}
    assert moves_of(problem_of(description, failed), replace(description, move_cost=100.0)) == {}
    four = Job(grid=Grid(2, (4,) * 8))
    found = moves_of(problem_of(four, frozenset(f"{d}:0" for d in range(6))), four)
    assert len(found) == 3 and len(set(found.values())) == 3
