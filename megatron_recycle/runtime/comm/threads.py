"""Threads that are inside a communication library, and cannot be interrupted there.

A worker whose script is over stands by, and may have to recover with the others. By then its interpreter is ending, and
since Python 3.12 an interpreter that ends starts no thread: so some are kept for that.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue

_KEPT = 16
"""One recovery there, and taking leave after it, ask for eight in all, most of them for milliseconds."""

_kept: list[threading.Thread] = []
_given: SimpleQueue[Task] = SimpleQueue()


class Task:
    """A function that runs in a thread of its own, or in one that was kept."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self._name = name
        self._run: Callable[[], object] | None = run
        self._over = threading.Event()

    def __call__(self) -> None:
        """Run it, in the thread that is to."""
        threading.current_thread().name = self._name
        run, self._run = self._run, None  # it is not to keep anything longer than it runs
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
        """Wait until it has, at most ``limit`` seconds."""
        self._over.wait(limit)


def keep_some() -> None:
    """Keep threads for the end of this process, where its interpreter will start none then."""
    if sys.version_info >= (3, 12) and not _kept:
        _kept.extend(threading.Thread(target=_serve, daemon=True) for _ in range(_KEPT))
        for thread in _kept:
            thread.start()


def begin(name: str, run: Callable[[], object]) -> Task:
    """Start ``run()`` in a thread that is called so. Raises RuntimeError if there is none."""
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
    """The threads of one owner, who waits for them at the end: an interpreter that ends under a thread that comes back
    from the communication library aborts the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[tuple[Task, float]] = []

    def start(self, name: str, run: Callable[[], object], longest: float) -> Task:
        """Start ``run()``; the end waits for it at most ``longest`` seconds."""
        with self._lock:
            self._running = [(each, limit) for each, limit in self._running if each.is_alive()]
            task = begin(name, run)
            self._running.append((task, longest))
        return task

    def close(self) -> None:
        """Wait for all of them, each as long as it may take."""
        with self._lock:
            running, self._running = self._running, []
        for task, longest in running:
            task.join(longest)
