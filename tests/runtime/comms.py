"""Communicators whose members are all in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.backend import GLOO, Backend
from megatron_recycle.runtime.comm.cancellation import Wait
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.tags import CONTROL, Table
from megatron_recycle.runtime.place import Place
from tests.fakes.network import Fabric, MemoryNetwork
from tests.nccl_rules.group import OrderedGroup
from tests.nccl_rules.rules import Rules

_LIMIT = timedelta(seconds=60)


def gloo(size: int, table: Table = CONTROL) -> list[Comm]:
    """The ends of a gloo group."""
    store = dist.HashStore()

    def connect(rank: int) -> Comm:
        backend = dist.ProcessGroupGloo(store, rank, size, _LIMIT)
        backend.options._timeout = _LIMIT
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return Comm(group, GLOO, table)

    return _met(connect, store, size)


class Ordered(Backend):
    """A library with NCCL's rules, as torch shows it."""

    ordered, host, quick = True, True, True

    def wait(self, work: Any, limit: timedelta | None, wait: Wait, read: bool) -> None:
        wait.aside(work.wait)

    def abort(self, group: OrderedGroup) -> None:
        group.abort()

    def begin_batch(self, group: OrderedGroup) -> None:
        group._start_coalescing(torch.device("cpu"))

    def end_batch(self, group: OrderedGroup) -> Any:
        return group._end_coalescing(torch.device("cpu"))


def ordered(size: int, table: Table = CONTROL) -> list[Comm]:
    """The ends of a group that keeps NCCL's rules."""
    store = dist.HashStore()

    def connect(rank: int) -> Comm:
        group = OrderedGroup(store, rank, size, _LIMIT, Rules(connecting=False))
        group.connect()
        return Comm(group, Ordered(), table)

    return _met(connect, store, size)


def _met(connect: Callable[[int], Comm], store: dist.Store, size: int) -> list[Comm]:
    """What ``connect`` makes in a thread for each rank. If one fails, its error is raised, and nobody waits for it at
    the store."""
    store.set_timeout(_LIMIT)
    made: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def work(rank: int) -> None:
        try:
            made.put((rank, connect(rank)))
        except BaseException as error:  # noqa: BLE001  (raised again below)
            made.put((rank, error))

    for rank in range(size):
        threading.Thread(target=work, args=(rank,), daemon=True).start()
    ends: dict[int, Comm] = {}
    for _ in range(size):
        rank, end = made.get(timeout=1.5 * _LIMIT.total_seconds())
        if isinstance(end, BaseException):
            raise end
        ends[rank] = end
    return [ends[rank] for rank in range(size)]


def connected(fabric: Fabric, grid: Grid, members: Sequence[Worker], generation: int = 1) -> dict[Worker, Groups]:
    """The handles of ``members``, as each of them builds its own."""
    workers = [Worker(pipeline, stage) for pipeline in range(grid.pipelines) for stage in range(grid.stages)]
    ranks = {worker: (rank,) for rank, worker in enumerate(workers)}

    def connect(me: Worker) -> Groups:
        return MemoryNetwork(fabric, ranks[me][0]).connect(
            generation=generation, prefix=f"g{generation}", place=Place(me, grid, ranks, "gloo"), members=members,
            limits=Limits(60.0, 60.0, 60.0), interrupted=lambda: False)

    return dict(zip(members, fabric.run(*[lambda me=me: connect(me) for me in members]), strict=True))
