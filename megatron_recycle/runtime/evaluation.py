"""Evaluation: forwards only, through failures.

A pass over one global batch changes only a table of numbers, so a failure in it costs the pass. It counts as done once
the exchange of that table, which takes every worker, has ended. A failure may let it end at some workers only: these
are at most one pass ahead, and give the others the table in the recovery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from msgspec.structs import asdict

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.membership import Standing
from megatron_recycle.plan import Grid, Microbatch, Plan
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.iteration_history import History, Rows

Reports = dict[tuple[int, int], tuple[float, ...]]
"""(pipeline, micro-batch) -> the last stage's report of it."""


LOSS_WIDTH = 2
"""Numbers reported of a micro-batch where the framework reports none of its own: `loss_report`."""
_FAILED = 0.5
"""Added to the number of a pass that was a checkpoint and could not be written."""
_KNOWN, _RECORDED = 1, 2
"""Flags of a worker that knows why the last checkpoint could not be written, and of the one that has recorded it."""
_UNKNOWN = "a checkpoint could not be written"
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@runtime_checkable
class Shared(Protocol):
    """Micro-batches, some of which only some workers can read."""

    def share(self, plan: Plan, microbatches: Sequence[Microbatch], number: int, groups: Groups) -> bool:
        """Before pass ``number`` over ``microbatches`` in the order of ``plan``, by all workers together: give each
        worker the data that it reads. Returns whether all have theirs, the same on all. Raises GenerationOver."""


def passes(grid: Grid, microbatches: int) -> int:
    """Number of passes over a global batch that evaluate so many ``microbatches`` of each pipeline."""
    return math.ceil(microbatches / max(grid.microbatches))


def loss_report(loss: torch.Tensor | None) -> tuple[float, ...]:
    """A micro-batch's loss, in a table of float64, and its type. Raises UnsupportedError if it is no scalar."""
    if loss is None or loss.numel() != 1 or loss.dtype not in _TYPES:
        raise UnsupportedError("evaluation needs one scalar loss of each micro-batch: return one from loss_fn")
    return loss.item(), float(_TYPES.index(loss.dtype))


def losses(table: torch.Tensor) -> torch.Tensor:
    """The losses in a table of `loss_report`, (micro-batches,), in their own type."""
    return table[:, 0].to(_TYPES[int(table[0, 1])])


@dataclass
class _FailedSave:
    """The last checkpoint that could not be written, on a worker that knows why: the last iteration ``committed``
    before it; how to ``record`` it, and whether this worker has `recorded` it."""

    committed: int
    record: Callable[[], None]
    recorded: bool = False

    def do(self) -> None:
        self.record()
        self.recorded = True


class Evaluated(Rows, frozen=True):
    """Results of passes, and the numbers of `failed` passes."""

    failed: Sequence[int]


class Evaluations:
    """The reports of the last pass, the same on all workers.

    Args:
        standing: where the worker stands; counts the passes that are done.
        grid: of the job.
        width: numbers that the last stage reports of each micro-batch.

    Attributes:
        table: (total micro-batches, width) float64, of the last pass that is done everywhere; NaN where a micro-batch
            was left out.
        history: the tables of passes so far, by the number of the pass.
        failed: the passes that were checkpoints and could not be written, by number, with the reason where it is
            known here.
    """

    def __init__(self, standing: Standing, grid: Grid, width: int) -> None:
        self._grid = grid
        self._standing = standing
        self.table = torch.zeros(grid.total, width, dtype=torch.float64)
        self.history = History()
        self.failed: dict[int, str] = {}
        self._failed_save: _FailedSave | None = None

    def of(self, number: int) -> torch.Tensor:
        """The table of pass ``number``, which is done; a later pass's table if it is let go (`History`)."""
        row = self.history.of(number) if number < self._standing.evaluated else None
        if row is None:
            return self.table
        return torch.frombuffer(bytearray(row), dtype=torch.float64).view_as(self.table)

    def complete(self, reports: Reports, groups: Groups) -> None:
        """All forwards of this worker have run: exchange their reports, and count the pass as done.

        Raises GenerationOver.
        """
        table = torch.zeros_like(self.table)
        reports = reports if groups.part == 0 else {}  # a worker's parts report the same
        for position, place in enumerate(self._grid.items()):
            if place in reports:
                table[position] = torch.tensor(reports[place], dtype=torch.float64)
        # One slot per micro-batch, filled by the one worker that ran it: exact in any order.
        groups.control.sum(table).wait()
        self._done(table)

    def fail(self, reason: str, record: Callable[[], None], first: bool) -> None:
        """The pass was a checkpoint that could not be written, as all workers know. ``record`` writes that down: on the
        ``first`` worker that could not write, unless a failure kept it from knowing (`reconcile`)."""
        self._standing.evaluate()
        self.failed[self._standing.evaluated] = reason
        self._failed_save = _FailedSave(self._standing.committed, record)
        if first:
            self._failed_save.do()

    def told(self) -> Evaluated:
        """The results of passes so far, for a worker that comes in."""
        return Evaluated(**asdict(self.history.told()), failed=list(self.failed))

    def take(self, results: Evaluated) -> None:
        """Take over the results that another worker has `told`, and no others."""
        self.history.take(results)
        self.failed = dict.fromkeys(results.failed, _UNKNOWN)

    def skip(self) -> None:
        """There is no pass, as all workers know: its table is NaN."""
        self._done(torch.full_like(self.table, torch.nan))

    def _done(self, table: torch.Tensor) -> None:
        self._standing.evaluate()
        self._keep(table)

    def _keep(self, table: torch.Tensor) -> None:
        self.table = table
        self.history.note(self._standing.evaluated, table.numpy().tobytes())

    def reconcile(self, groups: Groups) -> None:
        """Bring workers that a failure kept from the end of a pass level with the others. Raises GenerationOver."""
        reports = torch.zeros(2, groups.control.size, dtype=torch.float64)
        me, last = groups.control.rank, self._failed_save
        reports[0, me] = self._standing.evaluated + _FAILED * (self._standing.evaluated in self.failed)
        if last is not None and last.committed == self._standing.committed:
            reports[1, me] = _RECORDED if last.recorded else _KNOWN
        groups.control.sum(reports).wait()
        counts, known = reports
        if last is not None and _RECORDED not in known and me in (known == _KNOWN).nonzero()[:1]:
            last.do()
        newest = int(counts.max())
        if counts.max() > newest:
            self.failed.setdefault(newest, _UNKNOWN)
        counts = counts.floor()
        if bool((counts == newest).all()):
            return
        giver = counts.tolist().index(newest)
        table = self.table.clone() if me == giver else torch.zeros_like(self.table)
        groups.control.sum(table).wait()
        self._standing.evaluated = newest
        self._keep(table)
