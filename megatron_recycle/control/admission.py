"""Admission to the control server: a few connections are admitted at a time, the latest first. An admitted connection
without a hello is a stranger.

Admitting a connection costs some tenths of a millisecond. A crowd that is admitted at once holds up all existing
connections, and each later one for seconds. So connections wait in a queue, at next to no cost; the event loop admits a
few, serves the admitted ones, and admits the next. If the queue is too long, or a wait too long, the oldest is turned
away: a process of the job comes again at once, and is then the latest.

A process with the token says hello within milliseconds; a stranger stays until its time is over. So where there are too
many, the oldest of the most frequent address has to go: neither one address nor many can keep out a process with the
token.

A host that joins with the lesser secret is a guest. It may write to the job's store only where its workers need it: the
part of the generation in force, as long as one of its members has joined as guest, since there the members meet. Keys
written with the job's token stay as they are. All keys can be read: a script may wait for any.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from msgspec.structs import replace

from megatron_recycle.control.wire import GUEST
from megatron_recycle.membership import messages
from megatron_recycle.membership.protocol import Ask
from megatron_recycle.membership.state import State

Stranger = TypeVar("Stranger", bound=Hashable)

_BACKLOG = 4096
"""Connections in the kernel's queue; beyond it the peer's kernel retries after a second."""
_AT_ONCE = 32
"""How many are admitted before the admitted ones are served again."""
_LONGEST_S = 0.3
"""Seconds that a connection may wait while more come than can be admitted."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_READS = ("get", "wait", "around", "check", "count", "list")
_PAUSE = 1.0
"""Seconds without accepting, when there is no descriptor or memory left."""


class AcceptQueue:
    """Accepts connections, from `open` to `close`. Both are called in the event loop.

    Args:
        listener: a bound socket.
        room: how many may wait in the queue.
        host: makes the protocol of an admitted connection.
        turned_away: called with the address of a rejected one.
    """

    def __init__(self, listener: socket.socket, room: int, host: Callable[[], asyncio.Protocol],
                 turned_away: Callable[[str], None]) -> None:
        self._listener = listener
        self._room = room
        self._host = host
        self._turned_away = turned_away
        self._outside: deque[tuple[socket.socket, str, float]] = deque()
        self._entering: set[asyncio.Task[object]] = set()
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Listen."""
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._watch()

    def close(self) -> None:
        """Stop listening; waiting connections are turned away."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        while self._outside:
            self._outside.pop()[0].close()

    def _watch(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._knocked)

    def _knocked(self) -> None:
        """Accept all connections from the kernel's queue, where they cannot be distinguished."""
        first = not self._outside
        for _ in range(_BACKLOG):
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if error.errno in _FULL and self._outside:
                    self._turn_away()
                    continue
                if error.errno in _FULL:
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(_PAUSE, self._watch)
                break  # queue empty, or the connection has gone again
            self._outside.append((connection, str(address[0]), self._loop.time()))
            if len(self._outside) > self._room:
                self._turn_away()
        if first and self._outside:
            self._let_in()

    def _turn_away(self) -> None:
        oldest, source, _ = self._outside.popleft()
        oldest.close()
        self._turned_away(source)

    def _let_in(self) -> None:
        for _ in range(min(_AT_ONCE, len(self._outside))):
            connection, _, _ = self._outside.pop()
            entering = self._loop.create_task(self._enter(connection))
            self._entering.add(entering)
            entering.add_done_callback(self._entering.discard)
        late = self._loop.time() - _LONGEST_S
        while len(self._outside) > _AT_ONCE and self._outside[0][2] < late:
            self._turn_away()
        if self._outside:
            self._loop.call_soon(self._let_in)

    async def _enter(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            await self._loop.connect_accepted_socket(self._host, connection)
        except OSError:  # it has gone again
            with suppress(OSError):
                connection.close()


class Unauthenticated(Generic[Stranger]):
    """Admitted connections without a hello, in order of arrival.

    Args:
        room: how many there may be at a time.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._sources: dict[Stranger, str] = {}
        self._from: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sources)

    def came(self, stranger: Stranger, source: str) -> Stranger | None:
        """Add one; returns the one to remove for it, if the room is full."""
        self._sources[stranger] = source
        self._from[source] += 1
        if len(self._sources) <= self._room:
            return None
        most = max(self._from.values())
        oldest = next(one for one, source in self._sources.items() if self._from[source] == most)
        self.gone(oldest)
        return oldest

    def gone(self, stranger: Stranger) -> None:
        """It has said hello, or has left."""
        if (source := self._sources.pop(stranger, None)) is not None:
            self._from[source] -= 1
            if not self._from[source]:
                del self._from[source]


def part(state: State) -> str:
    """The part of the store where guests meet the others; "" if no guest is a member."""
    members = state.incarnations() if state.go is None else state.go.members
    if not any(incarnation.startswith(GUEST) for incarnation in members.values()):
        return ""
    return f"recycle/{messages.group_prefix(state.generation, members) if state.go is None else state.go.prefix}"


def of_guests(state: State, rank: int, pid: int | None = None) -> bool:
    """Whether a guest may speak for this rank: the rank's process is a guest too, or unknown."""
    processes = state.members if pid is None else state.known
    return all(one.incarnation.startswith(GUEST) or pid not in (None, one.pid)
               for one in processes.values() if one.rank == rank)


@dataclass
class GuestPermissions:
    """Remembers the keys that guests have written, in the current part."""

    _part: str = ""
    _written: set[str] = field(default_factory=set)

    def refusal(self, ask: Ask, part: str, exists: Callable[[str], bool]) -> str:
        """Why a guest's request is refused; "" if it is not. ``exists``: whether a key has a value."""
        if ask.op in _READS:
            return ""
        if part != self._part:
            self._part, self._written = part, set()
        for key in ask.keys:
            if not part or not key.startswith((f"{part}/", f"{part}-r")):
                return (f"{key!r:.80}: a host that has joined with join.token writes only where the workers of the "
                        "generation in force meet, and may read the rest: to write more, join with the job's token")
            if key not in self._written and exists(key):
                return f"{key!r:.80}: a worker with the job's token has written it"
        self._written.update(ask.keys)
        return ""

    def tellable(self, ask: Ask, part: str, exists: Callable[[str], bool]) -> Ask:
        """The permitted part of a guest's knowledge for a restarted coordinator."""
        permitted = [each for each in zip(ask.keys, ask.values, ask.stamps)
                     if not self.refusal(Ask("set", (each[0],)), part, exists)]
        return replace(ask, keys=tuple(key for key, _, _ in permitted),
                       values=tuple(value for _, value, _ in permitted),
                       stamps=tuple(stamp for _, _, stamp in permitted), marks={})
