"""The parent's side of a search in a process of its own: start it, read what it finds, end it hard at its
limit."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: how the interpreter is told to run the search
COMMAND = ("-m", "megatron_recycle.planner.search_child")
#: seconds kept back for reading and validating, at the least and per action of the plan
RESERVE, RESERVE_PER_ACTION = 0.05, 8e-6


def run(request: dict[str, Any], actions: int, budget_s: float,
        cancelled: Callable[[], bool]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The last schedule that the child found (or None) and its closing statistics.

    Returns within ``budget_s`` seconds, whatever the child does; ``killed`` in the statistics says that it
    had to be ended. ``cancelled`` is asked about ten times a second.
    """
    begin = time.monotonic()
    limit = max(0.1, budget_s - RESERVE - RESERVE_PER_ACTION * actions)
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH", "")) if p)
    child = subprocess.Popen(
        [sys.executable, *COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "PYTHONPATH": path})
    stats: dict[str, Any] = {"killed": False}
    best: dict[str, Any] | None = None
    try:
        _ask(child, {**request, "wall": max(0.05, limit - 0.1)}, begin + limit)
        for message in _lines(child, begin + limit, cancelled):
            if message.get("done"):
                stats.update({key: entry for key, entry in message.items() if key != "done"})
                return best, stats
            best = message
        stats["killed"] = stats["cut"] = True
        return best, stats
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                pipe.close()


def _ask(child: subprocess.Popen[bytes], request: dict[str, Any], end: float) -> None:
    """Write the request without ever waiting for a child that does not read."""
    assert child.stdin is not None
    data = memoryview(json.dumps(request).encode() + b"\n")
    os.set_blocking(child.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while data and time.monotonic() < end and child.poll() is None:
            if not selector.select(0.1):
                continue
            try:
                data = data[os.write(child.stdin.fileno(), data):]
            except (BlockingIOError, InterruptedError):
                continue
            except BrokenPipeError:
                return


def _lines(child: subprocess.Popen[bytes], end: float, cancelled: Callable[[], bool]):
    """Messages of the child until it ends, the time is over, or nobody wants them any more."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0 and not cancelled():
            if not selector.select(min(left, 0.1)):
                continue
            chunk = os.read(child.stdout.fileno(), 1 << 20)
            if not chunk:
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                try:
                    message = json.loads(line)
                except json.JSONDecodeError:
                    return
                yield message
