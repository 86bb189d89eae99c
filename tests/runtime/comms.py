"""Communicators whose members are all in this process, as gloo makes them."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_recycle.runtime.comm.backend import GLOO
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import CONTROL, Table


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
