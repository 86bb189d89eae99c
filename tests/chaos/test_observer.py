"""A worker's observer holds it where the tool wants, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_recycle.environment import Launched
from megatron_recycle.observe import holds
from megatron_recycle.observe.holds import ChaosObserver, Hold, observer_for

LIMIT = 60.0


def until(path: Path) -> None:
    limit = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < limit, f"no {path}"
        time.sleep(0.001)


@contextmanager
def training(observer: ChaosObserver, *phases: tuple[str, int]) -> Iterator[threading.Thread]:
    """A thread that goes through these phases."""
    thread = threading.Thread(target=lambda: [observer.on(*phase, None) for phase in phases], daemon=True)
    thread.start()
    yield thread
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_it_stands_still_from_the_moment_asked_for_until_the_order_is_taken_back(tmp_path: Path):
    observer = ChaosObserver(tmp_path)
    order = holds.arm(tmp_path, "kill-1", Hold("backward", 3, 1))
    with training(observer, ("forward", 3), ("backward", 3), ("backward", 3), ("stepped", 3)) as thread:
        until(tmp_path / "kill-1.reached")
        assert thread.is_alive()
        order.unlink()


def test_a_moment_that_has_passed_is_said_to_be_missed(tmp_path: Path):
    observer = ChaosObserver(tmp_path)
    observer.on("backward", 3, None)
    holds.arm(tmp_path, "kill-1", Hold("backward", 3))
    observer.on("backward", 3, None)
    for iteration in (4, 5):
        observer.on("forward", iteration, None)
    assert (tmp_path / "kill-1.missed").exists()
    assert not (tmp_path / "kill-1.reached").exists()


def test_a_hold_with_a_limit_ends_by_itself(tmp_path: Path):
    holds.arm(tmp_path, "stall-1", Hold(None, seconds=0.05))
    with training(ChaosObserver(tmp_path), ("forward", 0), ("forward", 0)):
        until(tmp_path / "stall-1.reached")


def test_a_tool_that_has_died_holds_nobody(tmp_path: Path):
    tool = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = holds.started_ticks(tool.pid)
    assert ticks is not None
    holds.arm(tmp_path, "kill-1", Hold("forward", owner=(tool.pid, ticks)))
    with training(ChaosObserver(tmp_path), ("forward", 0)) as thread:
        until(tmp_path / "kill-1.reached")
        assert thread.is_alive()
        tool.kill()
        tool.wait()


def test_without_the_variable_there_is_no_observer(tmp_path: Path):
    job = {"RECYCLE_RUN_DIR": str(tmp_path), "RANK": "3"}
    assert observer_for(Launched.read(job)) is None
    assert observer_for(Launched.read({**job, "RECYCLE_CHAOS": "1"})) is not None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"phase": null, "planet": 3}'])
def test_files_that_are_no_orders_are_left_alone(tmp_path: Path, text: str):
    (tmp_path / "kill-1.json").write_text(text)
    ChaosObserver(tmp_path).on("forward", 0, None)
