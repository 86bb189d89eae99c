"""Split backward: input gradients at once (B), weight gradients of linear layers later (W).

A linear layer's backward normally computes both gradients. In B it computes the input gradient and puts what the
weight gradient needs into a queue: the layer's input and the gradient of its output. The queue of a micro-batch is
emptied by that micro-batch's W. What fills it is in `runtime.splitter`, and Megatron's in its backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node

AddTo = Callable[[torch.Tensor], None]
"""Adds a gradient to a sum of the parameter's shape, in place."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(inputs, output gradient, sum), all of two dimensions: adds a weight's gradient to the sum without forming it."""

Contribution = tuple[nn.Parameter, torch.Tensor | AddTo]
"""A parameter and one micro-batch's gradient for it, as a tensor or as what adds it to a sum."""


class DeferredLinear(NamedTuple):
    """A linear layer's weight gradient, not computed yet.

    ``inputs`` is (..., in), ``output_gradient`` (..., out); a parameter that needs no gradient is None.
    ``transposed``: the weight is (in, out), as in GPT-2's Conv1D, and not (out, in). ``fused`` adds the
    weight's gradient to a sum, if given.
    """

    inputs: torch.Tensor
    output_gradient: torch.Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    transposed: bool = False
    fused: Kernel | None = None

    def add_weight(self, sum_: torch.Tensor) -> None:
        """Add the weight's gradient to ``sum_``, by ``fused``."""
        assert self.fused is not None
        gradient = _rows(self.output_gradient)
        inputs = cast(_rows(self.inputs), gradient.dtype)
        # The kernel's sum is (columns of the second, columns of the first).
        self.fused(*((gradient, inputs) if self.transposed else (inputs, gradient)), sum_)

    def contributions(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Both gradients, formed."""
        gradient = _rows(self.output_gradient)
        if self.bias is not None:  # first: it reads in the order in which memory lies
            yield self.bias, cast(gradient.sum(0), self.bias.dtype)
        if self.weight is not None:
            # Under autocast the layer ran in the gradient's type, whatever its inputs' own.
            inputs = cast(_rows(self.inputs), gradient.dtype)
            product = inputs.t().mm(gradient) if self.transposed else gradient.t().mm(inputs)
            yield self.weight, cast(product, self.weight.dtype)


@dataclass
class WeightQueue:
    """What the W of one micro-batch still has to do.

    ``formed`` holds gradients that B already formed for parameters that W will add to, so that all of a
    micro-batch's uses of a parameter are summed before anything else is added (promise P3).
    """

    deferred: list[DeferredLinear] = field(default_factory=list)
    formed: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)

    def identities(self) -> set[int]:
        """`id` of the parameters that W will add to: a tensor's own hash is a function call in Python."""
        return {id(parameter) for item in self.deferred for parameter in (item.weight, item.bias)
                if parameter is not None}

    def contributions(self) -> Iterator[Contribution]:
        """Each parameter once, with the micro-batch's whole gradient for it: as soon as that is formed, while the
        processor still has it at hand."""
        uses = Counter(id(parameter) for item in self.deferred for parameter in (item.weight, item.bias))
        sums = {id(parameter): (parameter, gradient) for parameter, gradient in self.formed}
        alone = {key for key, count in uses.items() if count == 1 and key not in sums}
        for item in self.deferred:
            if item.fused is not None and item.weight is not None and id(item.weight) in alone:
                yield item.weight, item.add_weight
                item = item._replace(weight=None)
            for parameter, gradient in item.contributions():
                if id(parameter) in alone:
                    yield parameter, gradient
                else:
                    before = sums.get(id(parameter))
                    sums[id(parameter)] = parameter, gradient if before is None else before[1] + gradient
        yield from sums.values()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(..., n) as (rows, n)."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class Call(NamedTuple):
    """One call of a linear layer in a forward: its ``inputs``, which had this ``version`` then; ``node`` of autograd's
    graph, at whose only output the gradient of the layer's output arrives. The rest is as in `DeferredLinear`, or None
    where a parameter needs no gradient."""

    inputs: torch.Tensor
    version: int
    node: Node
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    transposed: bool

    def deferred(self, output_gradient: torch.Tensor, fused: Kernel | None) -> DeferredLinear:
        """What W has to do for it. Raises RuntimeError, as autograd does, if the inputs have been written to since."""
        inputs, version, _, weight, bias, transposed = self
        if inputs._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of a linear layer, {tuple(inputs.shape)}, is at version {inputs._version}; expected version "
                f"{version} instead")
        return DeferredLinear(inputs, output_gradient, weight, bias, transposed, fused)


@dataclass
class Tape:
    """What the linear layers of one micro-batch's forward recorded for its backward.

    ``interrupted``: a part of the forward ran without gradients, as under a reentrant checkpoint.
    """

    calls: list[Call] = field(default_factory=list)
    interrupted: bool = False


class Deferring(Protocol):
    """What the runtime asks of whatever makes a framework's linear layers defer."""

    def recording(self) -> AbstractContextManager[Tape | None]:
        """Around the forward of a micro-batch whose backward is going to be split; gives what that one needs."""

    def into(self, queue: WeightQueue, tape: Tape | None) -> AbstractContextManager[None]:
        """Around that backward, whose forward gave ``tape``: its weight gradients are put into ``queue``."""
