"""Threads that are inside a communication library, and cannot be interrupted there."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Threads:
    """The threads of one owner, who waits for them at the end: an interpreter that ends under a thread that comes back
    from the communication library aborts the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[tuple[threading.Thread, float]] = []

    def start(self, name: str, run: Callable[[], object], longest: float) -> threading.Thread:
        """Start ``run()``; the end waits for it at most ``longest`` seconds."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._running = [(each, limit) for each, limit in self._running if each.is_alive()]
            thread.start()
            self._running.append((thread, longest))
        return thread

    def close(self) -> None:
        """Wait for all of them, each as long as it may take."""
        with self._lock:
            running, self._running = self._running, []
        for thread, longest in running:
            thread.join(longest)
