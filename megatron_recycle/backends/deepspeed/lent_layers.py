"""The layers of a DeepSpeed pipeline's stage, as neighbouring stages may run some of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from megatron_recycle.backends.deepspeed.chunks import chunks_of
from megatron_recycle.backends.deepspeed.running import Running, running
from megatron_recycle.backends.patching import replaced
from megatron_recycle.runtime.lent.layers import hooked, lendable

_PLAIN = (bool, int, float, str, type(None))


class PipelineLayers:
    """The layers of one chunk of a stage of a `PipelineModule` (`runtime.lent.layers.Lending`).

    A layer may be lent if it comes from a `LayerSpec`, or stands in the list itself, and is like one beside it. Like
    means parameters of the same shapes or, for a neighbour on another stage, the same arguments in the list: so outputs
    have the shapes of inputs. A lent layer owns its parameters, and has no hooks when the job begins.

    Args:
        engine: DeepSpeed's, built.
        run: runs the stage's layers.
        chunk: of the stage.
        ends: whether no other stage has the layers before the chunk's, and behind it.
        most: layers that each neighbour may run.
    """

    beside: Sequence[nn.Module] = ()
    like = 0
    """Always equal: the model's list covers all stages."""
    refused = ""

    def __init__(self, engine: PipelineEngine, run: Running, chunk: int, ends: tuple[bool, bool], most: int) -> None:
        self._engine, self._run, self._chunk, self._ends = engine, run, chunk, ends
        self.first = run.ranges[chunk].start
        self._own: Sequence[Callable[..., Any]] | None = None
        """The chunk's own layers, while others run in their place."""
        self._most = most

    @property
    def layers(self) -> Sequence[Callable[..., Any]]:
        return self._run.layers(self._chunk) if self._own is None else self._own

    @cached_property
    def lendable(self) -> tuple[int, int]:
        if _why_not(self._engine):
            return 0, 0
        return lendable(self._alike(), *self._ends, self._most)

    @property
    def why(self) -> str:
        return _why_not(self._engine) or (
            "a layer is lent that is like the one beside it, has parameters of its own and no hooks, while one stays")

    def _alike(self) -> list[bool]:
        specs = self._engine.module._layer_specs
        shapes = [self._shapes(specs[self.first + place], layer) for place, layer in enumerate(self.layers)]
        last = len(shapes) - 1
        return [one is not None and (
                    one in shapes[max(0, place - 1):place] or one in shapes[place + 1:place + 2]
                    or (place == 0 < self.first and _same(specs[self.first - 1], specs[self.first]))
                    or (place == last and _same(*specs[self.first + last:self.first + last + 2])))
                for place, one in enumerate(shapes)]

    def _shapes(self, spec: Any, layer: Any) -> tuple[Any, ...] | None:
        """The properties that alike layers share; None: this one is not lent."""
        if isinstance(spec, TiedLayerSpec) or not isinstance(spec, (LayerSpec, nn.Module)):
            return None
        own = {id(parameter) for parameter in layer.parameters()}
        beside = [other for chunk in range(len(self._run.ranges)) for other in self._run.layers(chunk)
                  if other is not layer and isinstance(other, nn.Module)]
        if not own or hooked(layer) or any(id(parameter) in own for other in beside
                                           for parameter in other.parameters()):
            return None
        return type(layer), tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())

    def build(self, number: int) -> nn.Module:
        spec = self._engine.module._layer_specs[number]
        made: nn.Module = copy.deepcopy(spec) if isinstance(spec, nn.Module) else spec.build()
        kinds = {parameter.dtype for parameter in self._engine.module.parameters() if parameter.is_floating_point()}
        return made.to(self._engine.device, *kinds)

    @contextmanager
    def running(self, layers: Sequence[Callable[..., Any]]) -> Iterator[None]:
        module: PipelineModule = self._engine.module
        with replaced(self, _own=module.forward_funcs), running(module, layers):
            yield


def lendings_of(engine: PipelineEngine, run: Running, most: int) -> list[PipelineLayers]:
    """The layers of each chunk of the stage, in order."""
    chunks = chunks_of(engine.module)
    placement = range(engine.num_stages) if chunks is None else chunks.placement
    beside = [None, *placement, None]  # the stages of a chunk's neighbours: behind it, and one before
    own = [chunk for chunk, stage in enumerate(placement) if stage == engine.stage_id]
    return [PipelineLayers(engine, run, place, (beside[chunk] in (None, engine.stage_id),
                                                beside[chunk + 2] in (None, engine.stage_id)), most)
            for place, chunk in enumerate(own)]


def _same(one: Any = None, other: Any = None) -> bool:
    """Whether two layers of a model's list have the same type and arguments."""
    if not (type(one) is type(other) is LayerSpec and one.typename is other.typename):
        return False
    arguments = [(*spec.module_args, *sorted(spec.module_kwargs.items())) for spec in (one, other)]
    return len(arguments[0]) == len(arguments[1]) and all(
        mine is theirs or (type(mine) is type(theirs) and isinstance(mine, _PLAIN) and mine == theirs)
        or (isinstance(mine, tuple) and repr(mine) == repr(theirs)) for mine, theirs in zip(*arguments, strict=True))


def _why_not(engine: PipelineEngine) -> str:
    """The reason why no layer of the stage can be lent; empty: it depends on the layer."""
    if engine.num_stages == 1:
        return "there is one stage"
    if engine.module.seed_layers:
        return "seed_layers sets random numbers by a layer's place on its stage"
    kinds = {parameter.dtype for parameter in engine.module.parameters() if parameter.is_floating_point()}
    if len(kinds) > 1:
        return f"the stage's parameters are of several types ({', '.join(sorted(map(str, kinds)))})"
    return ""
