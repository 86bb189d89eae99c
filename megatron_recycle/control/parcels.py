"""Parcels: messages too large for sending to each process, announced by digest and fetched once per host.

A go and an offer contain a plan, and are the same for all receivers. The coordinator packs such a message once and
announces its digest, a `parcel`; a short message travels inside it. Otherwise a process asks for it part by part
(`fetch`). Of processes with a common host memory (`host_memory`) the first to ask, the carrier, copies it there and
reports that (`fetched`); the others wait until it is `there`. If the carrier's connection is lost, the next process
carries. A process without host memory, or one that finds another content in it, asks for the parts itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_recycle.control.host_memory import HostMemory
from megatron_recycle.control.wire import encode
from megatron_recycle.membership.protocol import (
    MOST_BYTES,
    Fetch,
    Fetched,
    Go,
    Kinds,
    Message,
    Offer,
    Parcel,
    Part,
    There,
    TooLarge,
    WireError,
)

SHORT = 16 * 1024
"""Size limit of a packed message inside its parcel: asking for it would take longer."""
PART = 128 * 1024
"""Bytes of a part: the most that is buffered for each host that does not read."""
Large = Go | Offer
_LARGE: Kinds[Large] = Kinds(Large)
_LEVEL = 3
"""zlib level: 0.06 s for the plan of 4,096 workers; the default takes three times as long, and saves a tenth."""
_REMEMBERED = 2
"""The latest messages of each type to keep: the one in force, and the one before, for processes that lag behind."""

Send = Callable[[bytes], None]


@dataclass
class _Shared:
    """A parcel on its way to one host's memory. Without a carrier it is there."""

    carrier: object | None
    waiting: dict[object, Send] = field(default_factory=dict)

    def tell_all(self, answer: bytes) -> None:
        """Answer all waiting processes."""
        while self.waiting:
            self.waiting.popitem()[1](answer)


@dataclass(frozen=True)
class _Packed:
    kind: str
    parts: tuple[bytes, ...]
    shared: dict[str, _Shared] = field(default_factory=dict)


class Parcels:
    """The coordinator's parcels. ``connection`` is the asking one."""

    def __init__(self) -> None:
        self._packed: dict[str, _Packed] = {}
        self._asks: dict[object, tuple[str, str]] = {}  # by connection the digest that it asks for, and its host memory
        self._last: deque[tuple[Message, Parcel]] = deque(maxlen=2 * _REMEMBERED)

    def form(self, message: Message) -> Message:
        """The form of this message on the wire: itself, or its parcel. Raises TooLarge."""
        if not isinstance(message, (Go, Offer)):
            return message
        parcel = next((parcel for known, parcel in self._last if known is message), None)
        if parcel is None or parcel.digest not in self._packed:
            parcel = self._pack(message)
            self._last.append((message, parcel))
        return parcel

    def _pack(self, message: Large) -> Parcel:
        text = encode(message)
        if len(text) > MOST_BYTES:
            raise TooLarge(f"a {message.type} of {len(text)} bytes exceeds {MOST_BYTES}: the plan has too many "
                            "micro-batches for its number of workers")
        content = zlib.compress(text, _LEVEL)
        digest = hashlib.sha256(content).hexdigest()
        short = content if len(content) <= SHORT else b""
        parcel = Parcel(message.generation, digest, base64.b64encode(short).decode())
        pieces = [content[at:at + PART] for at in range(0, len(content), PART)]
        parts = tuple(_part(digest, number, len(pieces), piece) for number, piece in enumerate(pieces))
        self._packed[digest] = self._packed.pop(digest, _Packed(message.type, parts))
        oldest, *others = (known for known, packed in self._packed.items() if packed.kind == message.type)
        if len(others) >= _REMEMBERED:
            for shared in self._packed.pop(oldest).shared.values():
                shared.tell_all(_unknown(oldest))
        return parcel

    def fetch(self, connection: object, ask: Fetch, send: Send) -> None:
        """This process asks for a part; for the first part it may have to wait."""
        digest, number, memory = ask.digest, ask.part, ask.memory
        packed = self._packed.get(digest)
        if self._asks.get(connection) != (digest, memory):
            self.gone(connection)
            self._asks[connection] = digest, memory
        if packed is None or not 0 <= number < len(packed.parts):
            send(_unknown(digest))
            return
        if number or not memory:
            send(packed.parts[number])
            return
        shared = packed.shared.setdefault(memory, _Shared(connection))
        if shared.carrier is None:
            send(_there(digest))
        elif shared.carrier is connection:
            send(packed.parts[0])
        else:
            shared.waiting[connection] = send

    def fetched(self, connection: object, done: Fetched) -> None:
        """This process has put it into its host's memory, as far as possible."""
        packed = self._packed.get(done.digest)
        shared = None if packed is None else packed.shared.get(done.memory)
        if shared is not None and shared.carrier is connection:
            shared.carrier = None
            shared.tell_all(_there(done.digest))

    def gone(self, connection: object) -> None:
        """This connection has ended, or asks for another parcel: a waiting process becomes carrier in its place."""
        digest, memory = self._asks.pop(connection, ("", ""))
        packed = self._packed.get(digest)
        shared = None if packed is None else packed.shared.get(memory)
        if packed is None or shared is None:
            return
        shared.waiting.pop(connection, None)
        if shared.carrier is not connection:
            return
        if not shared.waiting:
            del packed.shared[memory]
            return
        shared.carrier = next(iter(shared.waiting))
        shared.waiting.pop(shared.carrier)(packed.parts[0])


