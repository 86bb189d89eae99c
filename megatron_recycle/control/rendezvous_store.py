"""The content of torch's rendezvous store, in the coordinator: how a job's processes exchange data before they connect.

It lives in memory. A restarted coordinator, or a new leader, has an empty store of another name; the processes, which
remember their own values, send them again (`tell`). Every value has a stamp, and the latest one counts, so the order of
senders does not matter.

Operations that are not idempotent, or need complete knowledge (counts, appended text, comparisons), are exact all the
same. A process's requests have names, and each receiver of a value also gets the requests that made it (`marks`). So a
repeated request, whose answer was lost with its coordinator, is recognised even if only another process has seen its
effect. And until all processes have sent their knowledge (`gather`), no answer is based on it.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership.protocol import Ask, Found, Mark

MOST_BYTES = 1 << 30
"""Limit of all keys and values together, with their overhead."""
LARGEST = 2 << 20
"""Size limit of one value, and of one answer, which is one message."""
TOO_MUCH = "more than an answer holds: ask for one at a time"
OWN = "recycle/"
"""Prefix of the plugin's own keys."""
ENTRY_BYTES = 200
"""Overhead of a key beside its text and its value."""
DELETED = 4096
"""How many deleted keys are remembered, so that an older value sent later does not bring one back."""
_TERM_BITS, _DAY = 32, 86400
"""The high bits of a stamp are the term, or the second in which the coordinator started; a clock may go back."""
_GENERATION = re.compile(OWN + r"g(\d+)-")
_SLOTS = 1 << 16
_WAITS = ("get", "wait", "around")
_AT_ONCE = ("tell", "wait", "around")
"""Requests that can be answered before all processes have sent their knowledge."""

Send = Callable[[Found], None]


@dataclass
class _Waiting:
    """A request without an answer yet: for ``missing`` keys, or for processes that have not sent their knowledge."""

    message: Ask
    send: Send
    missing: set[str] = field(default_factory=set)


class Marks:
    """Idempotency keys: remembers each client's last request, so that a retry is answered, not repeated.

    A process asks in slots, one request after the other in each, and numbers its requests. So the last mark of a slot
    tells whether a retried request was carried out, and with which answer. A request that has changed nothing has no
    key.
    """

    def __init__(self) -> None:
        self._of_slot: dict[str, Mark] = {}
        self._of_key: dict[str, set[str]] = {}

    def put(self, slot: str, mark: Mark) -> None:
        """The slot's request was carried out, unless a later one is known."""
        before = self._of_slot.get(slot)
        if before is not None and (before[0] > mark[0] or (before[0] == mark[0] and before[2])):
            return
        self._drop(slot)
        self._of_slot[slot] = mark
        if mark[2]:
            self._of_key.setdefault(mark[2], set()).add(slot)
        if len(self._of_slot) > _SLOTS:
            self._drop(next(iter(self._of_slot)))

    def get(self, slot: str) -> Mark:
        return self._of_slot.get(slot, (-1, 0, ""))

    def on(self, keys: Iterable[str]) -> dict[str, Mark]:
        """The marks of requests that have changed one of ``keys``."""
        return {slot: self._of_slot[slot] for key in keys for slot in self._of_key.get(key, ())}

    def _drop(self, slot: str) -> None:
        _, _, key = self._of_slot.pop(slot, (-1, 0, ""))
        if key:
            self._of_key[key].discard(slot)
            if not self._of_key[key]:
                del self._of_key[key]


