"""Deferred weight gradients for Megatron's linear layers.

`ColumnParallelLinear`, `RowParallelLinear` and the output layer look their autograd function up as a global of
`tensor_parallel.layers` each time they run, so a subclass put there reaches all of them.

With `gradient_accumulation_fusion` Megatron adds weight gradients to `main_grad` in apex's kernel. Here that
kernel adds them to the runtime's accumulators, when W runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import nn

from megatron_recycle.backends.patching import STOCK, stock_of
from megatron_recycle.runtime.compute.deferral import Deferral, task_now
from megatron_recycle.runtime.compute.split import DeferredLinear, WeightQueue, watched


class MegatronSplitter:
    """Makes Megatron's linear layers of this process defer their weight gradients on demand."""

    deferring_costs = False
    """They are Python autograd functions in any case."""

    def __init__(self) -> None:
        self.deferral: Deferral[WeightQueue] = Deferral()
        now = layers.LinearWithGradAccumulationAndAsyncCommunication
        layers.LinearWithGradAccumulationAndAsyncCommunication = _function(stock_of(now), self)

    def adopt(self, module: nn.Module) -> None:
        """Nothing to do: all of this process's layers defer."""

    def whole(self) -> AbstractContextManager[None]:
        """Nothing to do: a backward without a queue defers nothing, and the forward is the same."""
        return nullcontext()

    def into(self, queue: WeightQueue | None, roots: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """The backward from ``roots`` inside the block defers into ``queue``."""
        return self.deferral.into(queue, roots)


def _trained(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """``parameter``, unless Megatron does not train it: frozen when gradients got their places."""
    return parameter if hasattr(parameter, "main_grad") else None


def _gathered(group: dist.ProcessGroup, rows: torch.Tensor) -> torch.Tensor:
    """All parts' ``rows``, in order; the parts run the same plan, and reach this call together."""
    whole = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
    dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
    return whole


def _kernel(ctx: Any) -> Any:
    """Apex's kernel, for a trained weight of a layer built with `gradient_accumulation_fusion`; else None."""
    if not ctx.gradient_accumulation_fusion or not ctx.needs_input_grad[1]:
        return None
    kernels: Any = layers.fused_weight_gradient_mlp_cuda
    whole = ctx.recycle_weight.main_grad.dtype == torch.float32
    return kernels.wgrad_gemm_accum_fp32 if whole else kernels.wgrad_gemm_accum_fp16


def _function(stock: Any, splitter: MegatronSplitter) -> Any:
    class SplitLinear(stock):
        """Megatron's linear function, with a backward that can defer the weight's gradient."""

        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                    *rest: Any) -> torch.Tensor:
            # Kept apart from the saved tensors, since hooks on those may return copies.
            ctx.recycle_weight, ctx.recycle_bias, ctx.recycle_made_in = weight, bias, task_now()
            return stock.forward(ctx, inputs, weight, bias, *rest)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            gradient, = gradients
            inputs = ctx.saved_tensors[0]
            needs_input, needs_weight, needs_bias, *others = ctx.needs_input_grad
            for_inputs, pending, group = None, None, ctx.tp_group
            if needs_input:
                for_inputs = gradient.matmul(ctx.recycle_weight)
                if ctx.sequence_parallel:  # each part goes on with its own rows
                    whole, for_inputs = for_inputs, torch.empty_like(inputs, memory_format=torch.contiguous_format)
                    pending = dist.reduce_scatter_tensor(for_inputs, whole, group=group, async_op=True)
                elif ctx.allreduce_dgrad:
                    pending = dist.all_reduce(for_inputs, group=group, async_op=True)
            item = DeferredLinear(inputs, gradient, _trained(ctx.recycle_weight) if needs_weight else None,
                                  _trained(ctx.recycle_bias) if needs_bias else None, fused=_kernel(ctx),
                                  gather=partial(_gathered, group) if ctx.sequence_parallel else None)
            now: dict[Any, torch.Tensor] = {}
            queue = splitter.deferral.queue_for(ctx.recycle_made_in)
            if queue is not None and not watched(ctx.recycle_weight) and not watched(ctx.recycle_bias):
                queue.deferred.append(item)
            else:
                now = dict(item.contributions())
            if pending is not None:
                pending.wait()
            bias = None if ctx.recycle_bias is None else now.get(ctx.recycle_bias)
            return (for_inputs, now.get(ctx.recycle_weight), bias, *[None] * len(others))

    setattr(SplitLinear, STOCK, stock)
    return SplitLinear
