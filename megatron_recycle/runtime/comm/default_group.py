"""torch's default group, WORLD, for operations that torch itself carries out.

WORLD contains the processes that the job began with, and is unusable once one of them is gone. A script's operations on
it between iterations go another way (:mod:`.user_collectives`); libraries that write checkpoints see the survivors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.runtime.comm.abort import abort, foreign
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.threads import Threads


class World:
    """torch's WORLD in this process. ``threads``: run its abort."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._first = dist.group.WORLD
        self._aborted: dist.ProcessGroup | None = None

    def put_back(self) -> None:
        """Restore WORLD if a script has destroyed it at its end: torch makes no group without one."""
        if dist.group.WORLD is None:
            c10d._update_default_pg(self._first)

    @contextmanager
    def renumbered(self, comm: Comm) -> Iterator[None]:
        """Inside the block ``comm`` is WORLD, and every group's ranks are positions in it: so libraries run their
        operations over all ranks while some are gone."""
        group, ranks_of = comm.group, c10d._world.pg_group_ranks
        before, known = dist.group.WORLD, dict(ranks_of)
        number_of = known[group]
        for other, places in known.items():
            ranks_of[other] = {number_of.get(rank, comm.size + rank): place for rank, place in places.items()}
        c10d._update_default_pg(group)
        try:
            yield
        finally:
            c10d._update_default_pg(before)
            ranks_of.update(known)

    def abort(self) -> None:
        """Free every thread that waits in an operation of WORLD, since a member is gone. Any thread may call it."""
        group = dist.group.WORLD
        if group is not None and group is not self._aborted:
            self._aborted = group
            abort([foreign(group)], self._threads)
