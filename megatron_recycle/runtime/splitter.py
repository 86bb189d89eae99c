"""Makes a model's linear layers leave their weight gradients to W.

While a forward is recorded, a layer computes on its parameters as constants and notes its input, and where the gradient
of its output arrives. The backward asks autograd for those gradients beside the others: no Python runs in it. Where
that cannot be (see `_recordable`), the layer is an autograd function of ours, which leaves both when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.split import Call, DeferredLinear, Kernel, Tape, WeightQueue, cast


class Splitter:
    """Makes the linear layers of one model defer their weight gradients on demand.

    Everything else (embeddings, norms, a user's own autograd functions, layers with hooks on their parameters) runs
    whole in B. What is deferred is added up by ``kernel``, if given.
    """

    def __init__(self, model: nn.Module, kernel: Kernel | None = None) -> None:
        self._model = model
        self.kernel = kernel
        self.tape: Tape | None = None
        """What a forward that runs now records; None: nothing."""
        self.queue: WeightQueue | None = None
        """Where a backward that runs now puts its weight gradients; None: compute them at once."""
        self.begun = False
        """Whether a backward has deferred something yet."""
        self._recorded: Tape | None = None  # by the forward of the backward that runs now
        self._asked = False  # whether autograd has been asked for a tape's gradients, and gave them
        self._refused = False  # it has been, and something in the model refuses to be part of that
        self.layers = [module for module in model.modules() if _splittable(module)]
        for layer in self.layers:
            layer.forward = _forward_of(layer, self)

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Forwards inside the block record what a backward that defers needs."""
        self.tape = tape = Tape()
        try:
            yield tape
        finally:
            self.tape = None

    @contextmanager
    def into(self, queue: WeightQueue, tape: Tape | None) -> Iterator[None]:
        """`backward` inside the block, of the forward that recorded ``tape``, defers into ``queue``."""
        self.queue, self._recorded = queue, tape
        try:
            yield
        finally:
            self.queue = self._recorded = None

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None,
                 leaves: Sequence[torch.Tensor]) -> None:
        """As `torch.autograd.backward`: adds to the ``.grad`` of ``leaves``, which are all that the outputs depend on,
        except for what goes into the queue."""
        tape, queue = self._recorded, self.queue
        if tape is not None and queue is not None and tape.calls:
            self.begun = True
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            if self._may_ask(tape, wanted) and self._ask(tape, queue, outputs, gradients, wanted):
                return
            for call in tape.calls:
                call.node.register_prehook(self._leaver(call, queue))
        torch.autograd.backward(outputs, gradients)

    def _may_ask(self, tape: Tape, leaves: Sequence[torch.Tensor]) -> bool:
        # Being asked, autograd accumulates nothing, after which hooks could run, and reentrant checkpoints refuse.
        return not (tape.interrupted or self._refused or any(leaf._post_accumulate_grad_hooks for leaf in leaves))

    def _ask(self, tape: Tape, queue: WeightQueue, outputs: Sequence[torch.Tensor],
             gradients: Sequence[torch.Tensor] | None, leaves: Sequence[torch.Tensor]) -> bool:
        """The backward by way of `torch.autograd.grad`; False, with the graph as it was, if the model turns out to
        refuse that."""
        edges = [GradientEdge(call.node, 0) for call in tape.calls]
        try:
            found = torch.autograd.grad(outputs, [*edges, *leaves], gradients, retain_graph=not self._asked,
                                        allow_unused=True)
        except RuntimeError:
            if self._asked:
                raise
            self._refused = True  # or something else is wrong, which the usual way meets again
            queue.deferred.clear()
            return False
        self._asked = True
        # In the order in which the layers' own backwards would have left them.
        queue.deferred += [call.deferred(gradient, self.kernel)
                           for call, gradient in reversed(list(zip(tape.calls, found))) if gradient is not None]
        for leaf, gradient in zip(leaves, found[len(edges):], strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        return True

    def _leaver(self, call: Call, queue: WeightQueue) -> Callable[[Sequence[torch.Tensor]], None]:
        def leave(gradients: Sequence[torch.Tensor]) -> None:
            queue.deferred.append(call.deferred(gradients[0], self.kernel))
        return leave

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


def _forward_of(layer: nn.Module, splitter: Splitter) -> Callable[[torch.Tensor], torch.Tensor]:
    stock, transposed, parameters = type(layer).forward, _is_conv1d(layer), layer._parameters
    kind = layer.weight.device.type

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        tape = splitter.tape
        if tape is None or not _recordable(inputs, kind):
            return otherwise(inputs)
        weight, bias = parameters["weight"], parameters["bias"]
        trained, shifted = weight.requires_grad, bias is not None and bias.requires_grad
        if (not trained and not shifted) or _watched(weight) or _watched(bias):
            return stock(layer, inputs)
        outputs = _linear(inputs, weight.detach(), None if bias is None else bias.detach(), transposed)
        # Whoever writes to a view takes the view's own node out of the graph, but not what it is a view of.
        node = outputs.grad_fn.next_functions[0][0] if outputs._is_view() else outputs.grad_fn
        tape.calls.append(Call(inputs, inputs._version, node, weight if trained else None,
                               bias if shifted else None, transposed))
        if not splitter.begun:
            node.register_prehook(_refuser(splitter))
        return outputs

    def otherwise(inputs: torch.Tensor) -> torch.Tensor:
        tape, grad = splitter.tape, torch.is_grad_enabled()
        if tape is not None and not grad:
            tape.interrupted = True
        if not grad or (tape is None and splitter.queue is None) or _watched(layer.weight) or _watched(layer.bias):
            return stock(layer, inputs)
        return _SplitLinear.apply(inputs, layer.weight, layer.bias, splitter, transposed)

    return forward


_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _recordable(inputs: torch.Tensor, kind: str) -> bool:
    """Whether a layer may note its inputs, and autograd can be asked for its output's gradient.

    Not if there is nothing that needs gradients; nor for inputs with gaps, which torch multiplies by a constant in
    another way than by a parameter; nor under hooks on saved tensors, which checkpoints and offloading use so that
    nobody keeps them; nor under autocast on this ``kind`` of device, which keeps a copy in 16 bits of a parameter only.
    """
    return (inputs.requires_grad and torch.is_grad_enabled() and inputs.is_contiguous() and _hooks is not None
            and _hooks(True) is None and not torch.is_autocast_enabled(kind))


def _watched(parameter: nn.Parameter | None) -> bool:
    """Whether there are hooks on the gradient of a parameter, which autograd runs only if it computes that itself."""
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    if not transposed:
        return functional.linear(inputs, weight, bias)
    assert bias is not None
    flat = torch.addmm(bias, inputs.view(-1, inputs.shape[-1]), weight)
    return flat.view(*inputs.shape[:-1], weight.shape[1])


def _refuser(splitter: Splitter) -> Callable[[Sequence[torch.Tensor]], None]:
    def refuse(_: Sequence[torch.Tensor]) -> None:
        if splitter.tape is not None and torch.is_grad_enabled():
            raise UnsupportedError(
                "the model differentiates its own gradients in its forward (create_graph=True); the gradients of its "
                'linear layers cannot be split then. Set "split_backward": false in the "recycle" block of the '
                "DeepSpeed config (RECYCLE_SPLIT_BACKWARD=0)")
    return refuse


class _SplitLinear(torch.autograd.Function):
    """The parameter itself is kept on the autograd context, not among the saved tensors: checkpointing replaces saved
    tensors by detached copies, and the gradient would be computed for those."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                splitter: Splitter, transposed: bool) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.bias, ctx.splitter, ctx.transposed = weight, bias, splitter, transposed
        return _linear(inputs, weight, bias, transposed).data  # no view, so that it may be written to

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, = gradients
        inputs, = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        item = DeferredLinear(inputs, gradient, ctx.weight if needs_weight else None,
                              ctx.bias if needs_bias else None, ctx.transposed, ctx.splitter.kernel)
        for_inputs = None
        if needs_input:
            weight = cast(ctx.weight, gradient.dtype)
            for_inputs = cast(gradient.matmul(weight.t() if ctx.transposed else weight), inputs.dtype)
        queue = ctx.splitter.queue
        if queue is not None:
            if needs_weight or needs_bias:
                queue.deferred.append(item)
            return for_inputs, None, None, None, None
        now = dict(item.contributions())
        return for_inputs, now.get(ctx.weight), now.get(ctx.bias), None, None
