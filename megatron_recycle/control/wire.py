"""Frames of the control protocol, without any I/O of their own.

A frame is a 4-byte big-endian length, a 32-byte HMAC-SHA256 and that many bytes of UTF-8 JSON. The server speaks first
and sends a random challenge; every later frame is authenticated under a key made from the job's token and the nonces of
this very connection, and carries a count. So a frame recorded on one connection is refused on every other one, a
repeated or dropped frame is refused on its own, and the token never travels.

A host that joins may have a lesser secret, made from the token: it opens connections with fewer permissions (see
`SecureChannel.guest`), and does not reveal the token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from typing import Any

from megatron_recycle.membership.protocol import Message, TooLarge, WireError
from megatron_recycle.plan.value import Value

VERSION = 7
_KEYS = "1"
"""Part of the keys of every version: so two versions can still tell each other that they differ."""
MAX_PAYLOAD = 4 * 1024 * 1024
MAX_FIRST_PAYLOAD = 64 * 1024
"""The limit until a peer has proved the token: a stranger cannot make us buffer much."""
GUEST = "join-"
"""Prefix of a secret that only allows a host to join, and of the incarnations of its workers."""
_LENGTH = struct.Struct(">I")
_MAC_BYTES = 32
_HEADER = _LENGTH.size + _MAC_BYTES


def _mac(key: bytes, payload: bytes) -> bytes:
    return hmac.new(key, payload, hashlib.sha256).digest()


def _derive(token: bytes, *parts: str) -> bytes:
    return _mac(token, "|".join(("recycle", _KEYS, *parts)).encode())


def for_joining(token: str) -> str:
    """The secret of hosts that join the job with this token (or with this very secret)."""
    return token if token.startswith(GUEST) else GUEST + _derive(token.encode(), "join").hex()[:32]


class Envelope(Value, frozen=True):
    """The fields of each frame beside its message: the protocol's version, its number on this connection, and on the
    first one a nonce."""

    type: str
    v: Any = None
    n: Any = None
    nonce: Any = None


def encode(message: Message | Mapping[str, Any]) -> bytes:
    """JSON of `message`, to be sealed for one connection or for many."""
    data = message.to_json() if isinstance(message, Message) else message
    return json.dumps(data, separators=(",", ":")).encode()


def seal(message: Mapping[str, Any], key: bytes) -> bytes:
    """The frame of `message` (which gets the protocol's version) under `key`."""
    return _frame(encode({**message, "v": VERSION}), key)


def _frame(payload: bytes, key: bytes) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise TooLarge(f"a message of {len(payload)} bytes exceeds {MAX_PAYLOAD}: {payload[:60]!r}")
    return _LENGTH.pack(len(payload)) + _mac(key, payload) + payload


def unseal(payload: bytes, mac: bytes, key: bytes) -> dict[str, Any]:
    """The message of a frame; the payload is not parsed before it is authenticated."""
    if not hmac.compare_digest(mac, _mac(key, payload)):
        raise WireError("a frame does not authenticate: wrong token, or a frame of another connection")
    return opened(payload)


def opened(payload: bytes) -> dict[str, Any]:
    """The message of a payload that is authentic, or need not be; raises WireError."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame is not JSON: {error}") from error
    try:
        version = Envelope.from_json(message).v
    except ValueError as error:
        raise WireError("a frame is not an object with a type") from error
    if version != VERSION:
        raise WireError(f"a frame is of protocol version {version!r}, this is version {VERSION}: "
                        "install the same version of megatron-recycle on all hosts")
    found: dict[str, Any] = message
    return found


class SecureChannel:
    """One end of one connection: converts bytes to messages and back.

    Make it with `SecureChannel.server` or `SecureChannel.client`. A server's `greeting` must be sent first. A client
    may call `seal` only when `open` is true, that is after it was fed the greeting. Every error is final: close the
    connection.

    Attributes:
        guest: whether the client has proved the secret for joining, and not the job's token. A client with that secret
            cannot check the greeting; the server proves itself with its next frame.
    """

    def __init__(self, token: str, server: bool) -> None:
        if not token:
            raise WireError("the job's token is empty: set RECYCLE_TOKEN to the token of the job")
        self._token = token.encode()
        self.guest = not server and token.startswith(GUEST)
        self._server = server
        self._buffer = bytearray()
        self._sent = 0
        self._received = 0
        self._challenge = secrets.token_hex(16) if server else ""
        self._answer = "" if server else secrets.token_hex(16)
        greeting_key = self._greeting_key()
        self._receive_key = _derive(self._token, "client", self._challenge) if server else greeting_key
        self._send_key: bytes | None = None

    @classmethod
    def server(cls, token: str) -> SecureChannel:
        return cls(token, server=True)

    @classmethod
    def client(cls, token: str) -> SecureChannel:
        return cls(token, server=False)

    def _greeting_key(self) -> bytes:
        return _derive(self._token, "greeting")

    def greeting(self) -> bytes:
        """The server's first frame: the challenge that makes this connection's keys unlike any other's."""
        return seal({"type": "challenge", "nonce": self._challenge}, self._greeting_key())

    @property
    def open(self) -> bool:
        """True when both directions have their keys."""
        return self._send_key is not None

    def seal(self, message: Message | Mapping[str, Any]) -> bytes:
        """The frame of `message`, numbered; the first one of a client carries its own nonce."""
        encoded = encode(message)
        if not self._server and self._sent == 0:
            encoded = encoded[:-1] + b',"nonce":"%s"}' % self._answer.encode()
        return self.seal_encoded(encoded)

    def seal_encoded(self, encoded: bytes) -> bytes:
        """As `seal`, for the result of `encode`; not for a client's first frame."""
        if self._send_key is None:
            raise WireError("nothing can be sent before the other side has spoken")
        frame = _frame(encoded[:-1] + b',"n":%d,"v":%d}' % (self._sent, VERSION), self._send_key)
        self._sent += 1
        return frame

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The complete messages in the data received so far; raises WireError at the first bad one."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER:
            (length,) = _LENGTH.unpack_from(self._buffer)
            limit = MAX_PAYLOAD if self.open else MAX_FIRST_PAYLOAD
            if length > limit:
                raise WireError(f"a frame of {length} bytes exceeds the limit of {limit}")
            if len(self._buffer) < _HEADER + length:
                break
            mac = bytes(self._buffer[_LENGTH.size : _HEADER])
            payload = bytes(self._buffer[_HEADER : _HEADER + length])
            del self._buffer[: _HEADER + length]
            message = self._receive(payload, mac)
            if message is not None:
                messages.append(message)
        return messages

    def _receive(self, payload: bytes, mac: bytes) -> dict[str, Any] | None:
        if self._server and self._send_key is None:
            self._recognise(payload, mac)
        greeted = not self._server and self._send_key is None
        message = opened(payload) if greeted and self.guest else unseal(payload, mac, self._receive_key)
        if greeted:
            self._challenge = _nonce(message)
            self._send_key = _derive(self._token, "client", self._challenge)
            self._receive_key = _derive(self._token, "server", self._challenge, self._answer)
            return None
        if (number := Envelope.from_json(message).n) != self._received:
            raise WireError(f"frame number {number!r} where {self._received} was due: repeated or lost")
        self._received += 1
        if self._server and self._send_key is None:
            self._answer = _nonce(message)
            self._send_key = _derive(self._token, "server", self._challenge, self._answer)
        return message


    def _recognise(self, payload: bytes, mac: bytes) -> None:
        """Detect whether a client's first frame was made with the secret for joining."""
        token = for_joining(self._token.decode()).encode()
        key = _derive(token, "client", self._challenge)
        if token != self._token and hmac.compare_digest(mac, _mac(key, payload)):
            self.guest, self._token, self._receive_key = True, token, key


def _nonce(message: Mapping[str, Any]) -> str:
    nonce = Envelope.from_json(message).nonce
    if not isinstance(nonce, str) or not 16 <= len(nonce) <= 64:
        raise WireError("the first frame of a connection carries no nonce")
    return nonce