class RendezvousStore:
    """Keys with values, each with the stamp of its last change (None: deleted).

    Args:
        term: the number of this store among the job's; later stores have higher ones.
        most: bytes.
        leads: whether this coordinator still leads. Otherwise the store does not answer.

    Attributes:
        name: a unique name; see `term_of`.
    """

    def __init__(self, term: int | None = None, most: int = MOST_BYTES, leads: Callable[[], bool] = lambda: True
                 ) -> None:
        self.name = f"{term or 0}.{secrets.token_hex(8)}"
        self._most = most
        self._leads = leads
        self._stamp = (int(time.time()) if term is None else term) << _TERM_BITS
        self._latest = self._stamp + (1 << _TERM_BITS) * (_DAY if term is None else 1)
        self._values: dict[str, tuple[int, bytes | None]] = {}
        self._folders: dict[str, dict[str, None]] = {}
        """By folder (the part before the last slash), the keys that have a value."""
        self._marks = Marks()
        self._deleted: dict[str, None] = {}
        self._bytes = 0
        self._forgotten = 0
        self._waiting: dict[object, _Waiting] = {}
        self._wanted: dict[str, set[object]] = {}
        self._held: dict[object, _Waiting] = {}
        self._pending: set[int] = set()

    def ask(self, connection: object, message: Ask, send: Send) -> None:
        """Answer ``message`` of ``connection`` by ``send``, at once or when the awaited keys are there. A
        connection has one request at a time."""
        if not self._leads():
            return  # the client will turn to the leader
        if self._pending and message.op not in _AT_ONCE and not _own(message.keys):
            self._held[connection] = _Waiting(message, send)
            return
        try:
            values = [None if one is None else base64.b64decode(one, validate=True) for one in message.values]
            if len(values) not in (len(message.keys), 0) and message.op != "compare_set":
                raise ValueError(f"{len(message.keys)} keys and {len(values)} values")
            self._ask(connection, message, message.keys, values, send)
        except (ValueError, IndexError, OverflowError, TypeError, binascii.Error) as error:
            send(_answer(error=f"{message.op!r:.40}: {error}"))

    def gone(self, connection: object) -> None:
        """This connection has ended: its pending request is dropped."""
        self._held.pop(connection, None)
        if (request := self._waiting.pop(connection, None)) is not None:
            for key in request.missing:
                self._wanted[key].discard(connection)
                if not self._wanted[key]:
                    del self._wanted[key]

    @property
    def waiting(self) -> frozenset[object]:
        """The connections that wait for an answer."""
        return frozenset((*self._waiting, *self._held))

    def gather(self, ranks: Iterable[int]) -> None:
        """This store follows another one: each of these processes must first send its knowledge."""
        self._pending = set(ranks)

    def gathered(self) -> None:
        """No more knowledge will come: answer the requests that have waited for it."""
        self._pending.clear()
        held, self._held = self._held, {}
        for connection, request in held.items():
            self.ask(connection, request.message, request.send)

    def forget(self, generation: int) -> None:
        """The keys of this generation and of earlier ones are no longer needed."""
        if generation <= self._forgotten:
            return
        self._forgotten = generation
        for key in [key for key in self._values if self._is_forgotten(key)]:
            self._remove(key)

    def __len__(self) -> int:
        """The number of remembered keys, deleted ones included."""
        return len(self._values)

    def _ask(self, connection: object, message: Ask, keys: Sequence[str], values: Sequence[bytes | None],
             send: Send) -> None:
        op, (slot, number) = message.op, _named(message.once)
        last, result, changed = self._marks.get(slot)
        if slot and last > number:
            return  # of a connection that its process has left long ago
        if slot and last == number and changed:  # carried out, and the answer lost
            stamp, value = self._values.get(changed, (0, None))
            send(_answer([value], result, stamp, marks=self._marks.on(keys)))
            return
        if slot:
            self._marks.put(slot, (number, 0, ""))
        if op in _WAITS:
            missing = {key for key in keys if self._get(key) is None}
            if not missing:
                send(self._found(message))
            else:
                self._waiting[connection] = _Waiting(message, send, missing)
                for key in missing:
                    self._wanted.setdefault(key, set()).add(connection)
        elif op == "check":
            send(_answer(number=int(all(self._get(key) is not None for key in keys))))
        elif op == "count":
            send(_answer(number=len(self._values) - len(self._deleted)))
        elif op == "list":
            send(self._listed())
        elif op == "tell":
            self._restore(message, keys, values, send)
        else:
            self._change(message, (slot, number), keys, values, send)

    def _restore(self, message: Ask, keys: Sequence[str], values: Sequence[bytes | None], send: Send) -> None:
        for key, value, stamp in zip(keys, values, message.stamps, strict=True):
            if not 0 <= stamp < self._latest:
                raise ValueError(f"{stamp!r:.30} is no stamp")
            self._stamp = max(self._stamp, stamp)
            self._put(key, value, stamp)
        for slot, mark in message.marks.items():
            self._marks.put(slot, mark)
        send(_answer())
        if message.number in self._pending:
            self._pending.discard(message.number)
            if not self._pending:
                self.gathered()

    def _change(self, message: Ask, name: tuple[str, int], keys: Sequence[str], values: Sequence[bytes | None],
                send: Send) -> None:
        """Carry out a changing request. The answer has the stamp of the change, which its author keeps with it."""
        op, now = message.op, self._get(keys[0]) if keys else None
        number, put = 0, list(zip(keys, values, strict=False))
        if op == "add":
            number = _number(now) + message.number
            put = [(keys[0], str(number).encode())] if now is None or message.number else []
        elif op == "append":
            put = [(keys[0], (now or b"") + (values[0] or b""))]
        elif op == "compare_set":
            expected, desired = values
            put = [(keys[0], desired)] if now == expected or (now is None and not expected) else []
            number = len(put)
        elif op == "delete":
            number = sum(self._get(key) is not None for key in keys)
            put = [(key, None) for key in keys] if number else []
        elif op != "set":
            raise ValueError("no such operation")
        if not put:
            send(_answer([values[0] if op == "compare_set" and now is None else now], number))
            return
        self._check_room(put)
        self._stamp += 1
        for key, value in put:
            self._put(key, value, self._stamp)
        if name[0] and len(keys) == 1 and not (op == "set" and _own(keys)):
            self._marks.put(name[0], (name[1], number, keys[0]))
        last = () if op == "set" else [self._get(key) for key in keys]
        send(_answer(last, number, self._stamp, marks=self._marks.on(keys)))

    def _get(self, key: str) -> bytes | None:
        return self._values.get(key, (0, None))[1]

    def _check_room(self, put: Iterable[tuple[str, bytes | None]]) -> None:
        """Raise ValueError if the values are too large."""
        more = 0
        for key, value in put:
            if len(key) + len(value or b"") > LARGEST:
                raise ValueError(f"a value has {len(value or b'')} bytes, and may have {LARGEST}")
            more += _size(key, value) - (_size(key, self._values[key][1]) if key in self._values else 0)
        if more > 0 and self._bytes + more > self._most:
            raise ValueError(f"the job's store is full ({self._most >> 20} MiB): it is for addresses, not for data")

    def _put(self, key: str, value: bytes | None, stamp: int) -> None:
        before = self._values.get(key)
        if (before is not None and stamp < before[0]) or self._is_forgotten(key):
            return
        self._check_room([(key, value)])
        self._bytes += _size(key, value) - (0 if before is None else _size(key, before[1]))
        self._values[key] = stamp, value
        self._deleted.pop(key, None)
        if value is None:
            self._leave_folder(key)
            self._deleted[key] = None
            if len(self._deleted) > DELETED:
                self._remove(next(iter(self._deleted)))
            return
        self._folders.setdefault(_folder(key), {})[key] = None
        for connection in self._wanted.pop(key, ()):
            waiting = self._waiting[connection]
            waiting.missing.discard(key)
            if not waiting.missing:
                del self._waiting[connection]
                waiting.send(self._found(waiting.message))

    def _is_forgotten(self, key: str) -> bool:
        return (generation_of(key) or self._forgotten + 1) <= self._forgotten

    def _remove(self, key: str) -> None:
        self._leave_folder(key)
        self._deleted.pop(key, None)
        self._bytes -= _size(key, self._values.pop(key)[1])

    def _leave_folder(self, key: str) -> None:
        folder = self._folders.get(_folder(key), {})
        folder.pop(key, None)
        if not folder:
            self._folders.pop(_folder(key), None)

    def _found(self, message: Ask) -> Found:
        """The answer to a reading request; with `around`, including all other keys in the same folders."""
        if message.op == "around":
            beside = [key for folder in {*map(_folder, message.keys)} for key in self._folders.get(folder, ())]
            keys = list(dict.fromkeys((*message.keys, *beside)))
            values = [self._get(key) for key in keys]
            if sum(len(key) + len(value or b"") for key, value in zip(keys, values, strict=True)) <= LARGEST:
                return replace(_answer(values), keys=tuple(keys))
        values = [] if message.op == "wait" else [self._get(key) for key in message.keys]
        if len(values) > 1 and sum(len(value or b"") for value in values) > LARGEST:
            return _answer(error=TOO_MUCH)
        return _answer(values)

    def _listed(self) -> Found:
        keys = [key for key in self._values if key not in self._deleted]
        if sum(len(key) + 8 for key in keys) > LARGEST:
            raise ValueError(f"{len(keys)} keys are more than an answer holds")
        return Found(keys=tuple(keys))


