"""A minimal etcd client: transactions, ranges and leases, over etcd's documented JSON gateway.

The gateway is part of etcd since 3.4 and needs only HTTP. One request at a time; a member that does not answer is
skipped for the next one. So a transaction may have happened although its answer was lost: its author must recognise its
own work.

Credentials for the members (certificates, or users with passwords) are in the variables that `etcdctl` reads. They stay
in the environment: command lines are public.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.errors import ConfigError
from megatron_recycle.plan.value import Value, read_as

PORT = 2379
CACERT, CERT, KEY, USER, PASSWORD = (f"ETCDCTL_{name}" for name in ("CACERT", "CERT", "KEY", "USER", "PASSWORD"))
_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": f"its certificate is not believed: give that of its authority in {CACERT}",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: give --store etcd://...",
    "CERTIFICATE_REQUIRED": "",
    "BAD_CERTIFICATE": f"it does not believe the certificate in {CERT}",
    "UNKNOWN_CA": f"it does not believe the certificate in {CERT}",
}
_WANTED = f"it wants a certificate of its clients: give {CERT} and {KEY}"
_PAUSE = 0.1
"""Least seconds that it takes to find no member: members may refuse connections at once, and most callers ask again."""
_STALE = ("invalid auth token", "revision of auth store is old")
"""Errors after which an authenticated client must authenticate again."""
_MEMBER = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:@\[\]/]+))(?::(\d{1,5}))?")
"""A name or an address (IPv6 in brackets), and an optional port."""
_SCHEMES = {"etcd": "http", "etcds": "https"}


class StoreUnreachable(OSError):
    """No member has answered in time, or they have no majority."""


class StoreRefused(OSError):
    """The members refuse a request: too large, no space left, no permission."""


class _Key(Value, frozen=True):
    key: bytes
    create_revision: int
    value: bytes = b""


class _Header(Value, frozen=True):
    revision: int = 0


class _Lease(Value, frozen=True):
    TTL: int = 0


class _Answer(Value, frozen=True):
    """A member's answer to any request. Empty, zero or false fields are omitted, and numbers are text."""

    header: _Header = _Header()
    kvs: tuple[_Key, ...] = ()
    succeeded: bool = False
    ID: int = 0
    result: _Lease = _Lease()
    token: str = ""
    message: Any = ""
    error: Any = ""


@dataclass(frozen=True)
class Entry:
    """A key's value; `created` is the revision of the whole store at which the key was created."""

    key: str
    value: bytes
    created: int


@dataclass(frozen=True)
class Place:
    """Members of an etcd cluster, (host, port) each."""

    scheme: str
    members: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, url: str) -> Place:
        """``etcd://host:2379,host2:2379`` or, with TLS, ``etcds://``. Raises ConfigError."""
        scheme, separator, rest = url.partition("://")
        members = []
        for each in rest.rstrip("/").split(","):
            found = _MEMBER.fullmatch(each)
            if found is None or not 0 < int(found[3] or PORT) < 65536:
                separator = ""
            else:
                members.append((found[1] or found[2], int(found[3] or PORT)))
        if scheme not in _SCHEMES or not separator:
            raise ConfigError(f"--store {url!r} is not of the form etcd://HOST:PORT,HOST:PORT,... (etcds:// with TLS)")
        return cls(_SCHEMES[scheme], tuple(members))


