"""Communicators whose members are all in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.backend import GLOO, Backend
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.memory import Fabric, MemoryNetwork
from megatron_recycle.runtime.comm.tags import CONTROL, Table
from megatron_recycle.runtime.comm.waits import Wait
from megatron_recycle.runtime.place import Place
from tests.ordered.group import OrderedGroup
from tests.ordered.rules import Rules


def gloo(size: int, table: Table = CONTROL) -> list[Comm]:
    """The ends of a gloo group."""
    store, ends = dist.HashStore(), [None] * size

    def connect(rank: int) -> None:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        backend.options._timeout = timedelta(seconds=60)
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        ends[rank] = Comm(group, GLOO, table)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


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
    store, ends = dist.HashStore(), [None] * size

    def connect(rank: int) -> None:
        group = OrderedGroup(store, rank, size, timedelta(seconds=60), Rules(connecting=False))
        group.connect()
        ends[rank] = Comm(group, Ordered(), table)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


def connected(fabric: Fabric, grid: Grid, members: Sequence[Worker], generation: int = 1) -> dict[Worker, Groups]:
    """The handles of ``members``, as each of them builds its own."""
    workers = [Worker(pipeline, stage) for pipeline in range(grid.pipelines) for stage in range(grid.stages)]
    ranks = {worker: (rank,) for rank, worker in enumerate(workers)}

    def connect(me: Worker) -> Groups:
        return MemoryNetwork(fabric, ranks[me][0]).connect(
            generation=generation, prefix=f"g{generation}", place=Place(me, grid, ranks, "gloo"), members=members,
            limits=Limits(60.0, 60.0, 60.0), interrupted=lambda: False)

    return dict(zip(members, fabric.run(*[lambda me=me: connect(me) for me in members]), strict=True))
