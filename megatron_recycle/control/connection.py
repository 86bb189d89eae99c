"""One accepted connection of the coordinator: bytes to checked messages, and nothing else.

A peer that does not prove the token in time, sends what is not due, or does not read what it is sent, is
closed. No message of a connection is acted on before all of the frame has been authenticated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_recycle.control.sockets import watch_peer
from megatron_recycle.control.wire import GUEST, Session, encode
from megatron_recycle.membership.inputs import FROM_LAUNCHER, FROM_WORKER, Heard, WorkerHello
from megatron_recycle.membership.protocol import (
    FROM_NEWCOMER,
    FROM_OPERATOR,
    FROM_STORE,
    FirstHello,
    Interrupt,
    Kinds,
    Message,
    WireError,
)

_ROLES: Mapping[str, Kinds[Any]] = {
    "worker": FROM_WORKER, "launcher": FROM_LAUNCHER, "newcomer": FROM_NEWCOMER, "store": FROM_STORE,
    "operator": FROM_OPERATOR}
_HELLO: Kinds[FirstHello] = Kinds(FirstHello)
_UNREAD_LIMIT = 32 * 1024 * 1024
"""Bytes that may wait for a peer before it is cut off."""


_UNANSWERED = 30.0
"""Seconds after which a connection counts as ended to a peer whose kernel acknowledges nothing. Whether the peer is a
member is decided long before, by its heartbeats; this only keeps dead connections from piling up."""


class Owner(Protocol):
    """The coordinator, as a connection needs it."""

    token: str
    hello_timeout: float

    def connected(self, connection: Connection) -> None: ...
    def disconnected(self, connection: Connection) -> None: ...
    def refused(self, source: str, reason: str) -> None: ...
    def received(self, connection: Connection, message: Message) -> None: ...


class Connection(asyncio.Protocol):
    """`role` is "worker", "launcher", "newcomer", "store" (a process at the job's store) or "operator" once the peer
    has said hello; `incarnation` (a worker's), `host` and `places` (a launcher's: the processes that its host can start
    in the job's next life) are set by the owner. `heard` is when something last came in (monotonic)."""

    @property
    def guest(self) -> bool:
        """Whether the peer may join and no more: it has the secret of those that join, not the job's token."""
        return self._session.guest

    def __init__(self, owner: Owner) -> None:
        self.role: str | None = None
        self.incarnation: str | None = None
        self.host: str | None = None
        self.places = 0
        self.heard = time.monotonic()
        self.source = "?"
        self._owner = owner
        self._session = Session.server(owner.token)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.source = str(peer[0]) if peer else "?"
        connection = transport.get_extra_info("socket")
        watch_peer(connection, _UNANSWERED)
        transport.write(self._session.greeting())
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._owner.hello_timeout, self._refuse, "no hello in time")
        self._owner.connected(self)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        try:
            for message in self._session.feed(data):
                self._accept(message)
        except WireError as error:
            self._refuse(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._owner.disconnected(self)

    def send(self, message: Message) -> None:
        """Queue `message` for the peer; nothing happens if it is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, encoded: bytes) -> None:
        """As `send`, of what `wire.encode` gave: for what many are told."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(self._session.seal_encoded(encoded))
        if self._transport.get_write_buffer_size() > _UNREAD_LIMIT:
            self._refuse("it does not read what it is sent")

    def close(self) -> None:
        """Close after what is queued has been sent."""
        if self._transport is not None:
            self._transport.close()

    def _accept(self, data: dict[str, Any]) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        role = self.role or _role(data)
        message: Message = _ROLES[role].read(data)
        if self.role is not None and message.type == "hello":
            raise WireError("a second hello on one connection")
        if self.guest:
            self._check_guest(role, message)
        if isinstance(message, Heard) and message.incarnation != self.incarnation:
            raise WireError(f"{message.type}: it speaks for another one, {message.incarnation!r:.60}")
        self.role = role
        if self._deadline is not None:
            self._deadline.cancel()
        self._owner.received(self, message)

    def _check_guest(self, role: str, message: Message) -> None:
        if isinstance(message, WorkerHello) and not message.incarnation.startswith(GUEST):
            raise WireError("the secret of hosts that join is no worker's that the job began with")
        if role == "operator":
            raise WireError("a job is asked and commanded with its token, not with the secret of hosts that join")
        if isinstance(message, Interrupt):
            raise WireError(f"{message.type} needs the job's token, not the secret of hosts that join")

    def _refuse(self, reason: str) -> None:
        self._owner.refused(self.source, reason)
        if self._transport is not None:
            self._transport.abort()


def _role(hello: dict[str, Any]) -> str:
    """The role of one that says hello. Raises WireError."""
    try:
        if (role := _HELLO.read(hello).role) in _ROLES:
            return role
    except WireError:
        pass
    raise WireError("the first message is no hello of any role")
