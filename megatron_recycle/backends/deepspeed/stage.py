"""One stage of a DeepSpeed pipeline with its optimizer, as the runtime sees it.

The arithmetic is stock's, operation by operation, so that results without failures have stock's bits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from torch import nn

from megatron_recycle.backends.deepspeed.chunks import chunks_of
from megatron_recycle.backends.deepspeed.clipping import Clipping
from megatron_recycle.backends.deepspeed.lent_layers import lendings_of
from megatron_recycle.backends.deepspeed.masters import MasterWeightOptimizer
from megatron_recycle.backends.deepspeed.native_adam import NativeAdam
from megatron_recycle.backends.deepspeed.optimizer import (
    FirstSteps,
    own_data,
    put_back,
    refuse_hooks,
    schedule_data,
    set_schedule,
)
from megatron_recycle.backends.deepspeed.running import Running
from megatron_recycle.backends.deepspeed.support import torch_optimizer
from megatron_recycle.backends.deepspeed.zero import ZeroOptimizer
from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.membership import Verdict
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.compute.data import Batch
from megatron_recycle.runtime.compute.edits import copied
from megatron_recycle.runtime.compute.optimizer_state import OptimizerState
from megatron_recycle.runtime.lent.layers import Lending
from megatron_recycle.runtime.stage import Averaging, Chunk, Forward, Tie, fingerprint

_REFERENCES = ("lr_scheduler", "batch_fn")
"""Attributes of the engine that a script may set, and that affect a step or a micro-batch."""
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "losses", "_step_applied")
"""Attributes that `_take_model_step` changes besides tensors."""
_SHOWN = ("global_steps", "global_samples", "skipped_steps", "_step_applied")
"""The numbers among them that a script may read."""


class DeepSpeedStage:
    """The runtime's view of the engine (`runtime.stage.Stage`).

    Args:
        engine: DeepSpeed's, built.
        keeper: its optimizer, if that has fp32 copies of 16-bit parameters, or shards.
        settings: of the job.
        is_logging_rank: whether this worker is the logging rank.
    """

    report_width = 0
    settings: Mapping[str, Any] = {}

    def __init__(self, engine: PipelineEngine, keeper: MasterWeightOptimizer | ZeroOptimizer | None,
                 settings: RecycleConfig, is_logging_rank: Callable[[], bool]) -> None:
        masters = keeper if isinstance(keeper, MasterWeightOptimizer) else None
        self._zero = keeper if isinstance(keeper, ZeroOptimizer) else None
        self.shards = self._zero.shards if self._zero is not None else None
        self._engine = engine
        self._optimizer = keeper
        self.averaging: Averaging = self._zero.averaging if self._zero is not None else (
            # "before" also with a predivide factor: dividing before the sum keeps 16-bit sums from overflowing.
            "after" if engine.postscale_gradients() and engine.gradient_predivide_factor() == 1.0 else "before")
        self._staggered = settings.step == "staggered"
        self._is_logging_rank = is_logging_rank
        self.device = engine.device
        self.passed = 0.0
        """The squared gradient norm of a past iteration that the script passes over."""
        self.module: nn.Module = engine.module
        self._masters = masters.masters if masters is not None else {}
        self._state = OptimizerState(engine.module, engine.optimizer, self._masters)
        self.running = Running(engine)
        """Runs the layers for each micro-batch."""
        self._lendings: Sequence[Lending | None] = [None] * len(self.running.ranges)
        if settings.lend == "auto":
            self._lendings = lendings_of(engine, self.running, settings.lend_layers)
        self._use(self._found())
        self._clipping = Clipping(engine, keeper, settings.clip_norm == "global")
        optimizer = torch_optimizer(engine)
        self.native = NativeAdam(optimizer)
        self._first_steps = FirstSteps({"optimizer": optimizer, "lr_scheduler": engine.lr_scheduler})
        # As stock: bf16 gradients are summed in fp32, fp16 ones in fp16, where the scale keeps them.
        self.gradient_dtype = torch.float32 if engine.bfloat16_enabled() else None
        if self._zero is not None:
            self.gradient_dtype = engine.get_data_types()[1]
        self.model = f"{fingerprint(self.parameters)}, optimizer {type(optimizer).__name__}"
        self.tied_stages = tied_stages(engine.module)
        self.ties = ties_of(engine)

    def _found(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, in stock's order; with two chunks, those of the first come first."""
        found = {name: parameter for name, parameter in self._state.parameters().items()
                 if parameter.requires_grad and parameter.numel()}
        return found if chunks_of(self.module) is None else self.running.by_chunk(found)

    def _use(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._state.trained = trained
        self.parameters: Sequence[nn.Parameter] = list(trained.values())
        # In 16 bits only the optimizer's own parameters have a copy; others are never stepped.
        self._stepped = [self._masters.get(parameter) if self._masters else parameter for parameter in self.parameters]

    def look(self) -> bool:
        """Follow parameters that were frozen, unfrozen, added or replaced. Refuses hooks that make a step impossible to
        undo, the script's own gradients, and hooks on gradient sums, which are formed otherwise here."""
        engine = self._engine
        self._clipping.look()
        if self._staggered:
            refuse_hooks(torch_optimizer(engine))
        found = self._found()
        changed = list(map(id, found.values())) != list(map(id, self.parameters))
        if changed and self.shards is not None:
            raise UnsupportedError(f"iteration {engine.global_steps}: the script has frozen, unfrozen or replaced "
                                   "parameters, and ZeRO-1's shards were cut of those that there were when the engine "
                                   "was made: do so before deepspeed.initialize(), or set zero_optimization.stage to 0")
        if changed:
            self._use(found)
        for name, parameter in found.items():
            if parameter.grad is not None:
                raise UnsupportedError(f"iteration {engine.global_steps}: {name}.grad holds a gradient that the script "
                                       "has put there, which would be lost if the iteration is run again: add it to "
                                       "the loss, or set .grad to None")
            if parameter._post_accumulate_grad_hooks and engine.micro_batches > 1:
                raise UnsupportedError(f"{name} has a hook of register_post_accumulate_grad_hook(), which would see a "
                                       "micro-batch's gradient instead of the sum so far: use register_hook(), or an "
                                       "optimizer step hook")
        return changed

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        return self.running.forward(inputs, batch)

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        scaled = self._clipping.scaled
        return self.running.backward(forward, gradients, None if scaled is None else scaled.loss_scale)

    @property
    def chunks(self) -> Sequence[Chunk]:
        modules = [self.module] if chunks_of(self.module) is None else self.running.modules
        return list(map(Chunk, modules, self._lendings))

    def running_chunk(self, chunk: int) -> AbstractContextManager[None]:
        return self.running.chunk(chunk)

    def norm_square(self, gradients: Sequence[torch.Tensor]) -> float:
        return self._clipping.norm_square(self._state.trained, gradients)

    def zeros(self, gradients: Sequence[torch.Tensor]) -> float:
        return 0.0  # DeepSpeed does not count them

    def coefficient(self, norm_squares: Sequence[float], weight: float) -> float:
        return self._clipping.coefficient(norm_squares)

    def step(self, gradients: Sequence[torch.Tensor], coefficient: float) -> None:
        skipping = self._clipping.scaled or self._zero  # leaves out a step with non-finite gradients
        if skipping is not None:
            skipping.overflow = math.isnan(coefficient)
        if skipping is not None and skipping.overflow:
            if self._is_logging_rank():
                description = f"have overflowed at a loss scale of {skipping.loss_scale:g}" if skipping.scales else (
                    "are not finite")
                get_logger().warning("megatron-recycle: gradients %s: the step of iteration %d is skipped", description,
                                     self._engine.global_steps)
        elif self._zero is not None:
            self._zero.shards.load(gradients, coefficient / self._zero.loss_scale)
        elif self._clipping.scaled is None:
            for parameter, gradient in zip(self._stepped, gradients, strict=True):
                if parameter is not None:
                    parameter.grad = gradient if coefficient == 1.0 else gradient.mul_(coefficient)
        else:
            for master, gradient in zip(self._stepped, gradients, strict=True):
                if master is not None:
                    master.grad = gradient.float().mul_(coefficient / self._clipping.scaled.loss_scale)
        if not self._staggered or self._first_steps.over:
            self._engine._exec_optimizer_step()
        else:
            self._first_steps.before(self._known())
            self._engine._exec_optimizer_step()
            self._first_steps.after(self._known())

    def _known(self) -> set[int]:
        """Objects that `FirstSteps` need not check."""
        engine = self._engine
        optimizer = torch_optimizer(engine)
        parts = (engine, engine.module, engine.optimizer, optimizer, engine.lr_scheduler, optimizer.param_groups,
                 *optimizer.param_groups)
        tensors = {**self.state(), **self.fixed()}.values()
        return {*map(id, parts), *(tensor.data_ptr() for tensor in tensors)}

    def state(self) -> dict[str, torch.Tensor]:
        return self._state.tensors()

    def fixed(self) -> dict[str, torch.Tensor]:
        return self._state.fixed()

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Any) -> None:
        self._state.load(tensors, counters["optimizer"])
        self._use(self._state.trained)
        self._set_own(counters["own"])

    def reset_state(self, names: Collection[str]) -> None:
        self._state.reset(names)

    def counters(self) -> Any:
        engine = self._engine
        own = {"schedule": schedule_data(engine.lr_scheduler), "attributes": own_data(torch_optimizer(engine)),
               "scaling": self._optimizer.counters() if self._optimizer is not None else {},
               "native": self.native.counters(),
               "engine": {name: getattr(engine, name) for name in _COUNTERS}}
        return {"optimizer": self._state.counters(), "own": copied(own)}

    def set_counters(self, counters: Any) -> None:
        self._state.set_counters(counters["optimizer"])
        self._set_own(counters["own"])

    def _set_own(self, counters: Any) -> None:
        """Set the engine's state beside that of a torch optimizer."""
        engine, counters = self._engine, copied(counters)
        set_schedule(engine.lr_scheduler, counters["schedule"])
        if self._optimizer is not None:
            self._optimizer.set_counters(counters["scaling"])
        put_back(torch_optimizer(engine), counters["attributes"])
        self.native.set_counters(counters["native"])
        for name, value in counters["engine"].items():
            setattr(engine, name, value)

    @property
    def references(self) -> dict[str, Any]:
        engine = self._engine
        return {"groups": list(engine.optimizer.param_groups), "clipping": engine.gradient_clipping(),
                "sizes": [engine.train_batch_size(), engine.gradient_accumulation_steps()],
                "loss_fn": engine.module.loss_fn, **{name: getattr(engine, name) for name in _REFERENCES}}

    def refer(self, references: Mapping[str, Any]) -> None:
        engine = self._engine
        for name in _REFERENCES:
            setattr(engine, name, references[name])
        engine.module.loss_fn = references["loss_fn"]
        engine._config.gradient_clipping = references["clipping"]
        engine._config.train_batch_size, engine._config.gradient_accumulation_steps = references["sizes"]
        engine.micro_batches = engine.gradient_accumulation_steps()
        engine.optimizer.param_groups[:] = references["groups"]

    @property
    def may_guess_wrong(self) -> bool:
        # Under ZeRO-1 a step is left out if any stage's gradients are not finite.
        return self._clipping.scaled is not None or self._zero is not None or (
            self._clipping.limit > 0.0 and self._engine.num_stages > 1)

    def summary(self, verdict: Verdict, reports: torch.Tensor) -> bytes:
        engine = self._engine
        scale = self._optimizer.loss_scale if self._optimizer is not None else 1.0
        rates = [float(group["lr"]) for group in engine.optimizer.param_groups]
        return array("d", [sum(verdict.norm_squares), scale, *(getattr(engine, name) for name in _SHOWN),
                           *rates]).tobytes()

    def recall(self, summary: bytes) -> None:
        """Counters, rates and scale are restored before the next iteration is trained (`load_state`)."""
        engine = self._engine
        self.passed, scale, *rest = array("d", summary)
        for name, value in zip(_SHOWN, rest):
            setattr(engine, name, type(getattr(engine, name))(value))
        for group, rate in zip(engine.optimizer.param_groups, rest[len(_SHOWN):]):
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = rate
        if self._optimizer is not None:
            self._optimizer.set_counters({**self._optimizer.counters(), "cur_scale": scale})

    def regroup(self, groups: Groups) -> None:
        """DeepSpeed's own groups stay: they are living ones, as the script's are."""
        # The shape is sent with an evaluation's first message, which new neighbours have not seen.
        self._engine.reset_activation_shape()


