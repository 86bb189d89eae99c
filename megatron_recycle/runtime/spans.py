"""The record of one worker's training thread in some iterations, action by action, for `recycle timeline RUN`.

The latest transitions are kept in memory. Those of every 25th iteration, and of those around a failure, are written to
`timings/worker-RANK.jsonl` in the run's folder, by a thread of its own: training never waits for that disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_recycle.membership.detectors import ThreadState
from megatron_recycle.plan import Action

FOLDER = "timings"
EVERY = 25
_AROUND = 2
"""Iterations that are written after a failure: the interrupted one, and the next."""
_MOST = 8192
"""Transitions in memory: some ten iterations of 200 actions."""
_LARGE = 1 << 20
"""Bytes of a file beyond which its older half is dropped."""
_ACTIONS = frozenset({"forward", "full forward", "backward", "full backward", "weight", "data"})

Mark = tuple[float, str, Any]
"""(seconds of a monotonic clock, what begins, and its name): a state of the thread, or "at" an iteration and an
action."""


class Spans:
    """The record of one worker.

    Attributes:
        marks: the latest transitions.
    """

    def __init__(self) -> None:
        self.marks: deque[Mark] = deque(maxlen=_MOST)
        self._eventful = 0
        self._queue: queue.SimpleQueue[tuple[int, str, Path, Sequence[Mark], float]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def at(self, now: float, iteration: int, action: Action | None) -> None:
        """From now on the thread is at this iteration and action."""
        self.marks.append((now, "at", (iteration, action)))

    def failed(self) -> None:
        """A recovery begins."""
        self._eventful = _AROUND

    def committed(self, iteration: int, worker: str, file: Path | None) -> None:
        """``iteration`` is final; write its record to ``file``, if it is due."""
        if file is None or (iteration % EVERY and not self._eventful):
            return
        self._eventful = max(0, self._eventful - 1)
        self._queue.put((iteration, worker, file, tuple(self.marks), time.time() - time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="recycle-timings", daemon=True)
            self._thread.start()

    def _write_all(self) -> None:
        while True:
            iteration, worker, file, marks, offset = self._queue.get()
            found = record(iteration, worker, marks, offset)
            with contextlib.suppress(OSError):  # expendable
                append(file, json.dumps(found, separators=(",", ":")) + "\n")


def record(iteration: int, worker: str, marks: Iterable[Mark], offset: float) -> dict[str, Any]:
    """The spans of ``iteration``: `t` is the begin of the first span (Unix seconds). Each span has its begin since then
    and its duration, in microseconds, and a name: an action, ``wait`` for something, or another activity."""
    spans: list[tuple[float, float, str]] = []
    inside, action = False, ""
    before: tuple[float, str] | None = None
    for now, state, value in marks:
        if before is not None and before[1]:
            spans.append((before[0], now, before[1]))
        if state == "at":
            inside, action = value[0] == iteration, "" if value[1] is None else str(value[1])
            before = (now, before[1] if before and inside else "")
            continue
        name = ""
        if state == ThreadState.WAITING:
            name = f"wait {value}"
        elif state == ThreadState.WORKING:
            name = action if value in _ACTIONS and action else str(value)
        before = (now, name if inside else "")
    start = spans[0][0] if spans else 0.0
    merged: list[list[Any]] = []
    for begin, end, name in spans:
        began, took = round(1e6 * (begin - start)), round(1e6 * (end - begin))
        if merged and merged[-1][2] == name and merged[-1][0] + merged[-1][1] >= began - 1:
            merged[-1][1] = began + took - merged[-1][0]
        elif took > 0:
            merged.append([began, took, name])
    return {"v": 1, "iteration": iteration, "worker": worker, "t": round(offset + start, 6), "spans": merged}


def append(file: Path, line: str) -> None:
    """Append a line to a file of bounded size. Raises OSError."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if file.stat().st_size > _LARGE:
            kept = file.read_bytes()[-_LARGE // 2:].partition(b"\n")[2]
            temporary = file.with_name(f".{file.name}-{os.getpid()}")
            temporary.write_bytes(kept)
            temporary.replace(file)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(line)
