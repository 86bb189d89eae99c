"""Transformer Engine's layers in a Megatron model: the accepted ones, with weight gradients deferred until W.

Each of its linear layers asks its `wgrad_store`, in its backward, whether to form the weight's gradient at once or to
hand over the function for it. Here the store is the runtime's queue. With `gradient_accumulation_fusion` the layer has
bound `main_grad` by then, for its kernel to add to. In the runtime's backward that is a tensor without memory of its
own, which takes the right sum's memory when W runs. Models without Transformer Engine do not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_te_version
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from megatron_recycle.backends.megatron.split import MegatronSplitter
from megatron_recycle.backends.releases import Release, release_of
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.deferral import task_now
from megatron_recycle.runtime.compute.split import DeferredLinear, WeightQueue, watched

TESTED: Mapping[Release, str] = {
    (2, 9): "2.9.0", (2, 10): "2.10.0", (2, 11): "2.11.0", (2, 14): "2.14.1", (2, 19): "2.19.0", (2, 20): "2.20.2"}
"""First two numbers of each supported version of Transformer Engine -> the tested release."""

_LAYERS = ("TELinear", "TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear",
           "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear",
           "TEDotProductAttention", "LayerNorm", "RMSNorm", "UnfusedDotProductAttention", "FusedAttention",
           "FlashAttention", "FusedScaleMaskSoftmax")
"""Accepted classes of layers, core's and those inside of them. All others of Transformer Engine are refused."""

_OPTIONS = (
    ("quant_recipe", "leave it out and use bf16"),
    ("delay_wgrad_compute", "leave it off: the plan delays weight gradients by itself"),
    ("tp_comm_overlap", "leave it off: its buffers are bound to the ranks that there were at first"),
    ("cpu_offloading", "leave it off"), ("symmetric_ar_type", "leave it out"),
    ("use_transformer_engine_op_fuser", "leave it off"))
"""Options of the model's configuration that are not kept correct with these layers, each with its remedy."""


def wrong(models: Sequence[nn.Module], config: Any) -> list[str]:
    """A line for each fault of the ``models``' layers of Transformer Engine, if any, that cannot be kept correct.

    ``config``: of the model.
    """
    layers = [module for model in models for module in model.modules() if _is_its(module)]
    if not layers:
        return []
    found = []
    version = str(get_te_version())
    if release_of(version)[:2] not in TESTED:
        found.append(f"Transformer Engine {version}: its layers were tested in {', '.join(TESTED.values())}; install "
                     "one of these, or use core's own layers (--transformer-impl local)")
    unknown = sorted({type(layer).__name__ for layer in layers} - set(_LAYERS))
    if unknown:
        found.append(f"layers of Transformer Engine that were not tried ({', '.join(unknown)}): use core's own "
                     "(--transformer-impl local, and no --spec of others)")
    found += [f"{name} {value} with Transformer Engine's layers: {then}" for name, then in _OPTIONS
              if (value := getattr(config, name, None))]
    if any(getattr(layer, "te_quant_params", None) is not None for layer in layers):
        found.append("layers of Transformer Engine with a precision of their own: use bf16 in all of them")
    if _is_its(get_cuda_rng_tracker()):
        found.append("Transformer Engine's tracker of random numbers: leave --te-rng-tracker (use_te_rng_tracker) out")
    return found


def quantizers_of(module: nn.Module) -> list[Any]:
    """A layer's quantizers, present from its first 8-bit forward on. With sequence parallelism they keep the group in
    which they agree on a scale."""
    made = vars(module).get("quantizers")
    return [one for several in made.values() for one in several] if _is_its(module) and isinstance(made, dict) else []


def splitter_for(models: Sequence[nn.Module], split_backward: bool) -> MegatronSplitter:
    """The splitter that makes the linear layers of ``models`` defer. Raises UnsupportedError if layers are to
    accumulate weight gradients themselves and the backward is not to be split (``split_backward``)."""
    if not any(_is_its(module) for model in models for module in model.modules()):
        return MegatronSplitter()
    splitter = TESplitter()
    for model in models:
        splitter.adopt(model)
    if splitter.fuses and not split_backward:
        raise UnsupportedError(
            "split_backward false with gradient_accumulation_fusion in Transformer Engine's layers, which would add to "
            "sums before it is known which: leave either out (--no-gradient-accumulation-fusion)")
    return splitter


def _is_its(value: Any) -> bool:
    """Whether ``value`` itself, not its content, has a class of Transformer Engine or a subclass."""
    return any(kind.__module__.partition(".")[0] == "transformer_engine" for kind in type(value).__mro__)


