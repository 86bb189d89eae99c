"""Forwards and backwards of micro-batches through the layers of a stage of a DeepSpeed pipeline.

The layers may change: the stage's own, those of one of its two chunks, or others, while a neighbour lends some
(`lent_layers`). Stock's module runs the layers in its list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from megatron_recycle.backends.deepspeed.chunks import chunks_of
from megatron_recycle.backends.deepspeed.timers import Timers
from megatron_recycle.backends.hidden_state import HiddenState
from megatron_recycle.backends.patching import replaced
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.data import Batch
from megatron_recycle.runtime.stage import Forward


class Running:
    """Runs micro-batches on one stage.

    Args:
        engine: DeepSpeed's, built.

    Attributes:
        evaluated: called with the last layers' output for each micro-batch of an evaluation; None: not called.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._hidden = HiddenState(engine.module)
        self._chunks = chunks_of(engine.module)
        self._chunk = 0
        self._whole: Sequence[Callable[..., Any]] | None = None
        """All layers of the stage, while some of them run in their place."""
        self.evaluated: Callable[[Any], None] | None = None

    # ---- chunks

    @property
    def modules(self) -> Sequence[nn.ModuleList]:
        """The layers of each chunk that are modules."""
        return [nn.ModuleList(module for layer in self.layers(chunk) for module in _modules(layer))
                for chunk in range(len(self.ranges))]

    @property
    def ranges(self) -> Sequence[range]:
        """The numbers of each chunk's layers, counted through the model."""
        module: PipelineModule = self._engine.module
        return ([range(module._local_start, module._local_stop)] if self._chunks is None
                else self._chunks.ranges(self._engine.stage_id))

    def layers(self, chunk: int) -> Sequence[Callable[..., Any]]:
        """The layers of a chunk; the script may have replaced some. Raises UnsupportedError if it has added or removed
        any, since the chunk's bounds are then unknown."""
        found = list(self._engine.module.forward_funcs if self._whole is None else self._whole)
        if self._chunks is None:
            return found
        first, count = len(self.ranges[0]), sum(map(len, self.ranges))
        if len(found) != count:
            raise UnsupportedError(f"engine.module.forward_funcs of stage {self._engine.stage_id} has {len(found)} "
                                   f"layers, and its two chunks have {first} and {count - first}: where one ends and "
                                   "the other begins would be another place. Give PipelineModule all layers in its "
                                   "list, replace one by another only, or leave chunks out")
        return found[first:] if chunk else found[:first]

    def by_chunk(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """``parameters``, by name, in the order of chunks; a parameter of both counts as the first's. Raises
        UnsupportedError for a parameter that no chunk has."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        found = {name: parameters[name] for module in self.modules for parameter in module.parameters()
                 if (name := names.get(id(parameter))) is not None}
        if none := sorted(parameters.keys() - found.keys()):
            raise UnsupportedError(f"{', '.join(none)}: no layer in the list of PipelineModule has it, so that with "
                                   "chunks 2 it would belong to no chunk: put it into a layer, or leave chunks out")
        return found

    @contextmanager
    def chunk(self, chunk: int) -> Iterator[None]:
        """A block in which the stage consists of this chunk only."""
        if self._chunks is None:
            yield
            return
        module: PipelineModule = self._engine.module
        layers, start = self.layers(chunk), self.ranges[chunk].start
        with (replaced(self, _chunk=chunk, _whole=module.forward_funcs), replaced(module, _local_start=start),
              running(module, layers)):
            yield

    @property
    def _last(self) -> bool:
        """Whether the running layers compute the loss."""
        engine, chunks = self._engine, self._chunks
        if chunks is None:
            return bool(engine.is_last_stage())
        own = [number for number, stage in enumerate(chunks.placement) if stage == engine.stage_id]
        return own[self._chunk] == len(chunks.placement) - 1

    # ---- micro-batches

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        """As `runtime.stage.Stage.forward`."""
        if self._engine.module.training:
            return self._hidden.unchanged(lambda: self._forward(inputs, batch), self._chunk)
        made = self._forward(inputs, batch)
        checkpointing.reset()  # as stock, between forwards that no backward follows
        return made

    def _forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        engine = self._engine
        if inputs is None:
            assert batch is not None
            inputs = self._load(batch[0])
        given = inputs
        if any(getattr(layer, "inplace", False) for layer in engine.module.forward_funcs[:1]):
            # Autograd forbids in-place changes to a leaf that needs a gradient. Unlike stages' bounds, chunks' bounds
            # are not the script's choice.
            given = tuple(tensor.clone() for tensor in inputs)
        single = given[0] if len(given) == 1 else given
        outputs = engine.module(single)
        if not self._last:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if engine.has_attention_mask or engine.has_bool_tensors:  # stock's next stage gets it as booleans
                outputs = (*outputs[:-1], outputs[-1].bool())
            if torch.is_grad_enabled() and self._trains() and not any(tensor.requires_grad for tensor in outputs):
                raise UnsupportedError(
                    "no output of this stage has a gradient, so that its parameters would never be trained. Reentrant "
                    "activation checkpointing takes the gradients of a first layer whose inputs have none, such as an "
                    'embedding: set "pipeline": {"use_reentrant": false} in the DeepSpeed JSON, or give '
                    "PipelineModule(checkpointable_layers=[...]) the names of the classes behind it")
            return Forward((inputs, outputs), outputs, None, roots=outputs)
        assert batch is not None
        if self.evaluated is not None and not engine.module.training:
            self.evaluated(outputs)
        loss = engine.module.loss_fn(outputs, self._labels(batch[1])) if engine.module.loss_fn else outputs
        if not isinstance(loss, torch.Tensor) or engine.module.get_additional_losses() is not None:
            raise UnsupportedError("a loss of several tensors is not supported yet; return one scalar from loss_fn")
        return Forward((inputs, (loss,)), (), loss, roots=(loss,))

    def _trains(self) -> bool:
        """Whether any of the running layers is trained; the trained layers may be running elsewhere."""
        return any(parameter.requires_grad for layer in self._engine.module.forward_funcs
                   for module in _modules(layer) for parameter in module.parameters())

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor], scale: float | None) -> list[torch.Tensor]:
        """As `runtime.stage.Stage.backward`; the loss is multiplied by ``scale``, if given."""
        engine = self._engine
        inputs, outputs = forward.saved
        # Keeps DeepSpeed's hooks for direct .backward() calls quiet.
        with replaced(engine, _running_engine_backward=True):
            if self._last:
                loss = outputs[0] / engine.gradient_accumulation_steps()
                (loss if scale is None else loss.float() * scale).backward()
            else:
                floating = [tensor for tensor in outputs if tensor.is_floating_point()]
                pairs = [(tensor, gradient) for tensor, gradient in zip(floating, gradients, strict=True)
                         if tensor.requires_grad]
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        return [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                for tensor in inputs if tensor.is_floating_point()]

    def _load(self, data: Any) -> tuple[torch.Tensor, ...]:
        """First-stage inputs as stock prepares them."""
        engine = self._engine
        tensors = [data] if torch.is_tensor(data) else list(data)
        with engine.timers.reading() if isinstance(engine.timers, Timers) else nullcontext():
            loaded = [tensor.clone().detach().to(engine.device) for tensor in tensors]
        if engine._reentrant_activation_checkpointing():
            for tensor in loaded:
                tensor.requires_grad = tensor.is_floating_point()
        return tuple(loaded)

    def _labels(self, data: Any) -> Any:
        if torch.is_tensor(data):
            return data.to(self._engine.device)
        return tuple(tensor.to(self._engine.device).detach() for tensor in data)


@contextmanager
def running(module: PipelineModule, layers: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """A block in which ``module`` runs these ``layers``, with checkpointing intervals from the first one on."""
    layers, interval = list(layers), module.activation_checkpoint_interval
    values: dict[str, Any] = {"forward_funcs": layers}
    if interval and hasattr(module, "is_checkpointable_results"):
        values["is_checkpointable_results"] = [module._is_checkpointable(layers[start:start + interval])
                                               for start in range(0, len(layers), interval)]
    with replaced(module, **values):
        yield


def _modules(layer: Callable[..., Any]) -> list[nn.Module]:
    """The modules that ``layer`` runs: itself or, if it is tied, those that the script's function is bound to. (A layer
    of the script's own may have an attribute ``args``, too.)"""
    parts = layer.args if isinstance(layer, partial) else (layer,)
    return [module for module in parts if isinstance(module, nn.Module)]
