"""The client of the coordinator's store, on which torch's store is built.

Any thread may ask. Each request has a connection of its own for its duration, which the next request reuses: so one
thread can wait for a key that another one puts there, without extra threads. A lost connection is renewed until the
request's time is over. The client remembers the values that this process has put into the store, and sends them to a
restarted coordinator with an empty one.
"""

from __future__ import annotations

import base64
import math
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_recycle.control.rendezvous_store import DELETED, LARGEST, OWN, TOO_MUCH, decoded, encoded, term_of
from megatron_recycle.control.sockets import SILENT_S, targets, watch_peer
from megatron_recycle.control.wire import SecureChannel
from megatron_recycle.membership.protocol import (
    TO_STORE,
    Ask,
    Found,
    Lives,
    Mark,
    Message,
    StoreHello,
    Welcome,
    WireError,
)

Kind = TypeVar("Kind", bound=Message)
_CONNECT_S = 5.0
_TURN_S = 1.0
"""The connect timeout where the next address may be the right one."""
_PAUSE = 0.05
"""Seconds between attempts to connect, and between checks whether a request was given up."""
_UNANSWERED = 5.0
_MARKS = 1 << 14
"""How many requests of other processes are remembered as done."""


class NotThere(TimeoutError):
    """The awaited keys did not come in time, or the coordinator was unreachable."""


class GivenUp(RuntimeError):
    """The caller no longer needs an answer."""


@dataclass
class Said:
    """Values that a process has put into the store, each with its stamp, in case they must be sent again."""

    values: dict[str, tuple[bytes | None, int]] = field(default_factory=dict)
    _deleted: dict[str, None] = field(default_factory=dict)

    def put(self, key: str, value: bytes | None, stamp: int) -> None:
        """Remember a value. None: it was deleted, which is remembered for the latest such keys."""
        if stamp < self.values.get(key, (None, 0))[1]:
            return
        self.values[key] = value, stamp
        self._deleted.pop(key, None)
        if value is None:
            self._deleted[key] = None
            if len(self._deleted) > DELETED:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest], self.values[oldest]


@dataclass
class Answer:
    """`keys` has all found keys, which may be more than the requested ones."""

    keys: list[str]
    values: list[bytes]
    number: int


@dataclass
class _Slot:
    """A sequence of requests: each has the slot's name and a number."""

    name: str
    number: int = 0


class _Memory:
    """A process's knowledge of the store: its own values, and the requests, of any process, that were carried out."""

    def __init__(self) -> None:
        self.store = ""
        """The present store: answers of a replaced coordinator do not count."""
        self.holder = ""
        """The store that has all of this."""
        self._always = Said()
        self._recent: list[Said] = []
        self._marks: dict[str, Mark] = {}

    def new_part(self, most: int) -> Said:
        """A new part of it. Only the latest ``most`` parts are kept; 0: the permanent part."""
        if not most:
            return self._always
        self._recent.append(made := Said())
        del self._recent[:-most]
        return made

    def add(self, part: Said, op: str, keys: Sequence[str], values: Sequence[bytes], answer: Found) -> None:
        """Remember a request's effect. ``answer`` has no values after a fresh `set`, else the present ones."""
        now = [None if one is None else base64.b64decode(one) for one in answer.values]
        for key, value in zip(keys, values if op == "set" and not now else now, strict=True):
            part.put(key, value, answer.stamp)
        for slot, mark in answer.marks.items():
            self._marks.pop(slot, None)
            self._marks[slot] = mark
        while len(self._marks) > _MARKS:
            del self._marks[next(iter(self._marks))]

    def parts(self, rank: int) -> list[Ask]:
        """All of it, as requests; the last one has the rank."""
        entries = [(key, value, stamp) for known in (self._always, *self._recent)
                for key, (value, stamp) in known.values.items()]
        parts = [*_parts(entries)] or [()]
        return [Ask("tell", tuple(key for key, _, _ in part), encoded([value for _, value, _ in part]),
                    tuple(stamp for _, _, stamp in part), rank if part is parts[-1] else -1,
                    marks=dict(self._marks) if part is parts[-1] else {}) for part in parts]