class TESplitter(MegatronSplitter):
    """Makes Transformer Engine's linear layers of this process defer their weight gradients, beside core's own."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: WeightQueue | None = None
        """The queue of the runtime's running backward, if any."""
        self._places = WeakIdKeyDictionary()  # weak: layers that were lent go
        self._unwritten: list[nn.Parameter] = []
        pytorch = sys.modules["transformer_engine.pytorch"]
        for kind in (pytorch.Linear, pytorch.LayerNormLinear, pytorch.GroupedLinear):
            kind.wgrad_store = _Stores(self)

    @property
    def fuses(self) -> bool:
        """Whether layers add weight gradients to `main_grad` in the kernel that forms them."""
        return bool(self._places)

    def adopt(self, module: nn.Module) -> None:
        """Defer the layers of ``module`` as well."""
        for layer in module.modules():
            if hasattr(layer, "is_first_microbatch"):
                # It gets None for is_first_microbatch: True would overwrite sums, on its first worker.
                layer.disable_parameter_transpose_cache = True
            if _is_its(layer) and getattr(layer, "fuse_wgrad_accumulation", False):
                self._places.update({weight: _Place(weight) for weight in _weights(layer)
                                     if hasattr(weight, "main_grad")})

    @contextmanager
    def into(self, queue: WeightQueue | None, roots: Sequence[torch.Tensor]) -> Iterator[None]:
        """The backward from ``roots`` inside the block defers into ``queue``."""
        before = [(weight, weight.main_grad) for weight in self._places]
        for weight, place in self._places.items():
            weight.main_grad = place.tensor
        self.queue = queue
        try:
            with super().into(queue, roots):
                yield
        finally:
            self.queue = None
            for weight, value in before:
                weight.main_grad = value
                if getattr(weight, "grad_added_to_main_grad", False):
                    weight.grad_added_to_main_grad = False
                    self.leave(weight)
            for weight in self._unwritten:
                weight.grad = None
            self._unwritten.clear()

    def leave(self, weight: nn.Parameter) -> None:
        """Drop autograd's gradient of ``weight`` from the running backward: it is never written."""
        self._unwritten.append(weight)

    def place_of(self, weight: nn.Parameter) -> _Place | None:
        """The place that the layer's kernel adds the gradient of ``weight`` to; None: it adds to none."""
        found: _Place | None = self._places.get(weight)
        return found


class _Place:
    """A tensor of the shape and type of the sums of ``weight``'s gradient, without memory except while it is `over` a
    sum."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.tensor = torch.empty(0, dtype=weight.main_grad.dtype, device=weight.device)
        self._nothing = torch.empty(1, dtype=self.tensor.dtype, device=weight.device).as_strided(
            weight.shape, [0] * weight.dim())
        self.tensor.set_(self._nothing)

    @contextmanager
    def over(self, sum_: torch.Tensor) -> Iterator[None]:
        """Inside the block the tensor has the memory of ``sum_``."""
        self.tensor.set_(sum_)
        try:
            yield
        finally:
            self.tensor.set_(self._nothing)


class _Stores:
    """Replacement of a layer class's `wgrad_store`: each forward gets its own store, which knows where it ran."""

    def __init__(self, splitter: TESplitter) -> None:
        self._splitter = splitter

    def __get__(self, layer: Any, kind: type) -> Any:
        return self if layer is None else _Store(self._splitter, layer)

    def __set__(self, layer: Any, store: Any) -> None:
        vars(layer)["wgrad_store"] = store  # the layer's own, which is never used


class _Store:
    """Acts as Transformer Engine's store of weight gradients for one forward of a layer and its backward."""

    def __init__(self, splitter: TESplitter, layer: Any) -> None:
        self._splitter = splitter
        self._layer = layer
        self._made_in = task_now()

    def delay_wgrad_compute(self) -> bool:
        """Whether the running backward hands over the function that forms the weight's gradient."""
        return task_now() < 0 or self._queue() is not None  # the call may come from outside a backward

    def put(self, tensors: Sequence[torch.Tensor], form: Callable[..., Any]) -> None:
        """Queue ``form``, which computes the gradients of weight and bias from ``tensors``: the layer's inputs and its
        output's gradient, both (..., n)."""
        queue, layer, splitter = self._queue(), self._layer, self._splitter
        assert queue is not None
        if _is_grouped(layer):  # per weight: one input, one gradient, and the place for its result
            together = _Grouped(form, *tensors)
            for number, (weight, bias) in enumerate(zip(_weights(layer), _biases(layer), strict=True)):
                queue.deferred.append(_Delayed(
                    tensors[0][number], tensors[1][number], _trained(weight), _trained(bias),
                    fused=_FormedTogether(together, number, weight, splitter.place_of(weight))))
                splitter.leave(weight)
            return
        inputs, gradient = tensors
        (weight,), (bias,) = _weights(layer), _biases(layer)
        queue.deferred.append(_Delayed(inputs, gradient, _trained(weight), _trained(bias),
                                       fused=_Formed(form, weight, splitter.place_of(weight))))

    def _queue(self) -> WeightQueue | None:
        weights, splitter = _weights(self._layer), self._splitter
        if splitter.place_of(weights[0]) is not None:
            return splitter.queue  # its kernel adds to main_grad for any caller, without notice
        if any(map(watched, (*weights, *_biases(self._layer)))):
            return None
        return splitter.deferral.queue_for(self._made_in)


