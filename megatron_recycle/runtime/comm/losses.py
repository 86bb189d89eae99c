"""The mean loss of an iteration, from the last stage to everybody, without waiting for anybody's step.

`train_batch()` returns it; taken from the commit, it would make each stage wait for the slowest. The peers of the
last stage add up their losses as soon as each has run its last forward, while backwards go on, and each
sends the result to the workers that it is responsible for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from megatron_recycle.plan import Grid
from megatron_recycle.runtime.comm.comm import Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import Reduction
from megatron_recycle.runtime.comm.tags import LOSSES

_ATTEMPTS = 256  # attempts at an iteration that have tags of their own


class LossRelay:
    """One worker's part in sharing the losses of one attempt at an iteration.

    Args:
        groups: the generation's handles.
        grid: of the job.
        width: numbers that each micro-batch reports (``Forward.report``).
        reduction: how the losses become one.
        iteration, attempt: name the messages.
        left_out: micro-batches that this iteration goes without; the mean is of those that run.
    """

    def __init__(self, groups: Groups, grid: Grid, width: int, reduction: Reduction, iteration: int,
                 attempt: int, left_out: int = 0) -> None:
        self._groups = groups
        self._grid = grid
        self._reduction = reduction
        self._tag = LOSSES[iteration * _ATTEMPTS + attempt % _ATTEMPTS]
        self._share = grid.total / (grid.total - left_out) if left_out < grid.total else math.nan
        self._value = torch.zeros(2, dtype=torch.float64)
        self._adding: list[Pending] = []
        self._sum: torch.Tensor | None = None
        self._receiving: Pending | None = None
        self._sending: list[Pending] = []
        self._known: tuple[float, float] | None = None
        self.reports = torch.zeros(grid.total, width, dtype=torch.float64)
        """(total micro-batches, width), at the last stage, once `wait` has returned."""
        last = groups.peers(grid.stages - 1)
        self._at_last = groups.me in last
        others = [worker for worker in groups.members if worker not in last]
        self._targets = [worker for index, worker in enumerate(others) if last[index % len(last)] == groups.me]
        if not self._at_last:
            source = last[others.index(groups.me) % len(last)]
            self._receiving = groups.control.receive(self._value, groups.control_ranks[source], self._tag)

    def add(self, losses: Mapping[tuple[int, int], torch.Tensor],
            reports: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """At the last stage, once its last forward has run: losses and reports of the micro-batches run here."""
        self._sum = self._reduction.losses(losses)
        self._adding.append(self._groups.stage_control.sum(self._sum))
        if self.reports.numel():
            index = {place: position for position, place in enumerate(self._grid.items())}
            for place, numbers in reports.items():
                self.reports[index[place]] = torch.tensor(numbers, dtype=torch.float64)
            self._adding.append(self._groups.stage_control.sum(self.reports))
        self.poll()

    def poll(self) -> None:
        """Pass the loss on if the peers' sums are complete."""
        if self._sum is not None and self._known is None and all(pending.done() for pending in self._adding):
            self._finish()

    def wait(self) -> tuple[float, float]:
        """The mean loss, and the global batch's sum of the first number reported (0 for none).

        Raises GenerationOver when the generation ends before they are known.
        """
        if self._known is None and self._at_last:
            self._finish()
        elif self._known is None:
            assert self._receiving is not None
            self._receiving.wait()
            loss, weight = self._value.tolist()
            self._known = loss, weight
        assert self._known is not None
        return self._known

    def _finish(self) -> None:
        assert self._sum is not None
        for pending in self._adding:
            pending.wait()
        weight = sum(self.reports[:, 0].tolist()) if self.reports.numel() else 0.0
        self._known = self._reduction.mean_loss(self._sum) * self._share, weight
        self._value.copy_(torch.tensor(self._known, dtype=torch.float64))
        control, ranks = self._groups.control, self._groups.control_ranks
        self._sending = [control.send(self._value, ranks[worker], self._tag) for worker in self._targets]