class StoreClient:
    """See the module.

    Args:
        address: "host:port" of the coordinator, or several candidates.
        token: the job's.
        rank: of this process among the job's.
    """

    def __init__(self, address: str, token: str, rank: int = -1) -> None:
        self.address = address
        self._targets = targets(address)
        self._token = token
        self._rank = rank
        self._lock = threading.Lock()
        self._idle: list[_Line] = []
        self._name = secrets.token_hex(6)
        self._slots: list[_Slot] = []
        self._memory = _Memory()
        os.register_at_fork(after_in_child=self._forked)

    def said(self, most: int) -> Said:
        """A new memory of values put there. Only the latest ``most`` memories are kept; 0: the permanent one."""
        with self._lock:
            return self._memory.new_part(most)

    def ask(self, op: str, keys: Sequence[str], values: Sequence[bytes] = (), *, number: int = 0, timeout: float,
            given_up: Callable[[], bool] = lambda: False, said: Said | None = None) -> Answer:
        """The store's answer. Without one it is unknown whether the request was carried out.

        Raises:
            NotThere: not within ``timeout`` seconds.
            GivenUp: ``given_up()`` has become true.
            ValueError: the store refuses.
        """
        for value in values:
            if len(value) > LARGEST:
                raise ValueError(f"a value of {len(value)} bytes, and the store takes {LARGEST}: it is for addresses, "
                                 "not for data")
        with self._lock:
            slot = self._slots.pop() if self._slots else _Slot(f"{self._name}.{secrets.token_hex(3)}")
        slot.number += 1
        message = Ask(op, tuple(keys), encoded(values), number=number, once=f"{slot.name}:{slot.number}")
        try:
            answer = self._answered(message, values, time.monotonic() + timeout, given_up, said)
        finally:
            with self._lock:
                self._slots.append(slot)
        if answer.error == TOO_MUCH:
            each = [self.ask("get", [key], timeout=timeout, given_up=given_up).values[0] for key in keys]
            return Answer(list(keys), each, 0)
        if answer.error:
            raise ValueError(f"the job's store: {answer.error}")
        return Answer([*(answer.keys or keys)], decoded(answer.values), answer.number)

    def tell(self, timeout: float) -> None:
        """Ensure that the leading coordinator's store has all values that this process has put into the previous one.
        Raises NotThere."""
        self.ask("check", [OWN], timeout=timeout)

    def _answered(self, message: Ask, values: Sequence[bytes], until: float, given_up: Callable[[], bool],
                  part: Said | None) -> Found:
        keys, why = ", ".join(message.keys)[:200], "not there in time"
        while True:
            line: _Line | None = None
            try:
                line = self._line(until, given_up)
                answer = line.exchange(message, Found, until, given_up)
                if self._counts(line, message, values, answer, part):
                    return answer
            except (OSError, WireError) as error:
                if isinstance(error, NotThere):
                    raise NotThere(f"{keys}: {why}") from None
                why = f"the coordinator at {self.address} cannot be reached ({error})"
                if time.monotonic() >= until:
                    raise NotThere(f"{keys}: {why}") from None
                if given_up():
                    raise GivenUp("the ask was given up") from None
                time.sleep(_PAUSE)
            finally:
                if line is not None and not line.busy:
                    with self._lock:
                        self._idle.append(line)
                elif line is not None:
                    line.close()

    def _counts(self, line: _Line, message: Ask, values: Sequence[bytes], answer: Found, part: Said | None) -> bool:
        """Whether this answer counts: it is remembered before another store gets all values. If not, ask again."""
        with self._lock:
            if line.store != self._memory.store:
                line.busy = True
                return False
            if part is not None and answer.stamp:
                self._memory.add(part, message.op, message.keys, values, answer)
        return True

    def _line(self, until: float, given_up: Callable[[], bool]) -> _Line:
        with self._lock:
            while self._idle:
                if (line := self._idle.pop()).store == self._memory.store:
                    return line
                line.close()
        failed: Exception = ConnectionError("not tried")
        for target in self._targets:
            try:
                line = _Line.to(target, self._token, len(self._targets) > 1, until, given_up)
            except (OSError, WireError) as error:
                failed = error
                self._targets = (*(each for each in self._targets if each != target), target)
                continue
            try:
                self._tell_again(line, until, given_up)
            except BaseException:
                line.close()
                raise
            return line
        raise ConnectionError(str(failed) or type(failed).__name__)

    def _tell_again(self, line: _Line, until: float, given_up: Callable[[], bool]) -> None:
        """Send all values that this process has put into the previous store to an empty one."""
        with self._lock:
            known = self._memory
            if line.store == known.holder:
                return
            if term_of(line.store) < term_of(known.store):
                raise ConnectionResetError("another one leads by now")
            known.store = line.store
            parts = known.parts(self._rank)
        for part in parts:
            line.exchange(part, Found, until, given_up)
        with self._lock:
            if known.store == line.store:
                known.holder = line.store

    def _forked(self) -> None:
        """A forked child closes its parent's connections, and counts as another process."""
        self._lock = threading.Lock()
        for line in self._idle:
            line.close()
        self._idle, self._slots = [], []
        self._name, self._rank = secrets.token_hex(6), -1


