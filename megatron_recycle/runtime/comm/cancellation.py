"""Ways to leave waits in a library that offers none.

When gloo closes a connection it fails all queued operations there, but not the transfer that it is in the middle of. A
thread that waits for a partly transferred tensor when its peer dies waits until the operation's timeout, half an hour,
and would be taken for stalled. So a helper thread does the waiting, and is abandoned in that case. Nothing writes to
the tensor any more: the connection is closed.

A wait can also be left while the connection stays, by the communicator's cancel token: the operation goes on, and may
be waited for again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from megatron_recycle.runtime.comm.life import CancelToken, Life
from megatron_recycle.runtime.comm.threads import begin

_LOOK_SECONDS = 0.25
_LEFT_AFTER = 1.0
"""Seconds after the abort. Other operations fail by themselves within milliseconds, and are waited for where the
communicator is aborted: a collective must not go on adding to a tensor that is used again."""
WAITING = "recycle-wait"
"""Name of the helpers' threads."""


class Cancelled(RuntimeError):
    """A wait was cancelled; its operation goes on."""

    def __init__(self) -> None:
        super().__init__("it is not waited for any more: what it belongs to is void")


class Wait:
    """The wait for one operation, by one thread at a time.

    Args:
        life: of the operation's communicator.
        stays: it is never cancelled, as it takes no time.
    """

    __slots__ = ("_begun", "_life", "_stays")

    def __init__(self, life: Life, stays: bool = False) -> None:
        self._life, self._stays = life, stays
        self._begun: _Outcome | None = None

    @property
    def begun(self) -> bool:
        """Whether a helper waits, or has waited, for the operation: call `again` to go on."""
        return self._begun is not None

    @property
    def cancel_token(self) -> CancelToken:
        """The token that cancels this wait."""
        return CancelToken() if self._stays else self._life.token

    def aside(self, block: Callable[[], object]) -> None:
        """Run ``block()`` in a helper thread, and raise its errors. ``block`` must release the GIL.

        Raises Cancelled, and RuntimeError if it has not ended a second after the communicator was closed.
        """
        try:
            helper = _idle.pop()
        except IndexError:
            helper = _Helper()
        self._begun = helper.ask(block)
        self.again()

    def again(self) -> None:
        """Go on with a wait that was left. Raises as `aside`."""
        outcome, cancel_token = self._begun, self.cancel_token
        assert outcome is not None
        limit = None
        with cancel_token.beside(outcome.wake):
            while not outcome.came(0 if cancel_token.cancelled else _LOOK_SECONDS):
                if cancel_token.cancelled:
                    raise Cancelled
                now = time.monotonic()
                limit = limit or (now + _LEFT_AFTER if self._life.closed else None)
                if limit is not None and now > limit:
                    raise RuntimeError("gloo was in the midst of a transfer when its connection was closed")


class _Outcome:
    """The outcome of a helper's wait. A bare lock: a Future's condition costs several times as much, for every
    transfer."""

    __slots__ = ("_failure", "_over", "_turn")

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._turn.acquire()
        self._over = False
        self._failure: BaseException | None = None

    def tell(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._over = True
        self.wake()

    def wake(self) -> None:
        """Let the waiting thread look again."""
        with suppress(RuntimeError):  # it is about to
            self._turn.release()

    def came(self, seconds: float) -> bool:
        """Whether it is there within ``seconds``, or before, if woken. Raises the wait's error."""
        if not self._over:
            self._turn.acquire(timeout=seconds)
        if not self._over:
            return False
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame
        return True


class _Helper:
    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], object], _Outcome]] = SimpleQueue()
        begin(WAITING, self._serve)

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
            del wait  # and with it the tensor: the waiting thread may count on having the last reference
            _idle.append(self)
            outcome.tell(failure)
            del outcome, failure


_idle: deque[_Helper] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # their threads have stayed with the parent
