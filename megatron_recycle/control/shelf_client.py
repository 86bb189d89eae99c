"""A process's way to the coordinator's shelf, which is what torch's store is made of.

Any thread may ask. Each ask has a connection to itself for as long as it lasts, and leaves it to the next one: so one
thread can wait for a key that another one puts there, and none of it needs a thread of its own. A connection that ends
is made again, until the ask's time is over. What this process has put on the shelf it remembers, and tells a
coordinator that has come back with an empty one.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megatron_recycle.control.addresses import targets
from megatron_recycle.control.shelf import LARGEST, TOO_MUCH, decoded, encoded
from megatron_recycle.control.sockets import SILENT_S, watch_peer
from megatron_recycle.control.wire import Message, Session, WireError
from megatron_recycle.membership.messages import TO_STORE, check

_CONNECT_S = 5.0
_TURN_S = 1.0
"""The same, where the next address may be the right one."""
_PAUSE = 0.05
"""Seconds between tries to connect, and between looks at whether an ask was given up."""
_UNANSWERED = 5.0
_ONCE = ("add", "append", "compare_set", "delete")
"""What must not be done twice, should its answer be lost."""


class NotThere(TimeoutError):
    """What was waited for did not come in time, or the coordinator was out of reach."""


class GivenUp(RuntimeError):
    """Whoever asked needs no answer any more."""


@dataclass
class Said:
    """Values that a process has put on the shelf, each with its stamp, in case they must be told again."""

    values: dict[str, tuple[bytes | None, int]] = field(default_factory=dict)


@dataclass
class Answer:
    """`keys` are named where more was found than was asked for."""

    keys: list[str]
    values: list[bytes]
    number: int
    stamp: int


class ShelfClient:
    """See the module.

    Args:
        address: "host:port" of the coordinator, or several, of which one leads.
        token: the job's.
    """

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._targets = targets(address)
        self._token = token
        self._lock = threading.Lock()
        self._idle: list[_Line] = []
        self._shelf = ""
        self._said: list[Said] = []
        os.register_at_fork(after_in_child=self._forked)

    def said(self, most: int) -> Said:
        """A new memory of what is put there. All but the latest ``most``, and the first one, are forgotten."""
        with self._lock:
            self._said.append(made := Said())
            del self._said[1:-most]
        return made

    def ask(self, op: str, keys: Sequence[str], values: Sequence[bytes] = (), *, number: int = 0, timeout: float,
            given_up: Callable[[], bool] = lambda: False, said: Said | None = None) -> Answer:
        """The shelf's answer.

        Raises:
            NotThere: not within ``timeout`` seconds.
            GivenUp: ``given_up()`` has become true.
            ValueError: the shelf refuses.
        """
        for value in values:
            if len(value) > LARGEST:
                raise ValueError(f"a value of {len(value)} bytes, and the store takes {LARGEST}: it is for addresses, "
                                 "not for data")
        until = time.monotonic() + timeout
        message = {"type": "ask", "op": op, "keys": list(keys), "values": encoded(values), "stamps": [],
                   "number": number, "once": secrets.token_hex(8) if op in _ONCE else ""}
        why = "not there in time"
        while True:
            line: _Line | None = None
            try:
                line = self._line(until, given_up)
                told = line.exchange(message, until, given_up)
                break
            except (OSError, WireError) as error:
                if isinstance(error, NotThere):
                    raise NotThere(f"{', '.join(keys)[:200]}: {why}") from None
                why = f"the coordinator at {self.address} cannot be reached ({error})"
                if time.monotonic() >= until:
                    raise NotThere(f"{', '.join(keys)[:200]}: {why}") from None
                if given_up():
                    raise GivenUp("the ask was given up") from None
                time.sleep(_PAUSE)
            finally:
                if line is not None and not line.busy:
                    self._put_back(line)
                elif line is not None:
                    line.close()
        if told["error"] == TOO_MUCH:
            each = [self.ask("get", [key], timeout=timeout, given_up=given_up).values[0] for key in keys]
            return Answer(list(keys), each, 0, 0)
        if told["error"]:
            raise ValueError(f"the job's store: {told['error']}")
        answer = Answer(told["keys"] or list(keys), decoded(told["values"]), told["number"], told["stamp"])
        if said is not None and answer.stamp:
            self._remember(said, op, keys, values, answer)
        return answer

    def _remember(self, said: Said, op: str, keys: Sequence[str], values: Sequence[bytes], answer: Answer) -> None:
        now: Iterable[bytes | None] = values
        if op == "delete":
            now = [None] * len(keys)
        elif op in ("add", "append") or (op == "compare_set" and answer.number):
            now = answer.values
        elif op == "compare_set":
            return
        with self._lock:
            for key, value in zip(keys, now, strict=True):
                said.values[key] = value, answer.stamp

    def _line(self, until: float, given_up: Callable[[], bool]) -> _Line:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        failed: Exception = ConnectionError("not tried")
        for target in self._targets:
            try:
                line, shelf = _Line.to(target, self._token, len(self._targets) > 1, until, given_up)
            except (OSError, WireError) as error:
                failed = error
                self._targets = (*(each for each in self._targets if each != target), target)
                continue
            try:
                self._tell_again(line, shelf, until, given_up)
            except BaseException:
                line.close()
                raise
            return line
        raise ConnectionError(str(failed) or type(failed).__name__)

    def _tell_again(self, line: _Line, shelf: str, until: float, given_up: Callable[[], bool]) -> None:
        """An empty shelf hears of all that this process has put on the one before."""
        with self._lock:
            new = self._shelf not in ("", shelf)
            told = [(key, value, stamp) for said in self._said for key, (value, stamp) in said.values.items()] if new \
                else []
        for part in _parts(told):
            keys, values, stamps = zip(*part, strict=True)
            line.exchange({"type": "ask", "op": "tell", "keys": list(keys), "values": encoded(values),
                           "stamps": list(stamps), "number": 0, "once": ""}, until, given_up)
        self._shelf = shelf

    def _put_back(self, line: _Line) -> None:
        with self._lock:
            self._idle.append(line)

    def _forked(self) -> None:
        """A child keeps no connection of its parent's open."""
        self._lock = threading.Lock()
        for line in self._idle:
            line.close()
        self._idle = []


