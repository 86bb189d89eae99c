"""Rendezvous of a generation's members: torch's store, and process groups made there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_any
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.environment import Launched
from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.job_store import JobStore, open_store
from megatron_recycle.runtime.comm.threads import Threads

OWN = "recycle/"
"""Prefix of the names of the runtime's own groups."""
CONNECTING = "recycle-connect"
"""Name of the threads that connect inside a library, and can be abandoned."""
_POLL_SECONDS = 0.002
_GLANCE_SECONDS = 0.1
"""Seconds between checks whether a wait at the coordinator's store is still wanted."""
_SAID_AGAIN = 0.5  # seconds after which a worker that waits at the store announces itself again
_LONGEST_CONNECT = 55.0
"""Seconds that the end of the process waits for abandoned connections: gloo gives up connecting after five times its
timeout, which is a little more than `heartbeat_timeout`."""

Connected = TypeVar("Connected")


def new_group(name: str, ranks: Sequence[int], store: dist.Store, *, backend: str, timeout: float,
              connect_timeout: float, options: Any = None) -> dist.ProcessGroup:
    """A process group of exactly ``ranks`` (global ranks, ascending), known to torch under ``name``.

    Only the members call this. ``connect_timeout`` (seconds) bounds the rendezvous, ``timeout`` every later operation;
    ``options``: the library's. Raises torch's own error when a member does not show up.
    """
    named: Any = name  # newer versions of torch have a type of their own for it
    with _unbound_default_group():
        group, _ = c10d._new_process_group_helper(
            len(ranks), list(ranks).index(dist.get_rank()), list(ranks), c10d.Backend(backend), store,
            group_name=named, timeout=timedelta(seconds=connect_timeout),
            backend_options=options)
    # torch's own new_group() records this after the helper returns: global rank -> rank in the group.
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    limit = timedelta(seconds=timeout)
    if hasattr(group, "set_timeout"):
        group.set_timeout(limit)
    else:  # before torch 2.9
        c10d._set_pg_timeout(limit, group)
    return group


@contextmanager
def _unbound_default_group() -> Iterator[None]:
    """Inside the block torch's default group has no device. Beside a default group with a device, torch would make a
    new group by splitting it, which takes all ranks that the job began with, and some may be dead."""
    default = dist.group.WORLD
    device = None if default is None else default.bound_device_id
    if default is None or device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def unless_interrupted(interrupted: Callable[[], bool], connect: Callable[[Callable[[], bool]], Connected],
                       discard: Callable[[Connected], None], threads: Threads,
                       limit: float = math.inf) -> Connected:
    """The result of ``connect``, or GenerationOver as soon as ``interrupted()`` becomes true, or after ``limit``
    seconds.

    gloo cannot be interrupted while it connects, and waits up to five times its timeout for a peer that died or froze
    just after publishing its address. So ``connect`` runs in one of ``threads``, which is abandoned in that case; its
    late result goes to ``discard``. ``connect`` gets a function that tells whether it was abandoned, and stays true
    when ``interrupted()`` is about the next generation already.
    """
    outcome: Future[Connected] = Future()
    left_behind = Event()

    def run() -> None:
        try:
            outcome.set_result(connect(lambda: left_behind.is_set() or interrupted()))
        except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
            outcome.set_exception(error)

    def throw_away(late: Future[Connected]) -> None:
        if late.exception() is None:
            discard(late.result())

    begun = time.monotonic()
    threads.start(CONNECTING, run, _LONGEST_CONNECT)
    while not wait_for_any([outcome], _POLL_SECONDS).done:
        late = time.monotonic() > begun + limit
        if late or interrupted():
            left_behind.set()
            outcome.add_done_callback(throw_away)
            raise GenerationOver(f"some workers did not connect to each other within {limit:.0f} s" if late else
                                 "the generation was given up while its workers connected to each other")
    return outcome.result()


def told_by_first(key: str, tell: Callable[[], str]) -> str:
    """Rank 0's value of ``tell()``, on all ranks, under ``key`` of torch's store. Call it once, before any failure."""
    store = c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(key, tell())
    value: bytes = store.get(key)
    return value.decode()


def job_store(prefix: str, timeout: float, interrupted: Callable[[], bool]) -> dist.Store:
    """The part of the job's store under ``prefix``: the coordinator's, or, under another launcher, a new connection to
    that launcher's TCPStore. Raises RuntimeError."""
    launched = Launched.read()
    if launched.control is not None:
        return open_store(launched, timedelta(seconds=timeout), f"{prefix}/", interrupted)
    if launched.store is None:  # a job with another rendezvous
        return dist.PrefixStore(prefix, c10d._get_default_store())
    return dist.PrefixStore(prefix, dist.TCPStore(*launched.store, is_master=False, timeout=timedelta(seconds=timeout),
                                                  wait_for_workers=False))


def meet(store: dist.Store, me: int, members: Sequence[int], interrupted: Callable[[], bool],
         limit: float = math.inf, says: Sequence[str] = ()) -> None:
    """Wait at ``store`` until all ``members`` (ranks) have arrived. Each publishes ``says``, some words, to the others
    (`heard`).

    Every process that reaches a TCPStore can delete its keys. So each member rewrites its key periodically while it
    waits, and once more when it has seen all others. To see a member once is enough.

    Raises GenerationOver when interrupted, or when some have not come within ``limit`` seconds: all members try again
    in a new generation.
    """
    key, missing, text = f"met/{me}", list(members), "\n".join(("here", *says))
    begun = again = time.monotonic()
    if isinstance(store, JobStore):
        store.set(key, text)
        again += _SAID_AGAIN
    while missing and not _arrived(store, [f"met/{rank}" for rank in missing]):
        if interrupted():
            raise GenerationOver("a newer generation was announced while this one was being built")
        now = time.monotonic()
        if now - begun > limit:
            raise GenerationOver(f"rank {', '.join(map(str, missing))} did not come to torch's store within "
                                 f"{limit:.0f} s, or what they wrote there is gone")
        if now >= again:
            store.set(key, text)
            missing = [rank for rank in missing if not store.check([f"met/{rank}"])]
            again = now + _SAID_AGAIN
    if not isinstance(store, JobStore):
        store.set(key, text)


def _arrived(store: dist.Store, keys: Sequence[str]) -> bool:
    """Whether all of ``keys`` are there, now or after a short wait."""
    if isinstance(store, JobStore):
        return store.arrived(keys, _GLANCE_SECONDS)
    if store.check(keys):
        return True
    time.sleep(_POLL_SECONDS)  # a TCPStore's own wait costs more if it times out
    return False


def heard(store: dist.Store, ranks: Sequence[int]) -> list[list[str]]:
    """The words of each of ``ranks``, which have met at ``store``; the same for all callers. Raises RuntimeError."""
    return [text.decode().split("\n") for text in store.multi_get([f"met/{rank}" for rank in ranks])]
