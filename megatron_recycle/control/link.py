"""A connection to the coordinator that runs in its own thread and is renewed after every loss.

The owner queues messages without ever blocking; the thread sends them, sends heartbeats at a steady pace and passes
incoming messages on. After a reconnect `hello` repeats the messages that the coordinator must have.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from megatron_recycle.control.sockets import SILENT_S, targets, watch_peer
from megatron_recycle.control.wire import SecureChannel
from megatron_recycle.errors import JobEnded, RecycleError
from megatron_recycle.membership.protocol import (
    TO_NEWCOMER,
    Heartbeat,
    Kinds,
    Message,
    NewcomerHello,
    TooLarge,
    WireError,
)

_RETRY = (0.05, 1.0)
"""First and longest pause in seconds between attempts to connect."""
_CONNECT_TIMEOUT = 5.0
_TURN_TIMEOUT, _TURN_PAUSE = 1.0, 0.1
"""The connect timeout and longest pause where the next address may be the right one."""
_UNANSWERED = 5.0
"""Seconds, at least ten heartbeats, without the peer's kernel acknowledging one: the connection is dead then, and
another one is tried. A false alarm costs a reconnect, nothing else."""

_RECORD_LIMIT = 60.0
"""Seconds that a newcomer waits for a coordinator that is being restarted."""

log = logging.getLogger(__name__)


class AnyLink(Protocol):
    """A link as an agent needs it: this module's, or one in memory (`tests/fakes/coordinator.py`)."""

    error: str | None
    lost_since: float | None

    @property
    def address(self) -> str: ...
    def start(self) -> None: ...
    def send(self, message: Message) -> None: ...
    def close(self, timeout: float = 1.0) -> None: ...


