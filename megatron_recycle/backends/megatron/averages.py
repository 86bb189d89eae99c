"""Losses that a script reports as means over all pipelines (`average_losses_across_data_parallel_group`, as
pretrain_bert.py does).

A micro-batch may run on any worker, and at any time, so that no other one has a loss to give just then. Each reports
its own: the loop takes the mean over the whole global batch of what is reported, which is the mean of these means.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from megatron_recycle.errors import UnsupportedError

UTILITIES = "megatron.training.utils"
NAME = "average_losses_across_data_parallel_group"


class _Reported(torch.autograd.Function):
    """Numbers that are right to report, and would be wrong in a gradient."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError(f"what {NAME}() returns is part of the loss: here it is this micro-batch's own mean, "
                               "which may be reported and no more. Leave it out of what is trained")


def own_losses(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of one micro-batch, as one tensor (number of losses), to be reported. Their gradient raises
    UnsupportedError."""
    numbers = torch.cat([loss.detach().clone().view(1) for loss in losses])
    made: torch.Tensor = _Reported.apply(numbers.requires_grad_())
    return made


def install() -> None:
    """Put `own_losses` in the place of stock's function, wherever a script has imported it."""
    stock = getattr(sys.modules.get(UTILITIES), NAME, None)
    for module in list(sys.modules.values()):
        if stock is not None and getattr(module, "__dict__", {}).get(NAME) is stock:
            setattr(module, NAME, own_losses)
