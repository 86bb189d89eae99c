"""What the runtime asks of a framework: one stage's computation and one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from megatron_recycle.runtime.commit import Verdict
from megatron_recycle.runtime.data import Batch


@dataclass(frozen=True)
class Forward:
    """Result of one micro-batch's forward.

    ``saved`` is whatever the stage's backward needs; ``outputs`` go to the next stage (empty at the last);
    ``loss`` is the micro-batch's unscaled loss, a scalar, at the last stage only.
    """

    saved: Any
    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None


class Stage(Protocol):
    """One stage of the model with its optimizer, at home on this worker; implemented by the backends."""

    device: torch.device

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters that get gradients, in the same order on all peers."""

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        """Forward of one micro-batch. ``inputs`` are the previous stage's outputs as leaves that require
        gradients (None at the first stage), ``batch`` the micro-batch's data (None between first and last)."""

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Backward of one micro-batch. ``gradients`` belong to the floating-point outputs (empty at the last
        stage, which starts from its loss). Leaves parameter gradients in ``.grad`` (or in the splitter's queue)
        and returns those of the floating-point inputs."""

    def norm_square(self, gradients: Sequence[torch.Tensor]) -> float:
        """This stage's share of the squared global gradient norm; 0 if the framework does not count it."""

    def step(self, gradients: Sequence[torch.Tensor], verdict: Verdict) -> None:
        """One optimizer update with the reduced ``gradients``, one per parameter; may change them in place."""

    def regroup(self, groups: Any) -> None:
        """Point every handle that the framework keeps at the new generation's groups."""