@dataclass(frozen=True)
class Access:
    """`ca`: file of the trusted certificate authority ("": the system's); `cert`, `key`: this client's; `user`:
    NAME:PASSWORD."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = field(default="", repr=False)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Access:
        user = environ.get(USER, "")
        if user and ":" not in user:
            user = f"{user}:{environ.get(PASSWORD, '')}"
        return cls(environ.get(CACERT, ""), environ.get(CERT, ""), environ.get(KEY, ""), user)

    def context(self) -> ssl.SSLContext:
        """For connections to the members. Raises ConfigError."""
        for name, path in ((CACERT, self.ca), (CERT, self.cert), (KEY, self.key)):
            if path and not os.access(path, os.R_OK):
                raise ConfigError(f"{name} is {path}, which cannot be read")
        try:
            made = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                made.load_cert_chain(self.cert, self.key or None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificates in {CACERT}, {CERT} and {KEY} are of no use: {error}") from error
        return made


class Etcd:
    """A client; any thread may use it.

    Args:
        access: this client's credentials.
        limit: seconds that a request may take, over all members.

    Each request may raise StoreUnreachable, or StoreRefused.
    """

    def __init__(self, place: Place, access: Access | None = None, limit: float = 2.0) -> None:
        self._place = place
        self._access = Access() if access is None else access
        self._context = self._access.context() if place.scheme == "https" else None
        self._token = ""
        self._answered = False
        self._limit = limit
        self._lock = threading.Lock()
        self._first = 0
        self._connection: http.client.HTTPConnection | None = None

    def range(self, prefix: str) -> list[Entry]:
        """All keys that begin with ``prefix``, in order."""
        last = prefix.encode()
        end = last[:-1] + bytes([last[-1] + 1])
        reply = self._post("/v3/kv/range", {"key": _text(last), "range_end": _text(end)})
        return [Entry(one.key.decode(), one.value, one.create_revision) for one in reply.kvs]

    def put_if(self, created: Mapping[str, int], puts: Mapping[str, bytes], lease: int = 0,
               leased: Sequence[str] = ()) -> int:
        """Write ``puts`` (``leased`` keys until the ``lease`` ends) if each key of ``created`` was created at that
        revision, 0 for a key that must not exist. Returns the revision of the write; 0: it was not made."""
        compare = [{"key": _text(key.encode()), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}
                   for key, revision in created.items()]
        success = [{"request_put": {"key": _text(key.encode()), "value": _text(value),
                                    **({"lease": str(lease)} if key in leased else {})}} for key, value in puts.items()]
        reply = self._post("/v3/kv/txn", {"compare": compare, "success": success})
        return reply.header.revision if reply.succeeded else 0

    def grant(self, seconds: int) -> int:
        """A new lease; returns its number."""
        return self._post("/v3/lease/grant", {"TTL": str(seconds)}).ID

    def keep(self, lease: int) -> bool:
        """Renew the lease; whether it still ran."""
        return self._post("/v3/lease/keepalive", {"ID": str(lease)}).result.TTL > 0

    def revoke(self, lease: int) -> None:
        """End the lease; its keys are deleted."""
        self._post("/v3/lease/revoke", {"ID": str(lease)})

    def _post(self, path: str, body: Mapping[str, Any]) -> _Answer:
        until, why, hopeless = time.monotonic() + self._limit, "not tried", set[bool]()
        with self._lock:
            for turn in range(2 * len(self._place.members)):
                left = until - time.monotonic()
                if left <= 0:
                    break
                host, port = self._place.members[self._first % len(self._place.members)]
                try:
                    return self._ask(host, port, path, json.dumps(body).encode(), left)
                except StoreRefused:
                    raise
                except (OSError, http.client.HTTPException, ValueError) as error:
                    stale = self._connection is not None and turn == 0
                    self._close()
                    text, never = ("", False) if self._answered else _hint(error, self._access)
                    why = f"{host}:{port}: {text or str(error) or type(error).__name__}"
                    hopeless.add(never)
                    if not stale:  # a kept connection may have been closed meanwhile
                        self._first += 1
        if hopeless == {True}:
            raise StoreRefused(f"etcd at {why}")
        time.sleep(min(_PAUSE, max(0.0, until - time.monotonic())))
        raise StoreUnreachable(f"etcd does not answer ({why})")

    def _ask(self, host: str, port: int, path: str, body: bytes, left: float) -> _Answer:
        share = max(0.2, left if len(self._place.members) == 1 else left / 2)
        if self._connection is None:
            self._connection = (http.client.HTTPConnection(host, port, timeout=share) if self._context is None else
                                http.client.HTTPSConnection(host, port, timeout=share, context=self._context))
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(share)
        if self._access.user and not self._token:
            name, _, password = self._access.user.partition(":")
            user = json.dumps({"name": name, "password": password}).encode()
            self._token = self._exchange("/v3/auth/authenticate", user, f"{host}:{port}").token
        reply = self._exchange(path, body, f"{host}:{port}")
        self._answered = True
        return reply

    def _exchange(self, path: str, body: bytes, where: str) -> _Answer:
        assert self._connection is not None
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        self._connection.request("POST", path, body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status == 400 and b"CommonName of client" in data:
            raise StoreRefused(f"etcd at {where} has users, and takes no client's certificate with a CommonName beside "
                               "them: give one without")
        try:
            reply: _Answer = read_as(_Answer, json.loads(data), strict=False)
        except ValueError:
            raise ValueError(f"what answers there is no etcd (status {answer.status})") from None
        if answer.status == 200:
            return reply
        text = str(reply.message or reply.error or data[:200])
        if "lease not found" in text:
            return _Answer()
        if self._token and any(stale in text for stale in _STALE):
            self._token = ""
        elif 400 <= answer.status < 500:
            denied = not self._access.user and ("user name is empty" in text or "permission denied" in text)
            wants = f": it wants a user, in {USER} as NAME:PASSWORD" if denied else ""
            raise StoreRefused(f"etcd at {where}: {text:.200}{wants}")
        raise ValueError(f"{answer.status} {text:.200}")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _hint(error: Exception, access: Access) -> tuple[str, bool]:
    """Advice for an error of a member ("": none is known), and whether it is permanent."""
    if isinstance(error, ConnectionResetError):  # http.client.RemoteDisconnected is one
        return "it hangs up; perhaps it speaks TLS: give --store etcds://...", False
    if not isinstance(error, ssl.SSLError):
        return "", False
    for reason, advice in _HINTS.items():
        if reason in f"{error.reason}".upper():
            return (advice if access.cert or "does not believe" not in advice else _WANTED) or _WANTED, True
    return ("" if access.cert else f"it hangs up; perhaps {_WANTED}"), False


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
