"""How the members of a generation find each other: torch's store, and a process group made there."""

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

CONNECTING = "recycle-connect"
"""Name of the threads that are inside a library that connects, and can be left behind."""
_POLL_SECONDS = 0.002
_GLANCE_SECONDS = 0.1
"""Seconds between looks at whether those that wait at the coordinator's store still have to."""
_SAID_AGAIN = 0.5  # seconds after which a worker that waits for others at the store says again that it is there
_LONGEST_CONNECT = 55.0
"""Seconds that the end of the process waits for handles that were left behind: gloo gives up connecting after five
times its limit, which is `heartbeat_timeout` and a bit."""

Connected = TypeVar("Connected")


def new_group(name: str, ranks: Sequence[int], store: dist.Store, *, backend: str, timeout: float,
              connect_timeout: float, options: Any = None) -> dist.ProcessGroup:
    """A process group of exactly ``ranks`` (global ranks, ascending), known to torch under ``name``.

    Only the members call this. ``connect_timeout`` (seconds) bounds the rendezvous, ``timeout`` every
    later operation; ``options``: the library's. Raises whatever torch raises when a member does not show up.
    """
    named: Any = name  # newer versions of torch have a type of their own for it
    with _unbound_default_group():
        group, _ = c10d._new_process_group_helper(
            len(ranks), list(ranks).index(dist.get_rank()), list(ranks), c10d.Backend(backend), store,
            group_name=named, timeout=timedelta(seconds=connect_timeout),
            backend_options=options)
    # What torch's own new_group() records after the helper returns: global rank -> rank in the group.
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    limit = timedelta(seconds=timeout)
    if hasattr(group, "set_timeout"):
        group.set_timeout(limit)
    else:  # before torch 2.9
        c10d._set_pg_timeout(limit, group)
    return group


@contextmanager
def _unbound_default_group() -> Iterator[None]:
    """Inside the block torch's default group has no device: a group that is made beside one that has is split off it,
    which takes all ranks that the job began with, and some may be dead."""
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

    gloo cannot be interrupted while it connects, and waits up to five times its limit for a peer that has died, or is
    frozen, just after it had said where it listens. So ``connect`` runs in one of ``threads``, which is left behind
    then; what it still brings about goes to ``discard``. It is given what tells whether that has happened, which stays
    true when ``interrupted()`` is about the next generation already.
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
    """The value of ``tell()`` on rank 0, for all others, once and before any failure, under ``key`` of torch's
    store."""
    store = c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(key, tell())
    told: bytes = store.get(key)
    return told.decode()


def job_store(prefix: str, timeout: float, interrupted: Callable[[], bool]) -> dist.Store:
    """The part of the job's store under ``prefix``: the coordinator's, or, where another launcher has started the job,
    a new connection to that one's TCPStore. Raises RuntimeError."""
    launched = Launched.read()
    if launched.control is not None:
        return open_store(launched, timedelta(seconds=timeout), f"{prefix}/", interrupted)
    if launched.store is None:  # a job that met some other way
        return dist.PrefixStore(prefix, c10d._get_default_store())
    return dist.PrefixStore(prefix, dist.TCPStore(*launched.store, is_master=False, timeout=timedelta(seconds=timeout),
                                                  wait_for_workers=False))


def meet(store: dist.Store, me: int, members: Sequence[int], interrupted: Callable[[], bool],
         limit: float = math.inf, says: Sequence[str] = ()) -> None:
    """Wait at ``store`` until all ``members`` (ranks) have arrived. Each ``says`` some words to the others
    (`heard`).

    Every process that reaches a TCPStore can delete its keys. So each member writes its key again and again while it
    waits, and once more when it has seen all others. To see a member once is enough.

    Raises GenerationOver when interrupted, or when some have not come within ``limit`` seconds: in a new generation
    everybody tries again.
    """
    here, missing, words = f"met/{me}", list(members), "\n".join(("here", *says))
    begun = again = time.monotonic()
    if isinstance(store, JobStore):
        store.set(here, words)
        again += _SAID_AGAIN
    while missing and not _there(store, [f"met/{rank}" for rank in missing]):
        if interrupted():
            raise GenerationOver("a newer generation was announced while this one was being built")
        now = time.monotonic()
        if now - begun > limit:
            raise GenerationOver(f"rank {', '.join(map(str, missing))} did not come to torch's store within "
                                 f"{limit:.0f} s, or what they wrote there is gone")
        if now >= again:
            store.set(here, words)
            missing = [rank for rank in missing if not store.check([f"met/{rank}"])]
            again = now + _SAID_AGAIN
    if not isinstance(store, JobStore):
        store.set(here, words)


def _there(store: dist.Store, keys: Sequence[str]) -> bool:
    """Whether all of ``keys`` are there, after a little while if not at once."""
    if isinstance(store, JobStore):
        return store.arrived(keys, _GLANCE_SECONDS)
    if store.check(keys):
        return True
    time.sleep(_POLL_SECONDS)  # a TCPStore's wait that ends without them costs more
    return False


def heard(store: dist.Store, ranks: Sequence[int]) -> list[list[str]]:
    """What each of ``ranks``, who have met at ``store``, has said: the same for all who ask. Raises RuntimeError."""
    return [said.decode().split("\n") for said in store.multi_get([f"met/{rank}" for rank in ranks])]
