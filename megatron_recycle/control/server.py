"""The control server: connections in, checked messages out of them, and messages out. It decides nothing; a `Hearer`
takes the messages.

A peer that does not prove the token in time, sends a message that is not due, or does not read, is disconnected. No
message is acted on before its whole frame has been authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from megatron_recycle.control.admission import AcceptQueue, GuestPermissions, Unauthenticated, of_guests, part
from megatron_recycle.control.parcels import Parcels
from megatron_recycle.control.ports import joined
from megatron_recycle.control.rendezvous_store import RendezvousStore
from megatron_recycle.control.sockets import SIGN_S, watch_peer
from megatron_recycle.control.wire import GUEST, SecureChannel, encode
from megatron_recycle.membership import messages
from megatron_recycle.membership.decisions import Tell
from megatron_recycle.membership.detectors import RateLimit
from megatron_recycle.membership.inputs import (
    FROM_LAUNCHER,
    FROM_WORKER,
    FromLauncher,
    FromWorker,
    Heard,
    WorkerHello,
)
from megatron_recycle.membership.protocol import (
    FROM_NEWCOMER,
    FROM_OPERATOR,
    FROM_STORE,
    Ask,
    End,
    Fetch,
    Fetched,
    FirstHello,
    Found,
    Interrupt,
    Kinds,
    LauncherHello,
    Lives,
    Message,
    NewcomerHello,
    Order,
    StoreHello,
    Welcome,
    WireError,
)
from megatron_recycle.membership.state import State

_ROLES: Mapping[str, Kinds[Any]] = {
    "worker": FROM_WORKER, "launcher": FROM_LAUNCHER, "newcomer": FROM_NEWCOMER, "store": FROM_STORE,
    "operator": FROM_OPERATOR}
_HELLO: Kinds[FirstHello] = Kinds(FirstHello)
_UNREAD_LIMIT = 32 * 1024 * 1024
"""Bytes buffered for a peer before it is disconnected."""
_UNANSWERED = 30.0
"""Seconds after which a connection ends if the peer's kernel acknowledges nothing. Whether the peer is a member is
decided long before, by its heartbeats; this only keeps dead connections from piling up."""
_SPARE_STRANGERS = 1000
"""Connections without a hello, beside one for each worker. With thousands of workers, processes with the token need
this room to have the time to say hello; each costs a descriptor, and 64 KiB at most."""

_OWN_EACH, _OWN, _LEAST = 4, 128, 16
"""Descriptors for each worker and for the coordinator itself; the least number of connections in any case."""
_LOGGED = 100
"""Addresses whose refusal is logged per minute: a line costs as much as ten connections."""

log = logging.getLogger(__name__)


def _room(size: int) -> int:
    """Limit of admitted connections without a hello, and of waiting ones: no more than there are descriptors for,
    beside the job's own."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    left = size + _SPARE_STRANGERS if limit == resource.RLIM_INFINITY else (limit - _OWN_EACH * size - _OWN) // 2
    return max(_LEAST, min(size + _SPARE_STRANGERS, left))


class Hearer(Protocol):
    """Takes incoming messages, in the event loop. They are checked, and their senders have proved the token."""

    @property
    def state(self) -> State: ...

    def worker_came(self, message: WorkerHello) -> None: ...
    def worker_gone(self, incarnation: str) -> None: ...
    def from_worker(self, incarnation: str, message: FromWorker) -> None: ...
    def launcher_came(self, connection: Connection, host: str, joins: Sequence[int]) -> None: ...
    def launcher_gone(self, host: str) -> None: ...
    def from_launcher(self, connection: Connection, host: str, message: FromLauncher) -> None: ...
    def from_operator(self, connection: Connection, message: Order) -> None: ...
    def operator_gone(self, connection: Connection) -> None: ...
    def refused(self, source: str, reason: str) -> None: ...