class Arrivals:
    """A worker's parcels, turned back into messages, in the order of their announcement. All of it runs in one thread.

    Args:
        send: to the coordinator.
        handle: gets each message, checked.
        memory: the host memory.
    """

    def __init__(self, send: Callable[[Message], None], handle: Callable[[Large], None],
                 memory: HostMemory | None) -> None:
        self._send = send
        self._handle = handle
        self._memory = memory
        self._due: deque[Parcel] = deque()
        self._parts: list[bytes] = []
        self._handled: dict[str, str] = {}  # by type the digest of the last one

    def told(self, parcel: Parcel) -> None:
        """A message is announced. Repetitions after a reconnect are ignored."""
        known = (*self._handled.values(), *(other.digest for other in self._due))
        if parcel.digest not in known:
            self._due.append(parcel)
            if len(self._due) == 1:
                self._next()

    def came(self, part: Part) -> None:
        """A part has come. Raises WireError if the whole does not match the announcement, or is no message."""
        if not self._waits_for(part):
            self._send_fetched(part)  # requested before a reconnect: free the processes that wait for this carrier
            return
        if not part.parts:  # long since replaced by a newer message
            self._due.popleft()
            self._next()
            return
        if part.part != len(self._parts):
            return  # a duplicate
        self._parts.append(_decoded(part.data))
        if len(self._parts) < part.parts:
            self._ask()
            return
        content = b"".join(self._parts)
        if self._memory is not None:
            self._memory.write(content)
        self._send_fetched(part)
        self._arrived(content)
        self._next()

    def there(self, message: There) -> None:
        """The message is in the host's memory, unless overwritten since. Raises WireError as `came` does."""
        if self._waits_for(message):
            if (content := self._remembered()) is None:
                self._ask(alone=True)
                return
            self._arrived(content)
            self._next()

    def over(self, generation: int) -> None:
        """Parcels of earlier generations are void."""
        first = self._due[0] if self._due else None
        self._due = deque(parcel for parcel in self._due if parcel.generation >= generation)
        if self._due and self._due[0] is not first:
            self._next()

    def forget(self) -> None:
        """The connection was lost: the coordinator will repeat the parcels that this process has not handled."""
        self._due.clear()

    def _send_fetched(self, part: Part) -> None:
        if self._memory is not None:
            self._send(Fetched(part.digest, self._memory.name))

    def _waits_for(self, message: Part | There) -> bool:
        return bool(self._due) and self._due[0].digest == message.digest

    def _next(self) -> None:
        """Handle all available parcels, and ask for the first missing one."""
        self._parts = []
        while self._due:
            content = _decoded(self._due[0].data) or self._remembered()
            if content is None:
                self._ask()
                return
            self._arrived(content)

    def _remembered(self) -> bytes | None:
        return None if self._memory is None else self._memory.read(self._due[0].digest)

    def _ask(self, alone: bool = False) -> None:
        memory = "" if alone or self._memory is None else self._memory.name
        self._send(Fetch(self._due[0].digest, len(self._parts), memory))

    def _arrived(self, content: bytes) -> None:
        parcel = self._due.popleft()
        self._parts = []
        message = opened(content, parcel)
        self._handled[message.type] = parcel.digest
        self._handle(message)


def opened(content: bytes, parcel: Parcel) -> Large:
    """The message that this parcel announced. Raises WireError."""
    if hashlib.sha256(content).hexdigest() != parcel.digest:
        raise WireError("a message is not the one whose digest was told")
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(content, MOST_BYTES)
        if not unpacking.eof:
            raise WireError(f"a message exceeds {MOST_BYTES} bytes, or is cut short")
        message = json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise WireError(f"a message cannot be unpacked: {error}") from error
    try:
        return _LARGE.read(message)
    except WireError as error:
        raise WireError(f"a parcel holds no message that travels so: {error}") from error


def _part(digest: str, number: int, parts: int, data: bytes) -> bytes:
    """A part, ready to be sealed; with 0 ``parts``: the message is unknown, or no longer kept."""
    return encode(Part(digest, number, parts, base64.b64encode(data).decode()))


def _unknown(digest: str) -> bytes:
    return _part(digest, 0, 0, b"")


def _there(digest: str) -> bytes:
    return encode(There(digest))


def _decoded(data: str) -> bytes:
    """Raises WireError."""
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise WireError(f"a part is no base64: {error}") from error
