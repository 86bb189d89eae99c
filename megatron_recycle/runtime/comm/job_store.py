"""torch's store of a job of `recycle run`: in the coordinator, behind the job's token.

torch's own store, a TCPStore, lets in whoever reaches its port. Here the port is the coordinator's, whose connections
prove the token; there is no other process, and a wait ends when its generation does. `take_over` makes torch use it:
whoever asks for a TCPStore at MASTER_ADDR and MASTER_PORT, as torch does for a script's `init_process_group()`, gets
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
"""As a TCPStore has it."""
_FRESH_S = 2.0
"""Seconds for which what was seen of a generation's part is as good as new."""
_GENERATIONS = 2
"""Generations whose keys this process can tell again: the one that is being built, and the one before."""


def _never() -> bool:
    return False


class JobStore(dist.Store):
    """The store of this job, or the part of it under ``prefix``. Every ask, of any thread, ends with RuntimeError
    (torch's DistStoreError where its time is over), or with GenerationOver once ``given_up()`` is true.

    Attributes:
        host, port: those that a TCPStore would be opened with, MASTER_ADDR and MASTER_PORT. Where several coordinators
            stand by for each other that is the first host's, whoever leads.
    """

    def __init__(self, client: StoreClient, said: Said, timeout: timedelta, prefix: str = "",
                 given_up: Callable[[], bool] = _never, place: tuple[str, int] = ("", 0)) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._client = client
        self._said = said
        self._prefix = prefix
        self._given_up = given_up
        self.host, self.port = place
        self._seen: tuple[float, dict[str, bytes]] = 0.0, {}

    def _ask(self, op: str, keys: Sequence[str], values: Sequence[bytes | str] = (), number: int = 0,
             timeout: timedelta | None = None) -> Answer:
        limit = (self.timeout if timeout is None else timeout).total_seconds()
        try:
            return self._client.ask(op, [self._prefix + _text(key) for key in keys], [*map(_bytes, values)],
                                    number=int(number), timeout=limit, given_up=self._given_up, said=self._said)
        except NotThere as error:
            raise dist.DistStoreError(f"wait timeout after {limit * 1000:.0f}ms: {error}") from None
        except GivenUp:
            raise GenerationOver("the generation was given up while its workers met at the job's store") from None
        except ValueError as error:
            raise RuntimeError(str(error)) from None

    def _look(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """The values of ``keys``, once they are there. In a generation's part a key is written once, and whoever looks
        for one needs its neighbours next: gloo asks for its peers' addresses one after the other, twice each."""
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
        """What was seen of a generation's part is asked for again, should anybody need it."""
        self._seen = 0.0, {}

    def arrived(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all of ``keys`` are there, within so many seconds."""
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
        """The names of all keys, of which those of the plugin begin with ``recycle/``."""
        return self._ask("list", []).keys

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> JobStore:
        return _keep(JobStore(self._client, self._said, self.timeout, self._prefix, self._given_up,
                              (self.host, self.port)))

    deleteKey, getNumKeys = delete_key, num_keys  # by these names a PrefixStore calls them


_STOCK = dist.TCPStore
_kept: list[JobStore] = []
"""All of them: torch keeps the half in C++ alone alive, which cannot do anything then."""
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
    """Tell the coordinator of the job that ``launched`` this process, if it has come back, what this process has put on
    the store of the one before, also if it asks for nothing itself: others may. Returns at once."""
    client = _clients.get(launched.control or "")
    if client is None:
        return

    def tell() -> None:
        with suppress(NotThere, ValueError):
            client.tell(_DEFAULT.total_seconds())

    begin("recycle-tell", tell)


def take_over() -> None:
    """Make this process, started by `recycle run`, find the job's store where torch and scripts look for one."""
    if isinstance(dist.TCPStore, _StoreType):
        return
    stand_in = _StoreType("TCPStore", (_STOCK,), {"__new__": _open_or_stock})
    for name in ("torch.distributed", "torch.distributed.rendezvous"):  # a function hides the latter
        setattr(import_module(name), "TCPStore", stand_in)  # noqa: B010


class _StoreType(type(_STOCK)):  # type: ignore[misc]
    """The class of what stands for torch's TCPStore: what is one for torch is one for a script."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (JobStore, _STOCK))


def _open_or_stock(cls: Any, host_name: Any, port: Any, world_size: Any = None, is_master: Any = False,
                   timeout: Any = _DEFAULT, *rest: Any, **options: Any) -> Any:
    launched = Launched.read()
    if launched.control is None or launched.store is None or not _there(host_name, port, *launched.store):
        return _STOCK(host_name, port, world_size, is_master, timeout, *rest, **options)
    return open_store(launched, timeout)


def _there(named: Any, asked: Any, host: str, port: int) -> bool:
    """Whether these arguments of a TCPStore name this port, by any name of its host."""
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
