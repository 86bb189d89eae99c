"""Where a worker is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_recycle.plan import Grid, Worker


@dataclass(frozen=True)
class Place:
    """A worker's position, the grid, and the global rank of every position."""

    me: Worker
    grid: Grid
    rank_of: Mapping[Worker, int]
    backend: str
    """Backend of the process groups: "gloo" or "nccl"."""

    @property
    def first(self) -> bool:
        return self.me.stage == 0

    @property
    def last(self) -> bool:
        return self.me.stage == self.grid.stages - 1
