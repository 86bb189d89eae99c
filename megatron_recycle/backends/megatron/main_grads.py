"""Megatron's places for gradients (`main_grad`): they lie in the runtime's memory only.

Megatron's gradient buffers keep their length, which its checkpoints ask for, but free their memory, since they are
never written. From a step to the next iteration a parameter's `main_grad` is its part of the reduced gradient used in
the step. Before, and with the distributed optimizer always, it has a shape and no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class MainGrads:
    """`main_grad` of a stage's ``parameters``.

    Args:
        models: the stage's, in Megatron's DistributedDataParallel, whose buffers are emptied.
        parameters: with places for gradients.
    """

    def __init__(self, models: Sequence[Any], parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._buffers = [buffer for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
        self._nothing: dict[int, torch.Tensor] = {}
        for buffer in self._buffers:
            buffer.grad_data = torch.empty_like(buffer.grad_data, device="meta")
            for bucket in buffer.buckets:
                bucket.grad_data = buffer.grad_data[bucket.offset:bucket.offset + bucket.grad_data.numel()]
            for parameter, (start, end, *_) in buffer.param_index_map.items():
                self._nothing[id(parameter)] = buffer.grad_data[start:end].view(parameter.shape)
        self.forget()

    def show(self, gradients: Sequence[torch.Tensor]) -> None:
        """Set `main_grad` to ``gradients``, one for each parameter."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.main_grad = gradient

    def forget(self) -> None:
        """Keep no gradients alive."""
        for parameter in self._parameters:
            parameter.main_grad = self._nothing[id(parameter)]

    def versions(self) -> list[int]:
        """Version counters: they differ once a gradient has been written to, or replaced."""
        found = [buffer.grad_data._version for buffer in self._buffers]
        for parameter in self._parameters:
            found += [id(parameter.main_grad), parameter.main_grad._version]
        return found
