"""Runs the user's command for each alarm: one after the other in a thread of its own, each for a limited time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_recycle.control import tokens

LIMIT = 10.0
"""Seconds that a command may take; then it is killed, with its children."""
_WAITING = 20
"""Alarms that may queue behind the running command."""


class Hook:
    """The user's alarm command. `tell` never waits.

    Args:
        command: for the shell; gets the alarm as one JSON object on its standard input, and its name in RECYCLE_EVENT.
        say: gets a line for each error.
        limit: seconds for each.

    Attributes:
        failed: commands that have failed, were killed, or never ran since too many waited.
    """

    def __init__(self, command: str, say: Callable[[str], None], limit: float = LIMIT) -> None:
        self.failed = 0
        self._command = command
        self._say = say
        self._limit = limit
        self._until = math.inf
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="recycle-hook", daemon=True)
        self._thread.start()

    def tell(self, alarm: Mapping[str, Any]) -> None:
        """Queue the command for this alarm."""
        try:
            self._queue.put_nowait(alarm)
        except queue.Full:
            self.failed += 1
            self._say(f"recycle: --on-event: {alarm['event']} is not told: {_WAITING} others wait for the command")

    def close(self) -> None:
        """Run the alarms that still wait, for at most as long as two commands may take, and no more."""
        self._until = time.monotonic() + 2 * self._limit
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=0.1)
                self._thread.join(3 * self._limit)
                return

    def _run(self) -> None:
        while (alarm := self._queue.get()) is not None:
            why = "has no time left" if time.monotonic() > self._until else self._run_for(alarm)
            if why:
                self.failed += 1
                self._say(f"recycle: --on-event: for {alarm['event']} the command {why}")

    def _run_for(self, alarm: Mapping[str, Any]) -> str:
        """Run the command; returns how it has failed, if it has."""
        environ = {**tokens.without(os.environ), "RECYCLE_EVENT": str(alarm["event"])}
        try:
            process = subprocess.Popen(self._command, shell=True, stdin=subprocess.PIPE, env=environ, text=True,
                                       start_new_session=True)
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        try:
            process.communicate(json.dumps(alarm) + "\n", timeout=self._limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"took longer than {self._limit:g} s and was killed"
        return f"ended with status {process.returncode}" if process.returncode else ""
