"""Evaluation: forwards only, through failures.

A pass over one global batch changes nothing but a table of numbers, so a failure in it costs the pass. It counts as
done where the exchange of that table, which takes every worker, has ended. A failure may let it end at some workers
only: these are at most one pass ahead, and give the others the table in the recovery.
"""

from __future__ import annotations

import torch

from megatron_recycle.membership import Standing
from megatron_recycle.plan import Grid
from megatron_recycle.runtime.comm.handles import Groups

Reports = dict[tuple[int, int], tuple[float, ...]]
"""(pipeline, micro-batch) -> what the last stage reports of it."""


class Evaluations:
    """The reports of the last pass, the same on all workers.

    Args:
        standing: where the worker stands; knows which passes are done.
        grid: of the job.
        width: numbers that the last stage reports of each micro-batch.

    Attributes:
        table: (total micro-batches, width) float64, of the last pass that is done everywhere.
    """

    def __init__(self, standing: Standing, grid: Grid, width: int) -> None:
        self._grid = grid
        self._standing = standing
        self.table = torch.zeros(grid.total, width, dtype=torch.float64)

    def complete(self, reports: Reports, groups: Groups) -> None:
        """All forwards of this worker have run: exchange what they reported, and count the pass as done.

        Raises GenerationOver.
        """
        table = torch.zeros_like(self.table)
        reports = reports if groups.part == 0 else {}  # a worker's parts report the same
        for position, place in enumerate(self._grid.items()):
            if place in reports:
                table[position] = torch.tensor(reports[place], dtype=torch.float64)
        # One slot per micro-batch, filled by the one worker that ran it: exact in any order.
        groups.control.sum(table).wait()
        self.table = table
        self._standing.evaluate()

    def reconcile(self, groups: Groups) -> None:
        """Bring workers that a failure kept from the end of a pass level with the others. Raises GenerationOver."""
        counts = torch.zeros(groups.control.size, dtype=torch.float64)
        me = groups.control.rank
        counts[me] = self._standing.evaluated
        groups.control.sum(counts).wait()
        newest = int(counts.max())
        if bool((counts == newest).all()):
            return
        giver = counts.tolist().index(newest)
        table = self.table.clone() if me == giver else torch.zeros_like(self.table)
        groups.control.sum(table).wait()
        self.table, self._standing.evaluated = table, newest
