"""Waits in a library that cannot be told to end them, and ways to leave them.

When gloo closes a connection it fails whatever is queued there, but not the transfer that it is in the midst of: who
waits for a tensor of which a part has come, or gone, when its peer dies waits until the limit of the operation, half
an hour, and would be taken for stalled. So a helper does the waiting, and is left behind in that case. Nothing writes
to the tensor any more: the connection is closed.

A wait can also be left while the connection stays, through the communicator's way out: the operation goes on, and may
be waited for again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from megatron_recycle.runtime.comm.threads import begin

_LOOK_SECONDS = 0.25
_LEFT_AFTER = 1.0
"""Seconds after the abort. Other operations fail by themselves within milliseconds, and are waited for: a collective
must not go on adding to a tensor that is used again."""
WAITING = "recycle-wait"
"""Name of the helpers' threads."""


class Left(RuntimeError):
    """A wait was left through the way out; its operation goes on."""

    def __init__(self) -> None:
        super().__init__("it is not waited for any more: what it belongs to is void")


class WayOut:
    """The way out of all waits on a communicator, which may be taken from any thread; once, and for good.

    Attributes:
        taken: whether it has been. Who begins to wait later leaves at once.
    """

    def __init__(self) -> None:
        self.taken = False
        self._lock = threading.Lock()
        self._inside: set[Callable[[], None]] = set()

    def take(self) -> None:
        """Wake everybody who waits; they find that it is `taken`."""
        with self._lock:
            self.taken = True
            inside = list(self._inside)
        for wake in inside:
            wake()

    @contextmanager
    def beside(self, wake: Callable[[], None]) -> Iterator[None]:
        """A block in which a thread waits that ``wake()`` wakes, from any thread."""
        with self._lock:
            self._inside.add(wake)
        try:
            yield
        finally:
            with self._lock:
                self._inside.discard(wake)


@dataclass
class Exits:
    """The exits of the waits on one communicator.

    Attributes:
        way_out: while operations go on. Another one takes its place once it has been taken.
        closed: whether the communicator's abort has done its work: what is not stuck in the library has ended.
    """

    way_out: WayOut = field(default_factory=WayOut)
    closed: bool = False


class Wait:
    """The wait for one operation, by one thread at a time.

    Args:
        exits: of the operation's communicator.
        stays: nobody leaves it through the way out: it takes no time.
    """

    __slots__ = ("_begun", "_exits", "_stays")

    def __init__(self, exits: Exits, stays: bool = False) -> None:
        self._exits, self._stays = exits, stays
        self._begun: _Outcome | None = None

    @property
    def begun(self) -> bool:
        """Whether a helper waits, or has waited, for the operation: `again` is what is left to do."""
        return self._begun is not None

    @property
    def way_out(self) -> WayOut:
        """The one that this wait may be left through."""
        return WayOut() if self._stays else self._exits.way_out

    def aside(self, block: Callable[[], object]) -> None:
        """``block()`` by a helper, and what it raises. ``block`` must not keep the interpreter to itself.

        Raises Left, and RuntimeError if the communicator has been closed for a second and it has not ended.
        """
        try:
            helper = _idle.pop()
        except IndexError:
            helper = _Helper()
        self._begun = helper.ask(block)
        self.again()

    def again(self) -> None:
        """Go on with a wait that was left. Raises as `aside`."""
        outcome, way_out = self._begun, self.way_out
        assert outcome is not None
        limit = None
        with way_out.beside(outcome.wake):
            while not outcome.came(0 if way_out.taken else _LOOK_SECONDS):
                if way_out.taken:
                    raise Left
                now = time.monotonic()
                limit = limit or (now + _LEFT_AFTER if self._exits.closed else None)
                if limit is not None and now > limit:
                    raise RuntimeError("gloo was in the midst of a transfer when its connection was closed")


class _Outcome:
    """The outcome of a helper's wait. A bare lock, since a Future's condition costs several times as much, for every
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
        """Let who waits look again."""
        with suppress(RuntimeError):  # it is about to
            self._turn.release()

    def came(self, seconds: float) -> bool:
        """Whether it is there within that time, or before, if woken. Raises what the wait has raised."""
        if not self._over:
            self._turn.acquire(timeout=seconds)
        if not self._over:
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
            del wait  # and with it the tensor: whoever waits may count on being the last who has it
            _idle.append(self)
            outcome.tell(failure)
            del outcome, failure


_idle: deque[_Helper] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # their threads have stayed with the parent