def _answer(values: Sequence[bytes | None] = (), number: int = 0, stamp: int = 0, error: str = "",
            marks: Mapping[str, Mark] | None = None) -> Found:
    return Found(values=encoded(values), number=number, stamp=stamp, marks=marks or {}, error=error)


def generation_of(key: str) -> int | None:
    """The generation whose members meet by this key; None: it belongs to none."""
    found = _GENERATION.match(key)
    return None if found is None else int(found[1][:18])


def term_of(name: str) -> int:
    """The term in this store's name; 0: there is none, or no store yet."""
    return int(name.partition(".")[0] or 0)


def _named(once: str) -> tuple[str, int]:
    """Slot and number in a request's name, ``SLOT:NUMBER``; an empty name has no slot. Raises ValueError."""
    slot, _, number = once.rpartition(":")
    return (slot, int(number)) if once else ("", -1)


def _own(keys: Sequence[str]) -> bool:
    """Whether all keys are the plugin's: after a loss the plugin meets again by other keys."""
    return bool(keys) and all(key.startswith(OWN) for key in keys)


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _size(key: str, value: bytes | None) -> int:
    return ENTRY_BYTES + len(key) + len(value or b"")


def _number(value: bytes | None) -> int:
    """A number as torch keeps it: as text."""
    return 0 if value is None else int(value)


def encoded(values: Sequence[bytes | None]) -> tuple[str | None, ...]:
    """Values in JSON form."""
    return tuple(None if one is None else base64.b64encode(one).decode() for one in values)


def decoded(values: Sequence[Any]) -> list[bytes]:
    """The inverse of `encoded`; missing values become empty."""
    return [b"" if one is None else base64.b64decode(one) for one in values]