class _Line:
    """One connection, which one ask at a time has."""

    def __init__(self, connection: socket.socket, token: str, one_of_many: bool) -> None:
        self.busy = False
        self._silent = SILENT_S if one_of_many else math.inf
        self._socket = connection
        self._session = Session.client(token)

    @classmethod
    def to(cls, target: tuple[str, int], token: str, one_of_many: bool, until: float, given_up: Callable[[], bool]
           ) -> tuple[_Line, str]:
        """A connection, and the name of the shelf there."""
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
            shelf = line.exchange({"type": "hello", "role": "store"}, until, given_up)["shelf"]
        except NotThere:
            connection.close()
            raise ConnectionError("no answer") from None
        except BaseException:
            connection.close()
            raise
        return line, shelf

    def exchange(self, message: Message, until: float, given_up: Callable[[], bool]) -> Message:
        """Say this and wait for the answer. Afterwards `busy` is whether none has come."""
        self.busy = True
        unsent = memoryview(self._session.seal(message))
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent):]
            except BlockingIOError:
                self._wait(select.POLLOUT, until, given_up)
        while True:
            for answer in self._session.feed(self._receive(until, given_up)):
                if check(answer, TO_STORE)["type"] == "lives":
                    continue
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


def _parts(told: Sequence[tuple[str, bytes | None, int]]) -> Iterable[Sequence[tuple[str, bytes | None, int]]]:
    """Runs of values that fit into one message."""
    part: list[tuple[str, bytes | None, int]] = []
    size = 0
    for one in told:
        size += len(one[0]) + len(one[1] or b"") + 40
        if part and size > LARGEST:
            yield part
            part, size = [], len(one[0]) + len(one[1] or b"") + 40
        part.append(one)
    if part:
        yield part