class _Line:
    """One connection, for one request at a time."""

    def __init__(self, connection: socket.socket, token: str, one_of_many: bool) -> None:
        self.busy = False
        self.store = ""
        """The name of the store there."""
        self._silent = SILENT_S if one_of_many else math.inf
        self._socket = connection
        self._session = SecureChannel.client(token)

    @classmethod
    def to(cls, target: tuple[str, int], token: str, one_of_many: bool, until: float, given_up: Callable[[], bool]
           ) -> _Line:
        """A connection."""
        until = min(until, time.monotonic() + (_TURN_S if one_of_many else _CONNECT_S))
        connection = socket.create_connection(target, timeout=max(0.01, until - time.monotonic()))
        try:
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError("met itself: nobody listens there")
            watch_peer(connection, _UNANSWERED)
            connection.setblocking(False)
            line = cls(connection, token, one_of_many)
            while not line._session.open:
                line._session.feed(line._receive(until, given_up))
            line.store = line.exchange(StoreHello("store"), Welcome, until, given_up).store
        except NotThere:
            connection.close()
            raise ConnectionError("no answer") from None
        except BaseException:
            connection.close()
            raise
        return line

    def exchange(self, message: Message, kind: type[Kind], until: float, given_up: Callable[[], bool]) -> Kind:
        """Send a request; returns the answer, of this ``kind``. Afterwards `busy` is whether none has come."""
        self.busy = True
        unsent = memoryview(self._session.seal(message))
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent):]
            except BlockingIOError:
                self._wait(select.POLLOUT, until, given_up)
        while True:
            for answer in map(TO_STORE.read, self._session.feed(self._receive(until, given_up))):
                if isinstance(answer, Lives):
                    continue
                if not isinstance(answer, kind):
                    raise WireError(f"{answer.type}: it is not what was asked for")
                self.busy = False
                return answer

    def close(self) -> None:
        self._socket.close()

    def _receive(self, until: float, given_up: Callable[[], bool]) -> bytes:
        self._wait(select.POLLIN, until, given_up)
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("closed by the coordinator")
        return data

    def _wait(self, event: int, until: float, given_up: Callable[[], bool]) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        silent = time.monotonic() + self._silent
        while not poll.poll(max(0.0, min(_PAUSE, until - time.monotonic())) * 1000):
            if given_up():
                raise GivenUp("the ask was given up")
            if time.monotonic() >= until:
                raise NotThere("not there in time")
            if time.monotonic() >= silent:
                raise ConnectionResetError("no sign of life: another one may lead")


def _parts(entries: Sequence[tuple[str, bytes | None, int]]) -> Iterable[Sequence[tuple[str, bytes | None, int]]]:
    """Runs of values that fit into one message."""
    part: list[tuple[str, bytes | None, int]] = []
    size = 0
    for one in entries:
        size += len(one[0]) + len(one[1] or b"") + 40
        if part and size > LARGEST:
            yield part
            part, size = [], len(one[0]) + len(one[1] or b"") + 40
        part.append(one)
    if part:
        yield part
