"""What a job's processes tell each other before they can talk: the content of torch's store, in the coordinator.

It lives in memory. A coordinator that comes back has an empty shelf of another name; the processes, which remember what
they have put there, tell it again (`tell`). Every value has a stamp, and the latest one counts, so it does not matter
who tells what first.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.control.wire import Message

MOST_BYTES = 1 << 30
"""All values together."""
LARGEST = 2 << 20
"""Bytes of one value, and of all that is asked for at once: an answer is one message."""
TOO_MUCH = "more than an answer holds: ask for one at a time"
_REMEMBERED = 4096
_WAITS = ("get", "wait", "around")

Send = Callable[[Message], None]


@dataclass
class _Waiting:
    """An ask that is answered once all ``missing`` keys are there."""

    message: Message
    send: Send
    missing: set[str]


@dataclass
class Shelf:
    """Keys with values, each with the stamp of its last change (None: deleted).

    Attributes:
        name: no other shelf has it.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    clock: Callable[[], int] = time.time_ns
    most: int = MOST_BYTES
    _values: dict[str, tuple[int, bytes | None]] = field(default_factory=dict)
    _waiting: dict[object, _Waiting] = field(default_factory=dict)
    _wanted: dict[str, set[object]] = field(default_factory=dict)
    _done: dict[str, Message] = field(default_factory=dict)
    """The latest answers to what must not be done twice, by the ask's name."""
    _beside: dict[str, dict[str, None]] = field(default_factory=dict)
    """The keys in each folder: the part of a key before its last slash."""
    _bytes: int = 0
    _stamp: int = 0

    def ask(self, who: object, message: Message, send: Send) -> None:
        """Answer ``message`` of the connection ``who`` by ``send``, at once or when what it waits for is there. A
        connection asks one thing at a time."""
        try:
            values = [None if one is None else base64.b64decode(one, validate=True) for one in message["values"]]
            if len(values) not in (len(message["keys"]), 0) and message["op"] != "compare_set":
                raise ValueError(f"{len(message['keys'])} keys and {len(values)} values")
            self._ask(who, message, message["keys"], values, send)
        except (ValueError, IndexError, OverflowError, binascii.Error) as error:
            send(_answer(error=f"{message['op']!r:.40}: {error}"))

    def gone(self, who: object) -> None:
        """This connection has ended: nobody waits for an answer any more."""
        if (waited := self._waiting.pop(who, None)) is not None:
            for key in waited.missing:
                self._wanted[key].discard(who)
                if not self._wanted[key]:
                    del self._wanted[key]

    @property
    def waiting(self) -> frozenset[object]:
        """The connections that wait for an answer."""
        return frozenset(self._waiting)

    def _ask(self, who: object, message: Message, keys: Sequence[str], values: Sequence[bytes | None],
             send: Send) -> None:
        op, once = message["op"], message["once"]
        if once in self._done:
            send(self._done[once])
        elif op in _WAITS:
            missing = {key for key in keys if self._get(key) is None}
            if not missing:
                send(self._found(message))
            else:
                self._waiting[who] = _Waiting(message, send, missing)
                for key in missing:
                    self._wanted.setdefault(key, set()).add(who)
        elif op == "check":
            send(_answer(number=int(all(self._get(key) is not None for key in keys))))
        elif op == "count":
            send(_answer(number=sum(value is not None for _, value in self._values.values())))
        else:
            self._change(op, message, keys, values, send)

    def _change(self, op: str, message: Message, keys: Sequence[str], values: Sequence[bytes | None],
                send: Send) -> None:
        """The answer has the stamp of the change, which its author remembers with it."""
        if op == "tell":
            for key, value, stamp in zip(keys, values, message["stamps"], strict=True):
                if type(stamp) is not int or not 0 <= stamp < 1 << 63:
                    raise ValueError(f"{stamp!r:.30} is no stamp")
                self._stamp = max(self._stamp, stamp)
                self._put(key, value, stamp)
            send(_answer())
            return
        stamp = self._stamp = max(self._stamp + 1, self.clock())
        number, answer, put = 0, [], list(zip(keys, values, strict=False))
        if op == "add":
            number = _number(self._get(keys[0])) + message["number"]
            put = [(keys[0], str(number).encode())]
            answer = [put[0][1]]
        elif op == "append":
            put = [(keys[0], (self._get(keys[0]) or b"") + (values[0] or b""))]
            answer = [put[0][1]]
        elif op == "compare_set":
            expected, desired = values
            now = self._get(keys[0])
            put = [(keys[0], desired)] if now == expected or (now is None and not expected) else []
            answer = [desired if put else (expected if now is None else now)]
            number = len(put)
        elif op == "delete":
            number = sum(self._get(key) is not None for key in keys)
            put = [(key, None) for key in keys]
        elif op != "set":
            raise ValueError("no such operation")
        for key, value in put:
            self._put(key, value, stamp)
        told = _answer(answer, number, stamp)
        if message["once"]:
            self._done[message["once"]] = told
            if len(self._done) > _REMEMBERED:
                del self._done[next(iter(self._done))]
        send(told)

    def _get(self, key: str) -> bytes | None:
        return self._values.get(key, (0, None))[1]

    def _put(self, key: str, value: bytes | None, stamp: int) -> None:
        before, had = self._values.get(key, (-1, None))
        if stamp < before:
            return
        if len(value or b"") > LARGEST:
            raise ValueError(f"a value has {len(value or b'')} bytes, and may have {LARGEST}")
        size = self._bytes + len(value or b"") - len(had or b"")
        if size > self.most:
            raise ValueError(f"the job's store is full ({self.most >> 20} MiB): it is for addresses, not for data")
        self._bytes = size
        self._values[key] = stamp, value
        if value is None:
            self._beside.get(_folder(key), {}).pop(key, None)
            return
        self._beside.setdefault(_folder(key), {})[key] = None
        for who in self._wanted.pop(key, ()):
            waiting = self._waiting[who]
            waiting.missing.discard(key)
            if not waiting.missing:
                del self._waiting[who]
                waiting.send(self._found(waiting.message))

    def _found(self, message: Message) -> Message:
        """With `around`, all that is in the folders of the keys asked for."""
        if message["op"] == "around":
            keys = list(dict.fromkeys((*message["keys"], *(
                key for folder in {*map(_folder, message["keys"])} for key in self._beside[folder]))))
            values = [self._get(key) for key in keys]
            if sum(len(key) + len(value or b"") for key, value in zip(keys, values, strict=True)) <= LARGEST:
                return {**_answer(values), "keys": keys}
        values = [] if message["op"] == "wait" else [self._get(key) for key in message["keys"]]
        if len(values) > 1 and sum(len(value or b"") for value in values) > LARGEST:
            return _answer(error=TOO_MUCH)
        return _answer(values)


def _answer(values: Sequence[bytes | None] = (), number: int = 0, stamp: int = 0, error: str = "") -> Message:
    return {"type": "answer", "keys": [], "values": encoded(values), "number": number, "stamp": stamp, "error": error}


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _number(value: bytes | None) -> int:
    """As torch counts: a number is kept as text."""
    return 0 if value is None else int(value)


def encoded(values: Sequence[bytes | None]) -> list[str | None]:
    """Values as JSON has them."""
    return [None if one is None else base64.b64encode(one).decode() for one in values]


def decoded(values: Sequence[Any]) -> list[bytes]:
    """What `encoded` gave; nothing for what is not there."""
    return [b"" if one is None else base64.b64decode(one) for one in values]

