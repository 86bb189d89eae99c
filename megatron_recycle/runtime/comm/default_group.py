"""torch's default group, WORLD, through failures.

WORLD contains the processes that the job began with. It is of no use while one of them is gone, and would stay so
when another has come in its place: so a generation with all positions filled puts a group of its own there, and what
scripts and frameworks do between iterations over all ranks (barriers, checkpoints, evaluation) works again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.runtime.comm.handles import abort_group


class World:
    """What torch takes as WORLD in this process."""

    def __init__(self) -> None:
        self._first = dist.group.WORLD
        self._aborted: dist.ProcessGroup | None = None

    def become(self, group: dist.ProcessGroup | None) -> None:
        """Put ``group``, of all global ranks, in WORLD's place; None: the one that the process began with."""
        c10d._update_default_pg(self._first if group is None else group)

    @contextmanager
    def renumbered(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Inside the block ``group`` is WORLD, and a rank is one's place in it, for every other group as well: so
        libraries do what they do over all ranks while some are gone."""
        ranks_of = c10d._world.pg_group_ranks
        before, known = dist.group.WORLD, dict(ranks_of)
        number_of = known[group]
        for other, places in known.items():
            ranks_of[other] = {number_of.get(rank, group.size() + rank): place for rank, place in places.items()}
        self.become(group)
        try:
            yield
        finally:
            self.become(before)
            ranks_of.update(known)

    def abort(self) -> None:
        """One of its members is gone: free whoever waits in an operation of WORLD, from any thread."""
        group = dist.group.WORLD
        if group is not None and group is not self._aborted:
            self._aborted = group
            abort_group(group)