class Link:
    """See the module. The callables run in the link's thread. An exception of `handle` or `failed` is only logged; one
    of `hello` or `beat` ends the connection, which counts as lost until both succeed.

    Args:
        address: "host:port" of the coordinator, or several candidates with commas.
        hello: the first messages of every connection.
        known: the messages that may come in.
        beat: the heartbeat, sent every `interval` seconds.
        failed: called after every failed attempt to connect.
        unsent: gets a message that is too large to be sent, and why; the connection goes on without it.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        hello: Callable[[], Sequence[Message]],
        handle: Callable[[Any], None],
        beat: Callable[[], Message],
        interval: float,
        known: Kinds[Any],
        name: str,
        failed: Callable[[], None] | None = None,
        unsent: Callable[[Message, str], None] | None = None,
    ) -> None:
        self._targets = deque(targets(address))
        self._longest_pause = _RETRY[1] if len(self._targets) == 1 else _TURN_PAUSE
        self.address = address
        self.error: str | None = None
        self.lost_since: float | None = time.monotonic()
        self.heard = time.monotonic()
        """When the coordinator was last heard, or a connection to it began."""
        self.refused_since: float | None = None
        """Start of consecutive refusals: the host is there, and the coordinator of this job is not."""
        self._token = token
        self._hello = hello
        self._handle = handle
        self._beat = beat
        self._interval = interval
        self._known = known
        self._alone = failed
        self._unsent = unsent
        self._outbox: deque[Message] = deque()
        self._closing = threading.Event()
        self._drained = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # A forked child (a data loader) must not keep the connection open when this process is gone.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(reference))

    def start(self) -> None:
        """Begin to connect. Raises RecycleError if this host has no room for another thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise RecycleError(f"this process cannot talk to the job's coordinator: {error}") from error

    def send(self, message: Message) -> None:
        """Queue `message`; never blocks."""
        self._drained.clear()
        self._outbox.append(message)
        self._wake()

    def close(self, timeout: float = 1.0) -> None:
        """Send all queued messages, if possible within `timeout` seconds, and end the thread."""
        self._closing.set()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._drained.wait(timeout)
            self._thread.join(timeout)

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"w")
        except (BlockingIOError, OSError):
            return  # full: the thread will wake anyway; closed: there is no thread

    def _run(self) -> None:
        pause = _RETRY[0]
        while not self._closing.is_set():
            try:
                self._connect()
            except Exception as error:  # noqa: BLE001 - of a callback, too: it costs a connection, not the thread
                self._failed(error)
                self._targets.rotate(-1)
            pause = _RETRY[0] if self.lost_since is None else min(pause * 2, self._longest_pause)
            if self.lost_since is None:
                self.lost_since = time.monotonic()
            elif self._alone is not None:
                self._safely(self._alone, "a failed attempt to connect")
            self._closing.wait(pause)
        self._drained.set()

    def _connect(self) -> None:
        """Connect to the next address, and serve that connection."""
        limit = _CONNECT_TIMEOUT if len(self._targets) == 1 else _TURN_TIMEOUT
        self._socket = socket.create_connection(self._targets[0], timeout=limit)
        with self._socket:
            if self._socket.getsockname() == self._socket.getpeername():
                raise ConnectionRefusedError("met itself: nobody listens there")
            self._serve(self._socket)

    def _failed(self, error: Exception) -> None:
        refused = isinstance(error, (ConnectionRefusedError, WireError))
        self.refused_since = (self.refused_since or time.monotonic()) if refused else None
        text = str(error) or type(error).__name__
        if text != self.error:
            defect = None if isinstance(error, (OSError, WireError)) else error
            log.warning("recycle: connection to the coordinator at %s: %s", self.address, text, exc_info=defect)
        self.error = text

    def _safely(self, call: Callable[..., None], what: str, *given: Any) -> None:
        """Call a callback of the owner: its failure must not silence the heartbeats."""
        try:
            call(*given)
        except Exception:
            log.exception("recycle: handling %s failed", what)

    def _serve(self, connection: socket.socket) -> None:
        """One connection from its greeting to its end."""
        watch_peer(connection, max(_UNANSWERED, 10 * self._interval))
        connection.setblocking(False)
        session = SecureChannel.client(self._token)
        unsent = bytearray()
        due, self.heard = 0.0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wake_in, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if session.open:
                    if now >= due:
                        self._outbox.append(self._beat())
                        due = now + self._interval
                    while self._outbox:
                        unsent += self._seal(session, self._outbox.popleft())
                    self.lost_since = self.refused_since = self.error = None
                if unsent:
                    _push(connection, unsent)
                if self._closing.is_set() and not unsent and not self._outbox:
                    return
                interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.modify(connection, interest)
                wait = max(0.0, due - now) if session.open else self._silent(session)
                for key, events in selector.select(min(wait, _CONNECT_TIMEOUT)):
                    if key.fileobj is self._wake_in:
                        self._wake_in.recv(4096)
                    elif events & selectors.EVENT_READ:
                        self.heard = time.monotonic()
                        unsent += self._receive(connection, session)
                if time.monotonic() - self.heard > self._silent(session):
                    raise ConnectionResetError("no sign of life: another one may lead")

    def _seal(self, session: SecureChannel, message: Message) -> bytes:
        try:
            return session.seal(message)
        except TooLarge as error:
            log.error("recycle: a %s message is not sent: %s", message.type, error)
            if self._unsent is not None:
                self._unsent(message, str(error))
            return b""

    def _silent(self, session: SecureChannel) -> float:
        """Seconds of silence after which the next address is tried, if there is one."""
        if len(self._targets) == 1:
            return math.inf
        return SILENT_S if session.open else _TURN_TIMEOUT

    def _receive(self, connection: socket.socket, session: SecureChannel) -> bytes:
        """Passes incoming messages on; returns the first frames to send if the greeting was among them."""
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("closed by the coordinator")
        was_open = session.open
        received = session.feed(data)
        first = b""
        if session.open and not was_open:
            first = b"".join(self._seal(session, message) for message in self._hello())
        for message in map(self._known.read, received):
            self._safely(self._handle, f"a {message.type} message", message)
        return first


@contextmanager
def visit(address: str, token: str, messages: Sequence[Message], known: Kinds[Any], name: str
          ) -> Iterator[tuple[queue.SimpleQueue[Any], Link]]:
    """A link for the duration of the block, which repeats ``messages`` after every loss; and its answers."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = Link(address, token, hello=lambda: messages, handle=answers.put, beat=Heartbeat, interval=1.0, known=known,
                name=name)
    link.start()
    try:
        yield answers, link
    finally:
        link.close()


def ask_record(address: str, token: str, rank: int) -> list[dict[str, Any]]:
    """The set-up record of this rank, from the start of the job whose coordinator listens at ``address``.

    Raises:
        JobEnded: no answer within a minute, or the token is wrong.
    """
    hello = NewcomerHello(rank, "newcomer")
    with visit(address, token, [hello], TO_NEWCOMER, "recycle-newcomer") as (answers, link):
        try:
            return list(answers.get(timeout=_RECORD_LIMIT).record)
        except queue.Empty:
            raise JobEnded(f"the coordinator at {address} does not say what this rank was told at the start of the job "
                           f"({link.error or 'connected'}), so that this process cannot join it") from None


def _push(connection: socket.socket, unsent: bytearray) -> None:
    try:
        sent = connection.send(unsent)
    except BlockingIOError:
        return
    del unsent[:sent]


def _forget(reference: weakref.ref[Link]) -> None:
    link = reference()
    if link is None:
        return
    if link._socket is not None:
        link._socket.close()
    link._wake_in.close()
    link._wake_out.close()
