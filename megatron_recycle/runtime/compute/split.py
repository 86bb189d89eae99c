"""Split backward: input gradients at once (B), weight gradients of linear layers later (W).

A linear layer's backward normally computes both gradients. Here it computes the input gradient and, in the runtime's
own backward, queues the operands of the weight gradient: the layer's input and the gradient of its output. The queue of
a micro-batch is emptied by that micro-batch's W. In any other backward (see `deferral`) it computes both.

The parameter itself is kept on the autograd context, not among the saved tensors: checkpointing replaces
saved tensors by detached copies, and the gradient would be computed for those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

from megatron_recycle.runtime.compute.deferral import Deferral, task_now

AddTo = Callable[[torch.Tensor], None]
"""Adds a gradient to a sum of the parameter's shape, in place."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(inputs, output gradient, sum), all of two dimensions: adds a weight's gradient to the sum without forming it."""

Contribution = tuple[nn.Parameter, torch.Tensor | AddTo]
"""A parameter and one micro-batch's gradient for it, as a tensor or as a function that adds it to a sum."""


class DeferredLinear(NamedTuple):
    """A linear layer's weight gradient, not computed yet.

    ``inputs`` is (..., in), ``output_gradient`` (..., out); a parameter that needs no gradient is None. ``transposed``:
    the weight is (in, out), as in GPT-2's Conv1D, and not (out, in). ``fused`` adds the weight's gradient to a sum, if
    given. ``gather`` makes the layer's whole input from this process's rows, if they are not all (sequence
    parallelism). It runs in W, so that the whole input is not kept.
    """

    inputs: torch.Tensor
    output_gradient: torch.Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    transposed: bool = False
    fused: Kernel | None = None
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def kept(self) -> Sequence[torch.Tensor]:
        """The tensors whose memory this holds until W."""
        return self.inputs, self.output_gradient

    @property
    def whole_inputs(self) -> torch.Tensor:
        """All rows that the layer has multiplied by its weight."""
        return self.inputs if self.gather is None else self.gather(self.inputs)

    def add_weight(self, sum_: torch.Tensor) -> None:
        """Add the weight's gradient to ``sum_``, by ``fused``."""
        assert self.fused is not None
        gradient = _rows(self.output_gradient)
        inputs = _cast(_rows(self.whole_inputs), gradient.dtype)
        # The kernel's sum is (columns of the second, columns of the first).
        self.fused(*((gradient, inputs) if self.transposed else (inputs, gradient)), sum_)

    def contributions(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Both gradients, formed."""
        gradient = _rows(self.output_gradient)
        if self.bias is not None:  # first: it reads in the order in which memory lies
            yield self.bias, _cast(gradient.sum(0), self.bias.dtype)
        if self.weight is not None:
            # Under autocast the layer ran in the gradient's type, whatever its inputs' type.
            inputs = _cast(_rows(self.whole_inputs), gradient.dtype)
            product = inputs.t().mm(gradient) if self.transposed else gradient.t().mm(inputs)
            yield self.weight, _cast(product, self.weight.dtype)


@dataclass
class WeightQueue:
    """The weight gradients that the W of one micro-batch still has to compute.

    ``formed`` holds gradients that B already formed for parameters that W will add to, so that all of a
    micro-batch's uses of a parameter are summed before anything else is added (promise P3).
    """

    deferred: list[DeferredLinear] = field(default_factory=list)
    formed: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """Whether W needs nothing of the worker's other parts."""
        return all(item.gather is None for item in self.deferred)

    def gathered(self) -> WeightQueue:
        """The same gradients, from inputs that are whole: W needs nothing of the worker's other parts then."""
        return WeightQueue([item if item.gather is None else item._replace(inputs=item.whole_inputs, gather=None)
                            for item in self.deferred], self.formed)

    def identities(self) -> set[int]:
        """`id` of the parameters that W will add to: a tensor's own hash is a function call in Python."""
        return {id(parameter) for item in self.deferred for parameter in (item.weight, item.bias)
                if parameter is not None}

    def contributions(self) -> Iterator[Contribution]:
        """Each parameter once, with the micro-batch's whole gradient for it, as soon as that is formed and still in the
        processor's cache."""
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


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class Deferring(Protocol):
    """Interface to the object that makes a framework's linear layers defer.

    Attributes:
        deferring_costs: whether a backward takes longer for being split.
    """

    @property
    def deferring_costs(self) -> bool: ...

    def adopt(self, module: nn.Module) -> None:
        """Make another module's linear layers, which belong to no stage of this worker, defer as well."""

    def whole(self) -> AbstractContextManager[None]:
        """Inside the block layers do not defer. It encloses both F and B of a micro-batch, because of layers that B
        recomputes. Used only where deferring costs."""

    def into(self, queue: WeightQueue | None, roots: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """The backward from ``roots`` inside the block puts its weight gradients into ``queue``; None: computes them at
        once."""


class Splitter:
    """Makes the linear layers of one model defer their weight gradients on demand.

    Everything else (embeddings, norms, a user's own autograd functions, layers with hooks on their parameters, or with
    tensors in their parameters' place) runs whole in B. ``kernel``, if given, adds up the deferred gradients.

    Attributes:
        deferral: the queue of the backward that runs now.
    """

    def __init__(self, model: nn.Module, kernel: Kernel | None = None) -> None:
        self._model = model
        self.kernel = kernel
        self.deferral: Deferral[WeightQueue] = Deferral()
        self.stock = False
        """Whether layers run as if there were no splitter."""
        self.layers = [module for module in model.modules() if _splittable(module)]
        self.adopt(model)

    def adopt(self, module: nn.Module) -> None:
        """Make the linear layers of ``module`` defer as well, for as long as they live."""
        for layer in module.modules():
            if _splittable(layer):
                layer.forward = _Forward(layer, self)

    @property
    def deferring_costs(self) -> bool:
        """Whether the Python around each layer is a net cost: a kernel that adds up deferred gradients saves more."""
        return self.kernel is None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside the block layers run as in stock."""
        self.stock = True
        try:
            yield
        finally:
            self.stock = False

    def into(self, queue: WeightQueue | None, roots: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """The backward from ``roots`` inside the block defers into ``queue``."""
        return self.deferral.into(queue, roots)

    def describe(self) -> str:
        """One line: how much of the model's backward is split, and which modules run whole in B."""
        total = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        split = {parameter for layer in self.layers for parameter in layer.parameters(recurse=False)}
        whole = []
        for name, module in self._model.named_modules():
            count = sum(parameter.numel() for parameter in module.parameters(recurse=False)
                        if parameter.requires_grad and parameter not in split)
            if count:
                whole.append((count, f"{name or 'model'} ({type(module).__name__}, {100 * count / total:.1f} %)"))
        share = 100 * (1 - sum(count for count, _ in whole) / total) if total else 0.0
        text = f"weight gradients of {len(self.layers)} linear layers ({share:.1f} % of the parameters) can be delayed"
        if whole:
            largest = sorted(whole, key=lambda item: -item[0])
            text += "; whole in B: " + ", ".join(line for _, line in largest[:_NAMED])
            text += f" and {len(whole) - _NAMED} smaller ones" if len(whole) > _NAMED else ""
        return text + ("" if self.kernel is None else "; apex's kernel adds them up")


_NAMED = 6  # modules that a description lists


def _splittable(module: nn.Module) -> bool:
    # A subclass may compute something else, and a parametrised weight is no leaf: both run whole in B.
    return (type(module) is nn.Linear or _is_conv1d(module)) and isinstance(
        module._parameters.get("weight"), nn.Parameter)


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer with an (in, out) weight, as in the transformers package, which need not be installed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "bias", None) is not None


class _Forward:
    """A linear layer's `forward` that can defer. A copy of the layer, or one loaded from a file, has its own class's
    again: it is no part of the model."""

    def __init__(self, layer: nn.Module, splitter: Splitter) -> None:
        self._layer = layer
        self._splitter = splitter
        self._stock, self._transposed = type(layer).forward, _is_conv1d(layer)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        layer, splitter = self._layer, self._splitter
        weight, bias = layer.weight, layer.bias
        # Under autocast stock would keep a copy of its input in 16 bits; a split layer keeps none.
        as_stock = splitter.stock and not torch.is_autocast_enabled(inputs.device.type)
        # Nothing else may decide: a checkpoint that recomputes this has to make the same choice again.
        if as_stock or not torch.is_grad_enabled() or _transformed() or not _own(weight) or not _own(bias):
            return self._stock(layer, inputs)
        return _SplitLinear.apply(inputs, weight, bias, splitter, self._transposed)

    def __reduce__(self) -> Any:
        return getattr, (self._layer, "forward")  # of a layer that has no attributes of its own yet


def _own(parameter: torch.Tensor | None) -> bool:
    """Whether it is not a tensor that `torch.func.functional_call` has put in a parameter's place."""
    return parameter is None or (isinstance(parameter, nn.Parameter) and parameter.is_leaf)


def watched(parameter: nn.Parameter | None) -> bool:
    """Whether a parameter has gradient hooks, which autograd runs only if it computes the gradient itself."""
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _transformed() -> bool:
    """Whether the code is compiled, or differentiated by other means than a backward, which ask more of a function."""
    return (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0)


class _SplitLinear(torch.autograd.Function):
    # A layer that ran as stock on detached parameters, and asked autograd for its output's gradient, would spare the
    # Python below. But this would skip hooks on that output, checkpoints that contain other parameters, and gradients
    # that the forward itself takes.

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                splitter: Splitter, transposed: bool) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.bias, ctx.splitter, ctx.transposed = weight, bias, splitter, transposed
        ctx.made_in = task_now()
        if transposed:
            assert bias is not None
            flat = torch.addmm(bias, inputs.view(-1, inputs.shape[-1]), weight)
            return flat.view(*inputs.shape[:-1], weight.shape[1]).data
        return functional.linear(inputs, weight, bias).data  # no view, so that it may be written to

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, = gradients
        inputs, = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        item = DeferredLinear(inputs, gradient, ctx.weight if needs_weight else None,
                              ctx.bias if needs_bias else None, ctx.transposed, ctx.splitter.kernel)
        for_inputs = None
        if needs_input:
            weight = _cast(ctx.weight, gradient.dtype)
            for_inputs = _cast(gradient.matmul(weight.t() if ctx.transposed else weight), inputs.dtype)
        queue = ctx.splitter.deferral.queue_for(ctx.made_in)
        if queue is not None and not watched(ctx.weight) and not watched(ctx.bias):
            if needs_weight or needs_bias:
                queue.deferred.append(item)
            return for_inputs, None, None, None, None
        now = dict(item.contributions())
        return for_inputs, now.get(ctx.weight), now.get(ctx.bias), None, None
