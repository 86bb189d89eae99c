"""Split backward: input gradients at once (B), weight gradients of linear layers later (W).

A linear layer's backward normally computes both gradients. Here it computes the input gradient and, while
a queue is open, puts what the weight gradient needs into that queue: the layer's input and the gradient
of its output. The queue of a micro-batch is emptied by that micro-batch's W.

The parameter itself is kept on the autograd context, not among the saved tensors: checkpointing replaces
saved tensors by detached copies, and the gradient would be computed for those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

Contribution = tuple[nn.Parameter, torch.Tensor]
"""A parameter and one micro-batch's gradient for it."""


@dataclass(frozen=True)
class DeferredLinear:
    """A linear layer's weight gradient, not computed yet.

    ``inputs`` is (..., in), ``output_gradient`` (..., out); a parameter that needs no gradient is None.
    """

    inputs: torch.Tensor
    output_gradient: torch.Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def contributions(self) -> Iterator[Contribution]:
        gradient = self.output_gradient.reshape(-1, self.output_gradient.shape[-1])
        if self.weight is not None:
            yield self.weight, gradient.t().mm(self.inputs.reshape(-1, self.inputs.shape[-1]))
        if self.bias is not None:
            yield self.bias, gradient.sum(0)

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.output_gradient.nbytes


@dataclass
class WeightQueue:
    """What the W of one micro-batch still has to do.

    ``formed`` holds gradients that B already formed for parameters that W will add to, so that all of a
    micro-batch's uses of a parameter are summed before anything else is added (promise P3).
    """

    deferred: list[DeferredLinear] = field(default_factory=list)
    formed: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)

    def parameters(self) -> set[nn.Parameter]:
        return {parameter for item in self.deferred for parameter in (item.weight, item.bias)
                if parameter is not None}

    def contributions(self) -> Iterator[Contribution]:
        """Each parameter once, with the micro-batch's whole gradient for it."""
        sums = dict(self.formed)
        for item in self.deferred:
            for parameter, gradient in item.contributions():
                before = sums.get(parameter)
                sums[parameter] = gradient if before is None else before + gradient
        yield from sums.items()


class Deferring(Protocol):
    """What the runtime asks of whatever makes a framework's linear layers defer."""

    def into(self, queue: WeightQueue | None) -> AbstractContextManager[None]:
        """Backwards inside the block put their weight gradients into ``queue``; None: compute them at once."""


class Splitter:
    """Makes the linear layers of one model defer their weight gradients on demand."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._queue: WeightQueue | None = None
        self.layers = [module for module in modules if _splittable(module)]
        for layer in self.layers:
            layer.forward = _forward_of(layer, self)

    @property
    def queue(self) -> WeightQueue | None:
        """Where a backward that runs now puts its weight gradients; None: compute them at once."""
        return self._queue

    @contextmanager
    def into(self, queue: WeightQueue | None) -> Iterator[None]:
        """Backwards inside the block defer into ``queue``."""
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None


def _splittable(module: nn.Module) -> bool:
    # A subclass may compute something else, and a parametrised weight is no leaf: both run whole in B.
    return type(module) is nn.Linear and isinstance(module._parameters.get("weight"), nn.Parameter)


def _forward_of(layer: nn.Linear, splitter: Splitter) -> Any:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return _SplitLinear.apply(inputs, layer.weight, layer.bias, splitter)
    return forward


class _SplitLinear(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                splitter: Splitter) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.bias, ctx.splitter = weight, bias, splitter
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, = gradients
        inputs, = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        item = DeferredLinear(inputs, gradient, ctx.weight if needs_weight else None,
                              ctx.bias if needs_bias else None)
        for_inputs = gradient.matmul(ctx.weight) if needs_input else None
        queue = ctx.splitter.queue
        if queue is not None:
            queue.deferred.append(item)
            return for_inputs, None, None, None
        now = dict(item.contributions())
        return for_inputs, now.get(ctx.weight), now.get(ctx.bias) if ctx.bias is not None else None, None
