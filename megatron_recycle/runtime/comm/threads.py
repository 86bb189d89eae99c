"""Threads for blocking calls into a communication library, which cannot be interrupted there.

A worker whose script is over stands by, and may have to recover with the others. By then its interpreter is shutting
down, and since Python 3.12 an interpreter that shuts down starts no thread: so some are kept for that.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue

_KEPT = 16
"""A recovery at that point and the leave after it take eight in all, most of them for milliseconds."""

_kept: list[threading.Thread] = []
_given: SimpleQueue[Task] = SimpleQueue()


class Task:
    """A function that runs in a thread of its own, or in a kept one."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self._name = name
        self._run: Callable[[], object] | None = run
        self._over = threading.Event()

    def __call__(self) -> None:
        """Run it, in its thread."""
        threading.current_thread().name = self._name
        run, self._run = self._run, None  # keep no reference beyond the run
        assert run is not None
        try:
            run()
        finally:
            del run
            self._over.set()

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self._over.is_set()

    def join(self, limit: float | None = None) -> None:
        """Wait for its end, at most ``limit`` seconds."""
        self._over.wait(limit)


def keep_some() -> None:
    """Keep threads for the end of this process, if its interpreter will start none then."""
    if sys.version_info >= (3, 12) and not _kept:
        _kept.extend(threading.Thread(target=_serve, daemon=True) for _ in range(_KEPT))
        for thread in _kept:
            thread.start()


def begin(name: str, run: Callable[[], object]) -> Task:
    """Start ``run()`` in a thread with this ``name``. Raises RuntimeError if none can be started and none is kept."""
    task = Task(name, run)
    try:
        threading.Thread(target=task, name=name, daemon=True).start()
    except RuntimeError:
        if not _kept:
            raise
        _given.put(task)
    return task


def _serve() -> None:
    while True:
        task = _given.get()
        try:
            task()
        except BaseException:  # noqa: BLE001  (as any thread's: it ends the task, and is shown)
            traceback.print_exc()
        del task


class Threads:
    """The threads of one owner, which joins them at its end: a thread that returns from the communication library while
    the interpreter shuts down aborts the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[tuple[Task, float]] = []

    def start(self, name: str, run: Callable[[], object], longest: float) -> Task:
        """Start ``run()``; `close` waits for it at most ``longest`` seconds."""
        with self._lock:
            self._running = [(each, limit) for each, limit in self._running if each.is_alive()]
            task = begin(name, run)
            self._running.append((task, longest))
        return task

    def close(self) -> None:
        """Wait for all threads, each up to its own limit."""
        with self._lock:
            running, self._running = self._running, []
        for task, longest in running:
            task.join(longest)