def tied_stages(module: PipelineModule) -> tuple[tuple[int, ...], ...]:
    """Groups of stages that wait for each other before they step, since they share tied layers: the same on all
    workers. Layers with a common stage make one group of all their stages."""
    stages: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(index))
    groups: list[set[int]] = []
    for of_layer in stages.values():
        apart = [group for group in groups if not group & of_layer]
        groups = [*apart, of_layer.union(*(group for group in groups if group & of_layer))]
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def ties_of(engine: PipelineEngine) -> list[Tie]:
    """This stage's copies of tied parameters, in the same order on all stages."""
    topology, module, found, first = engine.grid.topology(), engine.module, [], 0
    specs = {spec.key: spec for spec in module._layer_specs if isinstance(spec, TiedLayerSpec)}
    for key in sorted(specs):  # other stages' ties included: their numbers are skipped
        comm = module.tied_comms.get(key, {"ranks": (), "weight_attr": ()})
        stages = tuple(sorted(topology.get_coord(rank).pipe for rank in comm["ranks"]))
        found += [Tie(module._recursive_getattr(module.tied_modules[key], name), stages, first=True, number=number)
                  for number, name in enumerate(comm["weight_attr"], first) if len(stages) > 1]
        first += len(specs[key].tied_weight_attr)
    return found
