"""The grid of each iteration: a script may change how many micro-batches its pipelines train on (a batch size that is
ramped up), and the shapes of activations (a length that grows).

All workers' scripts announce a change before the same iteration, as they do everything else, so that each worker knows
it by itself. Each makes the same plan from the coordinator's plan, which is for the grid that the job began with. A
joiner gets earlier changes from its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_recycle.control.resizing import resized
from megatron_recycle.plan import Grid, Plan

_KEPT = 8


class Grids:
    """The grid of each iteration, and where in a pipeline's data it begins.

    Args:
        first: the grid that the job begins with.
        block: (pipelines, micro-batches) -> micro-batches of a block of the exact reduction.
    """

    def __init__(self, first: Grid, block: Callable[[int, int], int]) -> None:
        self._first = first
        self._block = block
        self._start = 0, 0
        self._changes: list[tuple[int, int]] = [(0, max(first.microbatches))]
        self._reshaped: set[int] = set()
        self._plans: dict[tuple[str, int], Plan] = {}
        self._base: dict[str, Plan] = {}

    def of(self, iteration: int) -> Grid:
        """The grid of ``iteration``."""
        count = next(count for begin, count in reversed(self._changes) if begin <= max(iteration, 0))
        return self._sized(count)

    def begin(self, iteration: int, number: int) -> None:
        """The job begins with ``iteration``, and with micro-batch ``number`` of each pipeline."""
        self._start = iteration, number

    def number(self, iteration: int, microbatch: int = 0) -> int:
        """The number of ``microbatch`` of ``iteration`` among all micro-batches of a pipeline."""
        start, number = self._start
        for (begin, count), (end, _) in zip(self._changes, [*self._changes[1:], (iteration, 0)]):
            number += count * max(0, min(end, iteration) - max(begin, start))
        return number + microbatch

    def change(self, iteration: int, microbatches: int) -> bool:
        """From ``iteration`` on each pipeline has so many micro-batches, until the next change. Returns whether the
        number changes; it does not where this worker catches up with a change that it got from a peer."""
        if max(self.of(iteration).microbatches) == microbatches:
            return False
        self._changes = [change for change in self._changes if change[0] < iteration] + [(iteration, microbatches)]
        return True

    def reshape(self, iteration: int) -> None:
        """From ``iteration`` on activations may have other shapes, until the next change."""
        self._reshaped.add(iteration)

    def reshapes(self, iteration: int) -> bool:
        """Whether activations of ``iteration`` may have other shapes than the last one's."""
        return iteration in self._reshaped

    def forget(self, iteration: int) -> None:
        """``iteration`` and all before it are never repeated."""
        self._reshaped = {reshaped for reshaped in self._reshaped if reshaped > iteration}

    def plan(self, plan: Plan, grid: Grid) -> Plan:
        """The plan for ``grid`` that is made of ``plan``, or of the plan that ``plan`` was made of."""
        base = self._base.get(plan.digest, plan)
        if base.problem.grid == grid:
            return base
        key = base.digest, max(grid.microbatches)
        if key not in self._plans:
            block = self._block(grid.pipelines, max(grid.microbatches))
            made = resized(base, grid, block)
            self._plans[key], self._base[made.digest] = made, base
            for old in list(self._plans)[:-_KEPT]:
                self._base.pop(self._plans.pop(old).digest, None)
        return self._plans[key]

    def told(self) -> list[list[int]]:
        """The start and the changes so far, for a worker that comes in."""
        return [list(pair) for pair in (self._start, *self._changes)]

    def take(self, changes: Sequence[Sequence[int]]) -> None:
        """Take over the changes that another worker has `told`. Changes that this worker's script has made since (those
        are from a checkpoint, and this process has been in the job before) stay: the script does not repeat them."""
        self._start, *told = [(begin, count) for begin, count in changes]
        self._changes = sorted({**dict(self._changes), **dict(told)}.items())

    def _sized(self, microbatches: int) -> Grid:
        return replace(self._first, microbatches=(microbatches,) * self._first.pipelines)
