"""Waits in a library that cannot be told to end them.

When gloo closes a connection it fails whatever is queued there, but not the transfer that it is in the midst of: who
waits for a tensor of which a part has come, or gone, when its peer dies waits until the limit of the operation, half
an hour, and would be taken for stalled. So a helper does the waiting, and is left behind in that case. Nothing writes
to the tensor any more: the connection is closed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

_LOOK_SECONDS = 0.25
_LEFT_AFTER = 1.0
"""Seconds after the abort. Other operations fail by themselves within milliseconds, and are waited for: a collective
must not go on adding to a tensor that is used again."""
WAITING = "recycle-wait"
"""Name of the helpers' threads."""


class _Outcome:
    """The outcome of a wait. A bare lock, since a Future's condition costs several times as much, for every
    transfer."""

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._failure: BaseException | None = None

    def tell(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._done.release()

    def came(self, seconds: float) -> bool:
        """Whether it is there within that time. Raises what the wait has raised."""
        if not self._done.acquire(timeout=seconds):
            return False
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # whose traceback has this frame
        return True


class _Helper:
    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], object], _Outcome]] = SimpleQueue()
        threading.Thread(target=self._serve, name=WAITING, daemon=True).start()

    def ask(self, wait: Callable[[], object]) -> _Outcome:
        outcome = _Outcome()
        self._asked.put((wait, outcome))
        return outcome

    def _serve(self) -> None:
        while True:
            wait, outcome = self._asked.get()
            failure = None
            try:
                wait()
            except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
                failure = error
            del wait  # and with it the tensor: whoever waits may count on being the last who has it
            _idle.append(self)
            outcome.tell(failure)
            del outcome, failure


_idle: deque[_Helper] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # their threads have stayed with the parent


def wait_unless(over: Callable[[], bool], wait: Callable[[], object]) -> None:
    """``wait()``, and what it raises; or RuntimeError, if ``over()`` has been true for a second and it has not ended.

    ``wait`` must not keep the interpreter to itself.
    """
    try:
        helper = _idle.pop()
    except IndexError:
        helper = _Helper()
    outcome = helper.ask(wait)
    limit = None
    while not outcome.came(_LOOK_SECONDS):
        now = time.monotonic()
        limit = limit or (now + _LEFT_AFTER if over() else None)
        if limit is not None and now > limit:
            raise RuntimeError("gloo was in the midst of a transfer when its connection was closed")
