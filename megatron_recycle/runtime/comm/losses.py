"""The mean loss of an iteration, from the last stage to all workers, without waiting for any step.

`train_batch()` returns it; taken from the commit, it would make each stage wait for the slowest. The peers of the last
stage add up their losses as soon as each has run its last forward, while backwards go on, and each sends the result to
the workers that it is responsible for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from megatron_recycle.plan import Grid
from megatron_recycle.runtime.comm.comm import Pending, wait_all
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import Reduction
from megatron_recycle.runtime.comm.tags import LOSSES

_ATTEMPTS = 256  # attempts at an iteration that have tags of their own


class _Addition:
    """Sum of the losses and reports of micro-batches over the last stage's peers. It completes by itself.

    Args:
        groups, reduction: as of `LossRelay`.
        losses: a worker's own.
        reports: (total micro-batches, width), of its own micro-batches, zeros elsewhere; becomes all peers'.
    """

    def __init__(self, groups: Groups, reduction: Reduction, losses: Mapping[tuple[int, int], torch.Tensor],
                 reports: torch.Tensor) -> None:
        self._reduction, self._reports = reduction, reports
        self._sum = reduction.losses(losses)
        addends = [self._sum, reports] if reports.numel() else [self._sum]
        self._pending = [groups.stage_control.sum(addend) for addend in addends]

    def done(self) -> bool:
        return all(pending.done() for pending in self._pending)

    def wait(self) -> tuple[float, float]:
        """The mean loss, and the sum of the first number reported. Raises GenerationOver."""
        wait_all(self._pending)
        weight = sum(self._reports[:, 0].tolist()) if self._reports.numel() else 0.0
        return self._reduction.mean_loss(self._sum), weight


class _Line:
    """One worker's transfers of the numbers: from its sender, or to its receivers.

    Args:
        groups: as of `LossRelay`.
        stage: the last one.
        tag: of the messages.
    """

    def __init__(self, groups: Groups, stage: int, tag: int) -> None:
        last = groups.peers(stage)
        others = [worker for worker in groups.members if worker not in last]
        self._groups, self._tag = groups, tag
        self._numbers = torch.zeros(2, dtype=torch.float64)
        self._receiving: Pending | None = None
        self._targets: list[int] = []
        self._sending: list[Pending] = []
        ranks = groups.control_ranks
        if groups.me in last:
            self._targets = [ranks[worker] for index, worker in enumerate(others)
                             if last[index % len(last)] == groups.me]
        else:
            source = last[others.index(groups.me) % len(last)]
            self._receiving = groups.control.receive(self._numbers, ranks[source], tag)

    def tell(self, known: tuple[float, float]) -> None:
        """Send the numbers to the workers that this one is responsible for."""
        self._numbers.copy_(torch.tensor(known, dtype=torch.float64))
        self._sending = [self._groups.control.send(self._numbers, target, self._tag) for target in self._targets]

    def hear(self) -> tuple[float, float]:
        """The numbers, once they have arrived. Raises GenerationOver."""
        assert self._receiving is not None
        self._receiving.wait()
        loss, weight = self._numbers.tolist()
        return loss, weight


class LossRelay:
    """One worker's part in sharing the losses of one attempt at an iteration.

    Args:
        groups: the generation's handles.
        grid: of the job.
        width: numbers that each micro-batch reports (``Forward.report``).
        reduction: reduces the losses.
        iteration, attempt: name the messages.
        left_out: number of micro-batches left out of this iteration; the mean is over the others.
        stage: the stage that computes the loss; None: the last one.
        known: the result of `wait` if some script already has it; it is not computed again then.

    Attributes:
        reports: (total micro-batches, width), at the last stage, once `wait` has returned.
    """

    def __init__(self, groups: Groups, grid: Grid, width: int, reduction: Reduction, iteration: int,
                 attempt: int, left_out: int = 0, stage: int | None = None,
                 known: tuple[float, float] | None = None) -> None:
        self._groups, self._grid, self._reduction = groups, grid, reduction
        self._share = grid.total / (grid.total - left_out) if left_out < grid.total else math.nan
        last = grid.stages - 1 if stage is None else stage
        self._computes = groups.me in groups.peers(last)
        self._line = None if known else _Line(groups, last, LOSSES[iteration * _ATTEMPTS + attempt % _ATTEMPTS])
        self._addition: _Addition | None = None
        self._known = known
        self.reports = torch.zeros(grid.total, width, dtype=torch.float64)

    def add(self, losses: Mapping[tuple[int, int], torch.Tensor],
            reports: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """At the last stage, once its last forward has run: losses and reports of the micro-batches run here."""
        if self.reports.numel():
            index = {place: position for position, place in enumerate(self._grid.items())}
            for place, numbers in reports.items():
                self.reports[index[place]] = torch.tensor(numbers, dtype=torch.float64)
        self._addition = _Addition(self._groups, self._reduction, losses, self.reports)
        self.poll()

    @property
    def added(self) -> bool:
        """Whether this worker has given its part of the sum: once, even if forwards of other chunks still come."""
        return self._addition is not None

    def poll(self) -> None:
        """Pass the loss on if the peers' sums are complete."""
        if self._known is None and self._addition is not None and self._addition.done():
            self._tell(self._addition)

    def wait(self) -> tuple[float, float]:
        """The mean loss, and the global batch's sum of the first number reported (0 for none).

        Raises GenerationOver when the generation ends before they are known.
        """
        if self._known is None:
            if self._addition is not None:
                return self._tell(self._addition)
            assert self._line is not None
            self._known = self._line.hear()
        elif self._line is None and self._addition is not None:
            self._addition.wait()  # for the reports
        return self._known

    def end(self) -> None:
        """The attempt is void: take part in operations that others may have begun, so that none stays under way. Raises
        GenerationOver."""
        if self._addition is None and self._computes:
            self.add({}, {})
        self.wait()

    def _tell(self, addition: _Addition) -> tuple[float, float]:
        mean, weight = addition.wait()
        self._known = mean * self._share, weight
        assert self._line is not None
        self._line.tell(self._known)
        return self._known
