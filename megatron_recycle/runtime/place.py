"""The place of a process in the grid."""

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
    """The part of ``me`` that this process is."""
    placement: tuple[int, ...] = ()
    """The stage of each chunk, in the order of the model's layers; (): one chunk per stage (`Problem.placement`)."""

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
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each chunk of the model."""
        return self.placement or tuple(range(self.grid.stages))

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of this worker's stage, counted through the model."""
        if not self.placement:
            return (self.me.stage,)
        return tuple(chunk for chunk, stage in enumerate(self.placement) if stage == self.me.stage)

    @property
    def loss_stage(self) -> int:
        """The stage whose workers compute the loss: that of the last chunk."""
        return self.stage_of[-1]

    def first(self, chunk: int = 0) -> bool:
        """Whether this is the model's first chunk; ``chunk`` counts within the stage."""
        return self.chunks[chunk] == 0

    def last(self, chunk: int = 0) -> bool:
        """Whether this is the model's last chunk, which computes the loss."""
        return self.chunks[chunk] == len(self.stage_of) - 1
