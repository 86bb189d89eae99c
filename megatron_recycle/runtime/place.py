"""Where a process is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_recycle.membership import Process
from megatron_recycle.plan import Grid, Worker


@dataclass(frozen=True)
class Place:
    """A process' position, the grid, and the global ranks of every position.

    With tensor parallelism a worker is several processes, its parts: each holds its share of the stage's
    parameters, and all of them run the worker's actions in the same order.
    """

    me: Worker
    grid: Grid
    ranks: Mapping[Worker, tuple[int, ...]]
    """Global ranks of each worker's parts, in their order; as many for all workers."""
    backend: str
    """Backend of the process groups: "gloo" or "nccl"."""
    part: int = 0
    """Which part of ``me`` this process is."""

    @property
    def parts(self) -> int:
        """Processes of a worker."""
        return len(self.ranks[self.me])

    @property
    def name(self) -> str:
        """This process' name in the membership."""
        return str(Process(self.me, self.part if self.parts > 1 else None))

    @property
    def names(self) -> Mapping[int, str]:
        """Every process' name, by its global rank."""
        return {rank: str(Process(worker, part if len(ranks) > 1 else None))
                for worker, ranks in self.ranks.items() for part, rank in enumerate(ranks)}

    @property
    def first(self) -> bool:
        return self.me.stage == 0

    @property
    def last(self) -> bool:
        return self.me.stage == self.grid.stages - 1