class Server:
    """The connections of one job's processes.

    Args:
        size: number of workers.
        token: the job's token.
        hello_timeout: seconds that a connection has to say hello.
        store: the content of torch's store; without one, a new one.

    Attributes:
        workers: the connection of each process, by incarnation.
        launchers: the connections of launchers.
        store: the content of torch's store.
        parcels: large messages.
    """

    def __init__(self, size: int, token: str, hello_timeout: float, hearer: Hearer,
                 store: RendezvousStore | None = None) -> None:
        self.token = token
        self.hello_timeout = hello_timeout
        self.workers: dict[str, Connection] = {}
        self.launchers: set[Connection] = set()
        self.strangers: Unauthenticated[Connection] = Unauthenticated(_room(size))
        self.store = RendezvousStore() if store is None else store
        self.parcels = Parcels()
        self._guests = GuestPermissions()
        self._size = size
        self._hearer = hearer
        self._connections: set[Connection] = set()
        self._refusals: RateLimit[str] = RateLimit(60.0, _LOGGED)
        self._quiet = asyncio.Event()
        self._met: set[str] = set()
        self._meeting = asyncio.Event()
        self._accept_queue: AcceptQueue | None = None

    async def start(self, listener: socket.socket | None) -> str:
        """Listen, by default on any free port of 127.0.0.1; returns "host:port"."""
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self._accept_queue = AcceptQueue(listener, _room(self._size), lambda: Connection(self), self._turned_away)
        self._accept_queue.open()
        host, port = listener.getsockname()[:2]
        return joined(host, port)

    async def wait_launchers(self, hosts: Collection[str], seconds: float) -> None:
        """Wait for the launchers of these ``hosts``, at most so many ``seconds``."""
        async def come() -> None:
            while not self._met.issuperset(hosts):
                self._meeting.clear()
                await self._meeting.wait()

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(come(), seconds)

    async def wait_quiet(self, linger: float | None) -> None:
        """Wait until all connections have ended, at most `linger` seconds (None: no limit)."""
        try:
            await asyncio.wait_for(self._quiet.wait(), linger)
        except asyncio.TimeoutError:
            log.info("recycle: %d connections are still open", len(self._connections))

    def stop_listening(self) -> None:
        """Refuse new connections; existing ones stay."""
        if self._accept_queue is not None:
            self._accept_queue.close()
            self._accept_queue = None

    async def close(self) -> None:
        """Stop listening, and end all connections once all queued messages have been sent."""
        self.stop_listening()
        for connection in tuple(self._connections):
            connection.close()
        await asyncio.sleep(0)  # the connections notice

    # Out

    def tell(self, decision: Tell) -> None:
        """Send a message to all connected receivers. Raises TooLarge."""
        for form in messages.wire_forms(decision):
            encoded = encode(self.parcels.form(form.message))
            for incarnation in form.to:
                if (connection := self.workers.get(incarnation)) is not None:
                    connection.send_encoded(encoded)

    async def give_signs(self, several: bool) -> None:
        """Send a heartbeat each second to launchers, one of which keeps this coordinator's process; with ``several``
        coordinators to all peers that would otherwise turn to another one."""
        sign = encode(Lives())
        while True:
            waiting = self.store.waiting if several else ()
            for connection in tuple(self._connections):
                if connection.role == "launcher" or connection in waiting or (several and connection.role == "worker"):
                    connection.send_encoded(sign)
            await asyncio.sleep(SIGN_S)

    def tell_launchers(self, message: Message) -> None:
        """Send a message to every launcher."""
        for launcher in self.launchers:
            launcher.send(message)

    # In (called by the connections)

    def connected(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._quiet.clear()
        if (oldest := self.strangers.came(connection, connection.source)) is not None:
            self.refused(oldest.source, f"{len(self.strangers)} connections have not said hello yet")
            oldest.close()

    def _turned_away(self, source: str) -> None:
        self.refused(source, "more come at once than can be let in")

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.strangers.gone(connection)
        self.launchers.discard(connection)
        self.store.gone(connection)
        self.parcels.gone(connection)
        if connection.role == "operator":
            self._hearer.operator_gone(connection)
        if connection.host is not None and all(other.host != connection.host for other in self.launchers):
            self._hearer.launcher_gone(connection.host)
        worker = connection.incarnation
        if worker is not None and self.workers.get(worker) is connection:
            del self.workers[worker]
            self._hearer.worker_gone(worker)
        if not self._connections:
            self._quiet.set()

    def refused(self, source: str, reason: str) -> None:
        """Log the refusal of a stranger or a broken peer, which may not fill the log."""
        if self._refusals.allows(source, time.monotonic()):
            log.warning("recycle: refused a connection from %s: %s", source, reason)
            self._hearer.refused(source, reason)

    def received(self, connection: Connection, message: Any) -> None:
        """A checked message of an authenticated peer."""
        self.strangers.gone(connection)
        if connection.role == "launcher":
            self._from_launcher(connection, message)
        elif isinstance(message, NewcomerHello):
            connection.send(messages.learnt(self._hearer.state, message.rank))
        elif isinstance(message, StoreHello):
            connection.send(Welcome(self.store.name))
        elif isinstance(message, Ask):
            self._ask(connection, message)
        elif isinstance(message, Order):
            self._hearer.from_operator(connection, message)
        elif isinstance(message, WorkerHello):
            self._welcome(connection, message)
        elif isinstance(message, Fetch):
            self.parcels.fetch(connection, message, connection.send_encoded)
        elif isinstance(message, Fetched):
            self.parcels.fetched(connection, message)
        elif connection.incarnation is not None:
            self._hearer.from_worker(connection.incarnation, message)

    def _ask(self, connection: Connection, message: Ask) -> None:
        if connection.guest:
            state = self._hearer.state
            if message.op == "tell":
                message = self._guests.tellable(message, part(state), self._has_value)
                if not of_guests(state, message.number):
                    message = replace(message, number=-1)
            elif why := self._guests.refusal(message, part(state), self._has_value):
                connection.send(Found(error=why))
                return
        self.store.ask(connection, message, connection.send)

    def _has_value(self, key: str) -> bool:
        """Whether the store has a value for this key."""
        found: list[Found] = []
        self.store.ask(None, Ask("check", (key,)), found.append)
        return bool(found and found[0].number)

    def _from_launcher(self, connection: Connection, message: FromLauncher) -> None:
        if isinstance(message, LauncherHello) and message.size not in (None, self._size):
            why = (f"{message.host} starts a part of a job of {message.size} workers, and this coordinator's job "
                   f"has {self._size}: give the same --nnodes and --nproc on each host, or another --coordinator")
            connection.send(End(1, why))
        elif isinstance(message, LauncherHello):
            if connection.guest and any(one.host == message.host and not one.guest for one in self.launchers):
                raise WireError(f"{message.host!r:.60} is a host of the job's own")
            connection.host, connection.places = message.host, message.places
            self.launchers.add(connection)
            self._met.add(connection.host)
            self._meeting.set()
            self._hearer.launcher_came(connection, message.host, () if message.places else message.ranks)
        else:
            if connection.host is None:
                return  # of another job
            self._hearer.from_launcher(connection, connection.host, message)

    def _welcome(self, connection: Connection, message: WorkerHello) -> None:
        connection.incarnation = message.incarnation
        before = self.workers.get(message.incarnation)
        self.workers[message.incarnation] = connection
        if before is not None and before is not connection:
            before.close()
        self._hearer.worker_came(message)


class Connection(asyncio.Protocol):
    """`role` is "worker", "launcher", "newcomer", "store" (a process at the job's store) or "operator" once the peer
    has said hello; `incarnation` (a worker's), `host` and `places` (a launcher's: the processes that its host can start
    in the job's next life) are set by the owner. `heard` is the time of the last received data (monotonic)."""

    @property
    def guest(self) -> bool:
        """Whether the peer is a guest: it has the secret for joining, not the job's token."""
        return self._session.guest

    def __init__(self, server: Server) -> None:
        self.role: str | None = None
        self.incarnation: str | None = None
        self.host: str | None = None
        self.places = 0
        self.heard = time.monotonic()
        self.source = "?"
        self._server = server
        self._session = SecureChannel.server(server.token)
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
        self._deadline = loop.call_later(self._server.hello_timeout, self._refuse, "no hello in time")
        self._server.connected(self)

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
        self._server.disconnected(self)

    def send(self, message: Message) -> None:
        """Queue `message` for the peer; a no-op if it is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, encoded: bytes) -> None:
        """As `send`, for the result of `wire.encode`: for messages to many peers."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(self._session.seal_encoded(encoded))
        if self._transport.get_write_buffer_size() > _UNREAD_LIMIT:
            self._refuse("it does not read what it is sent")

    def close(self) -> None:
        """Close once all queued messages have been sent."""
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
        self._server.received(self, message)

    def _check_guest(self, role: str, message: Message) -> None:
        if isinstance(message, WorkerHello) and not message.incarnation.startswith(GUEST):
            raise WireError("the secret of hosts that join is no worker's that the job began with")
        if role == "operator":
            raise WireError("a job is asked and commanded with its token, not with the secret of hosts that join")
        if isinstance(message, Interrupt):
            raise WireError(f"{message.type} needs the job's token, not the secret of hosts that join")

    def _refuse(self, reason: str) -> None:
        self._server.refused(self.source, reason)
        if self._transport is not None:
            self._transport.abort()


def _role(hello: dict[str, Any]) -> str:
    """The role in a hello. Raises WireError."""
    try:
        if (role := _HELLO.read(hello).role) in _ROLES:
            return role
    except WireError:
        pass
    raise WireError("the first message is no hello of any role")
