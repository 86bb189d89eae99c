"""The commit of an iteration: one exchange over all workers that shows that every stage holds its gradient,
and gives each of them the same numbers to step with.

It is a sum of float64 vectors in which every slot is filled by exactly one worker (the lowest live one of
a stage) and is zero elsewhere: such a sum is exact in any order, so the verdict has the same bits on all
workers, whoever is left. The sum cannot complete anywhere before every worker has contributed, that is,
before every worker holds its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_recycle.errors import DataError
from megatron_recycle.plan import Grid
from megatron_recycle.runtime.groups import Groups
from megatron_recycle.runtime.reduce import all_reduce


@dataclass(frozen=True)
class Verdict:
    """What all workers know of a committed iteration.

    Attributes:
        iteration: the iteration.
        loss: mean loss of the global batch.
        norm_squares: squared gradient norm of each stage, as the framework counts it.
    """

    iteration: int
    loss: float
    norm_squares: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "loss": self.loss, "norm_squares": list(self.norm_squares)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        return cls(data["iteration"], data["loss"], tuple(data["norm_squares"]))


@dataclass
class Held:
    """The complete reduced gradient of an iteration and what goes into its verdict; equal on all peers.

    Attributes:
        iteration: the iteration.
        gradient: flat, (numel,).
        norm_square: of this stage's gradient.
        loss: mean loss of the global batch; 0 but at the last stage.
        digests: (total micro-batches,) float64, CRC-32 of each micro-batch's data; zeros between first and
            last stage.
    """

    iteration: int
    gradient: torch.Tensor
    norm_square: float
    loss: float
    digests: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """Everything but the gradient as one float64 vector, for a copy to a peer."""
        return torch.cat([torch.tensor([self.norm_square, self.loss], dtype=torch.float64), self.digests])

    @classmethod
    def from_numbers(cls, iteration: int, gradient: torch.Tensor, numbers: torch.Tensor) -> Held:
        return cls(iteration, gradient, numbers[0].item(), numbers[1].item(), numbers[2:])


def share_digests(grid: Grid, digests: Mapping[tuple[int, int], int], groups: Groups) -> torch.Tensor:
    """All micro-batches' digests on every peer of this stage, from those that each peer computed."""
    index = {place: position for position, place in enumerate(grid.items())}
    vector = torch.zeros(len(index), dtype=torch.float64)
    for place, value in digests.items():
        vector[index[place]] = value
    all_reduce(vector, groups.stage)
    return vector


def commit(held: Held, grid: Grid, groups: Groups, offer: int) -> tuple[Verdict, bool]:
    """Wait until every worker holds ``held.iteration``; returns its verdict, and whether all have ``offer``.

    ``offer`` is the number of the better plan that this worker has been offered, 0 for none; only one number
    is on offer at a time in a generation, so a sum of as many times that number as there are workers means
    that all of them have it. The commit thus carries the promise to adopt it in the next iteration.

    Raises:
        TransportAborted: the generation ended before all workers held it, as far as this one knows.
        DataError: the first and the last stage read different data.
    """
    stages, total = grid.stages, grid.total
    vector = torch.zeros(stages + 2 + 2 * total, dtype=torch.float64)
    vector[stages + 1] = offer
    stage = groups.me.stage
    if groups.peers(stage)[0] == groups.me:
        vector[stage] = held.norm_square
        if stage == stages - 1:
            vector[stages] = held.loss
            vector[-total:] = held.digests
        if stage == 0:
            vector[-2 * total:-total] = held.digests
    all_reduce(vector, groups.world)
    _compare(held.iteration, grid, vector[-2 * total:-total].tolist(), vector[-total:].tolist())
    numbers = vector.tolist()
    verdict = Verdict(held.iteration, numbers[stages], tuple(numbers[:stages]))
    return verdict, offer > 0 and numbers[stages + 1] == offer * len(groups.members)


def _compare(iteration: int, grid: Grid, first: Sequence[float], last: Sequence[float]) -> None:
    for (pipeline, microbatch), one, other in zip(grid.items(), first, last):
        if one != other:
            raise DataError(f"iteration {iteration}: the first and the last stage read different data for pipeline "
                            f"{pipeline}, micro-batch {microbatch}; the dataset must give the same sample for the same "
                            "index on every worker (no random augmentation without a seed per index), and a data "
                            "factory the same sequence each time")
