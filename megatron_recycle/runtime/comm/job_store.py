"""torch's rendezvous store of a job of `recycle run`: in the coordinator, behind the job's token.

torch's own store, a TCPStore, lets in any client that reaches its port. Here the port is the coordinator's, whose
connections prove the token; there is no other process, and a wait ends when its generation does. `take_over` makes
torch use it: a TCPStore opened at MASTER_ADDR and MASTER_PORT, as torch does for a script's `init_process_group()`, is
this one. A TCPStore at any other port stays torch's.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist

from megatron_recycle.control.rendezvous_store import LARGEST
from megatron_recycle.control.store_client import Answer, GivenUp, NotThere, Said, StoreClient
from megatron_recycle.environment import Launched
from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.threads import begin

_DEFAULT = timedelta(seconds=300)
"""A TCPStore's default timeout."""
_FRESH_S = 2.0
"""Seconds for which the cached keys of a generation's part count as fresh."""
_GENERATIONS = 2
"""Generations whose keys this process can replay: the one that is being built, and the one before."""


def _never() -> bool:
    return False


class JobStore(dist.Store):
    """The store of this job, or the part of it under ``prefix``. A request, from any thread, fails with RuntimeError
    (torch's DistStoreError on a timeout), or with GenerationOver once ``given_up()`` is true.

    Attributes:
        host, port: the address of the TCPStore that it stands for, MASTER_ADDR and MASTER_PORT. With standby
            coordinators that is the first host's, whichever leads.
    """

    def __init__(self, client: StoreClient, written: Said, timeout: timedelta, prefix: str = "",
                 given_up: Callable[[], bool] = _never, place: tuple[str, int] = ("", 0)) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._client = client
        self._written = written
        self._prefix = prefix
        self._given_up = given_up
        self.host, self.port = place
        self._seen: tuple[float, dict[str, bytes]] = 0.0, {}

    def _ask(self, op: str, keys: Sequence[str], values: Sequence[bytes | str] = (), number: int = 0,
             timeout: timedelta | None = None) -> Answer:
        limit = (self.timeout if timeout is None else timeout).total_seconds()
        try:
            return self._client.ask(op, [self._prefix + _text(key) for key in keys], [*map(_bytes, values)],
                                    number=int(number), timeout=limit, given_up=self._given_up, said=self._written)
        except NotThere as error:
            raise dist.DistStoreError(f"wait timeout after {limit * 1000:.0f}ms: {error}") from None
        except GivenUp:
            raise GenerationOver("the generation was given up while its workers met at the job's store") from None
        except ValueError as error:
            raise RuntimeError(str(error)) from None

    def _look(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """The values of ``keys``, once they are there. In a generation's part a key is written once, and fetched with
        its neighbours: gloo reads its peers' addresses one after the other, twice each."""
        if not self._prefix:
            return self._ask("get", keys, timeout=timeout).values
        seen_at, seen = self._seen
        if time.monotonic() > seen_at + _FRESH_S:
            seen = {}
        missing = [key for key in keys if key not in seen]
        if missing:
            found = self._ask("around", missing, timeout=timeout)
            names = (key.removeprefix(self._prefix) for key in found.keys)
            seen = {**seen, **dict(zip(names, found.values, strict=True))}
            self._seen = time.monotonic(), seen
        return [seen[key] for key in keys]

    def forget_seen(self) -> None:
        """Drop the cached keys of a generation's part."""
        self._seen = 0.0, {}

    def arrived(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all of ``keys`` are there, or come within ``seconds``."""
        try:
            self.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    # As torch calls them, from C++ too

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], [value])

    def get(self, key: str) -> bytes:
        return self._look([key])[0]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], number=amount).number

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", list(keys)).number == 1

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if self._prefix:
            self._look(list(keys), timeout)
        else:
            self._ask("wait", list(keys), timeout=timeout)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        found = self._ask("compare_set", [key], [expected, desired])
        return _bytes(desired) if found.number else found.values[0]

    def append(self, key: str, value: bytes | str) -> None:
        self._ask("append", [key], [value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._look(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if sum(map(len, values)) <= LARGEST:
            self._ask("set", list(keys), values)
            return
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", [key]).number == 1

    def num_keys(self) -> int:
        return self._ask("count", []).number

    def list_keys(self) -> list[str]:
        """The names of all keys; the plugin's begin with ``recycle/``."""
        return self._ask("list", []).keys

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> JobStore:
        return _keep(JobStore(self._client, self._written, self.timeout, self._prefix, self._given_up,
                              (self.host, self.port)))

    deleteKey, getNumKeys = delete_key, num_keys  # by these names a PrefixStore calls them


_STOCK = dist.TCPStore
_kept: list[JobStore] = []
"""All stores: torch keeps only the C++ half alive, which is useless without this one."""
_clients: dict[str, StoreClient] = {}


def _keep(store: JobStore) -> JobStore:
    for earlier in _kept:
        earlier.forget_seen()
    _kept.append(store)
    return store


def open_store(launched: Launched, timeout: timedelta, prefix: str = "",
               given_up: Callable[[], bool] = _never) -> JobStore:
    """The store of the job that ``launched`` this process."""
    assert launched.control is not None, "only `recycle run` brings a coordinator"
    if (client := _clients.get(launched.control)) is None:
        rank = -1 if launched.rank is None else launched.rank
        client = _clients[launched.control] = StoreClient(launched.control, launched.token, rank)
    return _keep(JobStore(client, client.said(_GENERATIONS if prefix else 0), timeout, prefix, given_up,
                          launched.store or ("", 0)))


def tell_again(launched: Launched) -> None:
    """Replay to a restarted coordinator the keys that this process has set on the one before, even if it has no request
    of its own: others may need them. Returns at once."""
    client = _clients.get(launched.control or "")
    if client is None:
        return

    def tell() -> None:
        with suppress(NotThere, ValueError):
            client.tell(_DEFAULT.total_seconds())

    begin("recycle-tell", tell)


def take_over() -> None:
    """Make torch and scripts in this process, started by `recycle run`, find the job's store in place of a TCPStore."""
    if isinstance(dist.TCPStore, _StoreType):
        return
    stand_in = _StoreType("TCPStore", (_STOCK,), {"__new__": _open_or_stock})
    for name in ("torch.distributed", "torch.distributed.rendezvous"):  # a function hides the latter
        setattr(import_module(name), "TCPStore", stand_in)  # noqa: B010


class _StoreType(type(_STOCK)):  # type: ignore[misc]
    """Metaclass of the stand-in for torch's TCPStore: isinstance is true for both stores."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (JobStore, _STOCK))


def _open_or_stock(cls: Any, host_name: Any, port: Any, world_size: Any = None, is_master: Any = False,
                   timeout: Any = _DEFAULT, *rest: Any, **options: Any) -> Any:
    launched = Launched.read()
    if launched.control is None or launched.store is None or not _is_own_store(host_name, port, *launched.store):
        return _STOCK(host_name, port, world_size, is_master, timeout, *rest, **options)
    return open_store(launched, timeout)


def _is_own_store(named: Any, asked: Any, host: str, port: int) -> bool:
    """Whether a TCPStore's arguments, host ``named`` and port ``asked``, are this host, by any name, and this port."""
    return asked == port and (named == host or bool(_addresses(named) & _addresses(host)))


def _addresses(host: Any) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)}
    except (OSError, UnicodeError):
        return set()


def _text(key: bytes | str) -> str:
    return key if isinstance(key, str) else bytes(key).decode()


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
