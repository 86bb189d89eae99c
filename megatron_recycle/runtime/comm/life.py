"""The life of a communicator: the one state machine by which all threads use, leave, abort and reuse it.

::

    OPEN ───> VOID ───> LEFT ───> ABORTED ───> DESTROYED
      ^                   │
      └─── Comm.again() ──┘

- OPEN: operations may begin, and their results count.
- VOID: its generation is over. No operation begins any more, and no result counts, even if the library reports success.
  All communicators of a generation become void together, before the first of them is left or aborted
  (`abort.Teardown`), so that a thread which one of them frees does not go on with another one.
- LEFT: all waits are cancelled. The library's communicator stays as it is: it has lost no member, and the next
  generation may go on with it (`reuse.ReusableGroups`) if all members have begun the same operations there
  (`ledger.Ledger`). `Comm.again` makes a new, open `Comm` of it. It is aborted after all if a thread does not come out
  of it, or if the next generation does not take it.
- ABORTED: the library has ended all operations; its communicator is lost. An abort may take seconds, or hang
  (`backend.Backend`); meanwhile the communicator is void.
- DESTROYED: the library's resources are free, some time after the abort (`abort.retire`).

A state only gives way to a later one, whichever thread asks first; states may be left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum


class CommState(IntEnum):
    """The states, in their order; see the module."""

    OPEN = 0
    VOID = 1
    LEFT = 2
    ABORTED = 3
    DESTROYED = 4


class CancelToken:
    """Cancels all waits on a communicator, from any thread; once, and for good.

    Attributes:
        cancelled: whether it has done so. A later wait ends at once.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._inside: set[Callable[[], None]] = set()

    def cancel(self) -> None:
        """Wake all waiting threads; they find it `cancelled`."""
        with self._lock:
            self.cancelled = True
            inside = list(self._inside)
        for wake in inside:
            wake()

    @contextmanager
    def beside(self, wake: Callable[[], None]) -> Iterator[None]:
        """A block in which a thread waits; ``wake()`` wakes it, from any thread."""
        with self._lock:
            self._inside.add(wake)
        try:
            yield
        finally:
            with self._lock:
                self._inside.discard(wake)


class Life:
    """The state of one communicator, and the token that cancels waits on it.

    Attributes:
        state: only `reach` changes it.
        token: cancels waits while operations go on. Another one takes its place once it has cancelled.
    """

    __slots__ = ("_lock", "state", "token")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.state = CommState.OPEN
        self.token = CancelToken()

    def reach(self, state: CommState) -> None:
        """Go on to ``state``, unless a later one is reached already. From any thread."""
        with self._lock:
            self.state = max(self.state, state)

    def wait_again(self) -> None:
        """Let waits begin again, after a cancellation."""
        self.token = CancelToken()

    @property
    def open(self) -> bool:
        """Whether results count."""
        return self.state is CommState.OPEN

    @property
    def closed(self) -> bool:
        """Whether an abort has done its work: every operation that is not stuck in the library has ended."""
        return self.state >= CommState.ABORTED
