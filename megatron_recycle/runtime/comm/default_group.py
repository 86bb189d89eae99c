"""torch's default group, WORLD, through failures.

WORLD contains the processes that the job began with. It is of no use while one of them is gone, and would stay so
when another has come in its place: so a generation with all positions filled puts a group of its own there, and what
scripts and frameworks do between iterations over all ranks (barriers, checkpoints, evaluation) works again.
"""

from __future__ import annotations

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

    def abort(self) -> None:
        """One of its members is gone: free whoever waits in an operation of WORLD, from any thread."""
        group = dist.group.WORLD
        if group is not None and group is not self._aborted:
            self._aborted = group
            abort_group(group)