def _is_grouped(layer: Any) -> bool:
    """Whether ``layer`` is several linear layers in one, as experts are."""
    return hasattr(layer, "num_gemms")


def _weights(layer: Any) -> list[nn.Parameter]:
    """The weights of a linear or grouped ``layer``; none of another kind."""
    names = [f"weight{number}" for number in range(layer.num_gemms)] if _is_grouped(layer) else ["weight"]
    return [weight for name in names if isinstance(weight := getattr(layer, name, None), nn.Parameter)]


def _biases(layer: Any) -> list[nn.Parameter | None]:
    """The biases by weight; None where the layer has an empty tensor for it."""
    names = [f"bias{number}" for number in range(layer.num_gemms)] if _is_grouped(layer) else ["bias"]
    return [bias if isinstance(bias := getattr(layer, name, None), nn.Parameter) else None for name in names]


def _trained(parameter: nn.Parameter | None) -> nn.Parameter | None:
    """``parameter``, unless Megatron does not train it."""
    return parameter if parameter is not None and parameter.requires_grad and hasattr(parameter, "main_grad") else None


def _memory_of(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors in ``tensor``: an 8-bit one has its numbers once or twice, in the layouts of products."""
    halves = tensor.get_data_tensors() if hasattr(tensor, "get_data_tensors") else (tensor,)
    return [half for half in halves if half is not None]


class _Formed:
    """Both gradients of a layer, formed by its own kernel on demand.

    Args:
        form: the layer's kernel, of inputs and output gradient.
        weight: its gradient is accumulated.
        place: the tensor that ``form`` adds to; None: ``form`` returns the gradient.
    """

    def __init__(self, form: Callable[..., Any], weight: nn.Parameter, place: _Place | None) -> None:
        self._form, self._weight, self._place = form, weight, place
        self.done = False
        self.bias: torch.Tensor | None = None
        """The bias's gradient, formed together with the weight's."""

    def __call__(self, inputs: torch.Tensor, gradient: torch.Tensor, sum_: torch.Tensor) -> None:
        """Add the weight's gradient to ``sum_``."""
        self.done = True
        if self._place is None:
            formed, self.bias = self._form(inputs, gradient)
            sum_.add_(formed)
            return
        with self._place.over(sum_):
            _, self.bias = self._form(inputs, gradient)

    def weight_gradient(self, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The weight's gradient alone, not accumulated."""
        dtype = self._weight.dtype if self._place is None else self._place.tensor.dtype
        alone = torch.zeros(self._weight.shape, dtype=dtype, device=self._weight.device)
        self(inputs, gradient, alone)
        return alone


class _Grouped:
    """The gradients of a grouped layer's weights and biases: one kernel forms all, on the first request.

    Args:
        form: that kernel, of inputs, output gradients and tensors to write to or, with `gradient_accumulation_fusion`,
            to add to.
        like: the layer's own tensors for the result.
    """

    def __init__(self, form: Callable[..., Any], inputs: Sequence[Any], gradients: Sequence[Any],
                 like: Sequence[torch.Tensor]) -> None:
        self._form: Callable[..., Any] | None = partial(form, inputs, gradients)
        self._like = [(one.shape, one.dtype, one.device) for one in like]
        self._formed: list[tuple[torch.Tensor, torch.Tensor | None] | None] = []

    def take(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients of a weight and its bias, once."""
        if self._form is not None:
            sums = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._like]
            _, biases, *_ = self._form(sums)
            self._form = None  # frees its inputs
            self._formed = [(one, bias if bias is not None and bias.numel() else None)
                            for one, bias in zip(sums, biases, strict=True)]
        found, self._formed[number] = self._formed[number], None
        assert found is not None
        return found


class _FormedTogether(_Formed):
    """One weight of `_Grouped`."""

    def __init__(self, together: _Grouped, number: int, weight: nn.Parameter, place: _Place | None) -> None:
        super().__init__(together.take, weight, place)
        self._number = number

    def __call__(self, inputs: torch.Tensor, gradient: torch.Tensor, sum_: torch.Tensor) -> None:
        self.done = True
        formed, self.bias = self._form(self._number)
        sum_.add_(formed)


class _Delayed(DeferredLinear):
    """A layer's gradients, formed by its own kernel: `fused` is a `_Formed`. Inputs and output gradient may be
    Transformer Engine's 8-bit tensors."""

    @property
    def kept(self) -> Sequence[torch.Tensor]:
        return [tensor for whole in (self.inputs, self.output_gradient) for tensor in _memory_of(whole)]

    def add_weight(self, sum_: torch.Tensor) -> None:
        assert self.fused is not None
        self.fused(self.inputs, self.output_gradient, sum_)

    def contributions(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        formed = self.fused
        assert isinstance(formed, _Formed)
        if not formed.done:
            gradient = formed.weight_gradient(self.inputs, self.output_gradient)
            if self.weight is not None:
                yield self.weight, gradient
        if self.bias is not None and formed.bias is not None:
            yield self.bias, formed.bias
