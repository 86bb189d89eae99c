"""One stage of a DeepSpeed pipeline with its optimizer, as the runtime sees it.

The arithmetic is stock's, operation by operation, so that results without failures have stock's bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec
from torch import nn

from megatron_recycle.backends.deepspeed_masters import MasterWeightOptimizer
from megatron_recycle.backends.deepspeed_support import torch_optimizer
from megatron_recycle.backends.hidden_state import HiddenState
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.data import Batch
from megatron_recycle.runtime.groups import Groups
from megatron_recycle.runtime.reduce import Averaging
from megatron_recycle.runtime.stage import Forward, Tie, fingerprint

if TYPE_CHECKING:
    from megatron_recycle.backends.deepspeed import RecyclePipelineEngine

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "losses", "_step_applied")
"""What `_take_model_step` changes besides tensors."""


class DeepSpeedStage:
    """The runtime's view of the engine (`runtime.stage.Stage`)."""

    averaging: Averaging = "after"
    report_width = 0

    def __init__(self, engine: RecyclePipelineEngine) -> None:
        self._engine = engine
        self.device = engine.device
        self.module: nn.Module = engine.module
        self.parameters: Sequence[nn.Parameter] = [
            parameter for parameter in engine.module.parameters() if parameter.requires_grad and parameter.numel()]
        masters = engine.masters.masters if engine.masters is not None else {}
        self._stepped: Sequence[nn.Parameter] = [masters.get(parameter, parameter) for parameter in self.parameters]
        # As stock: bf16 gradients are summed in fp32, those of fp16 in their own type, where the scale keeps them.
        self.gradient_dtype = torch.float32 if engine.bfloat16_enabled() else None
        self.model = f"{fingerprint(self.parameters)}, optimizer {type(torch_optimizer(engine)).__name__}"
        self.tied_stages = _tied_stages(engine.module)
        self.ties = _ties(engine)
        self._hidden = HiddenState(engine.module)

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        return self._hidden.unchanged(lambda: self._forward(inputs, batch))

    def _forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        engine = self._engine
        if inputs is None:
            assert batch is not None
            inputs = self._load(batch[0])
        single = inputs[0] if len(inputs) == 1 else inputs
        outputs = engine.module(single)
        if not engine.is_last_stage():
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return Forward((inputs, outputs), outputs, None, roots=outputs)
        assert batch is not None
        loss = engine.module.loss_fn(outputs, self._labels(batch[1])) if engine.module.loss_fn else outputs
        if not isinstance(loss, torch.Tensor) or engine.module.get_additional_losses() is not None:
            raise UnsupportedError("a loss of several tensors is not supported yet; return one scalar from loss_fn")
        return Forward((inputs, (loss,)), (), loss, roots=(loss,))

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        engine = self._engine
        inputs, outputs = forward.saved
        engine._running_engine_backward = True  # keeps DeepSpeed's hooks for direct .backward() calls quiet
        try:
            if engine.is_last_stage():
                loss = outputs[0] / engine.gradient_accumulation_steps()
                (loss if self._scaled is None else loss.float() * self._scaled.loss_scale).backward()
            else:
                floating = [tensor for tensor in outputs if tensor.is_floating_point()]
                pairs = [(tensor, gradient) for tensor, gradient in zip(floating, gradients, strict=True)
                         if tensor.requires_grad]
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        finally:
            engine._running_engine_backward = False
        return [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                for tensor in inputs if tensor.is_floating_point()]

    @property
    def _scaled(self) -> MasterWeightOptimizer | None:
        """The optimizer, if losses are scaled for it (fp16)."""
        masters = self._engine.masters
        return masters if masters is not None and masters.scales else None

    def norm_square(self, gradients: Sequence[torch.Tensor]) -> float:
        """Stock's way of counting: in fp32 model-parallel rank 0 only, which in a pipeline is the first stage; in
        16 bits all stages, a tied parameter once. Infinite if losses are scaled and a gradient has overflowed."""
        engine = self._engine
        if self._scaled is not None and not all(gradient.isfinite().all() for gradient in gradients):
            return math.inf
        if engine.gradient_clipping() <= 0.0:
            return 0.0
        everywhere = engine._recycle.clip_norm == "global" or engine.masters is not None
        if not everywhere and engine.grid.get_model_parallel_rank() != 0:
            return 0.0
        norms = [gradient.detach().float().norm(2.0) for parameter, gradient in zip(self.parameters, gradients)
                 if not (everywhere and getattr(parameter, "ds_pipe_replicated", False))]
        total = torch.stack(norms).pow(2.0).sum().float().item() if norms else 0.0
        return total if self._scaled is None else total / self._scaled.loss_scale**2

    def zeros(self, gradients: Sequence[torch.Tensor]) -> float:
        return 0.0  # DeepSpeed does not count them

    def coefficient(self, norm_squares: Sequence[float], weight: float) -> float:
        """Stock's clipping (`clip_grad_norm_`; with a loss scale `unscale_and_clip_grads`), operation by operation; not
        a number if some stage's gradients have overflowed."""
        engine = self._engine
        if self._scaled is not None and not math.isfinite(sum(norm_squares)):
            return math.nan
        if engine.gradient_clipping() <= 0.0:
            return 1.0
        if self._scaled is not None:
            return 1.0 / max(1.0, (math.sqrt(sum(norm_squares)) + 1e-6) / engine.gradient_clipping())
        total = torch.zeros(1)
        for value in norm_squares:
            total += value
        # Stock averages the norm over data-parallel ranks, which all have the same one.
        pipelines = engine.grid.data_parallel_size
        scaled = total.pow(1.0 / 2.0) * 1.0 / float(pipelines)
        norm = scaled.clone()
        for _ in range(pipelines - 1):
            norm += scaled
        limit = torch.tensor([float(engine.gradient_clipping())])
        return torch.min(torch.tensor([1.0]), limit / (norm + 1e-6)).item()

    def step(self, gradients: Sequence[torch.Tensor], coefficient: float) -> None:
        masters = self._scaled
        if masters is None:
            for parameter, gradient in zip(self._stepped, gradients, strict=True):
                parameter.grad = gradient if coefficient == 1.0 else gradient.mul_(coefficient)
        elif math.isnan(coefficient):
            masters.overflow = True
            if self._engine.speaks():
                get_logger().warning("megatron-recycle: gradients have overflowed at a loss scale of %g: the step of "
                                     "iteration %d is skipped", masters.loss_scale, self._engine.global_steps)
        else:
            masters.overflow = False
            for master, gradient in zip(self._stepped, gradients, strict=True):
                master.grad = gradient.float().mul_(coefficient / masters.loss_scale)
        self._engine._exec_optimizer_step()

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {f"parameter {index}": parameter.data for index, parameter in enumerate(self.parameters)}
        if self._engine.masters is not None:
            tensors.update({f"master {index}": master.data for index, master in enumerate(self._stepped)})
        for index, parameter in enumerate(self._stepped):
            for key, value in self._engine.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key} {index}"] = value
        return tensors

    def fixed(self) -> dict[str, torch.Tensor]:
        trained = set(map(id, self.parameters))
        frozen = {f"frozen {name}": parameter.data for name, parameter in self._engine.module.named_parameters()
                  if id(parameter) not in trained}
        return {**frozen, **{f"buffer {name}": value for name, value in self._engine.module.named_buffers()}}

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Any) -> None:
        self.reset_state(tensors.keys())
        own = {**self.state(), **self.fixed()}
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in own:
                    own[name].copy_(tensor)
                else:  # the optimizer makes its state at the first step
                    key, index = name.rsplit(" ", 1)
                    self._engine.optimizer.state[self._stepped[int(index)]][key] = tensor
        self.set_counters(counters)

    def reset_state(self, names: Collection[str]) -> None:
        for index, parameter in enumerate(self._stepped):
            kept = self._engine.optimizer.state.get(parameter, {})
            for key in [key for key in kept if isinstance(kept[key], torch.Tensor) and f"{key} {index}" not in names]:
                del kept[key]
            if not kept:
                self._engine.optimizer.state.pop(parameter, None)

    def counters(self) -> Any:
        engine = self._engine
        numbers = [{key: value for key, value in engine.optimizer.state.get(parameter, {}).items()
                    if not isinstance(value, torch.Tensor)} for parameter in self._stepped]
        groups = [{key: value for key, value in group.items() if key != "params"}
                  for group in engine.optimizer.param_groups]
        schedule = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
        scaling = engine.masters.counters() if engine.masters is not None else {}
        return copy.deepcopy((numbers, groups, schedule, scaling, {name: getattr(engine, name) for name in _COUNTERS}))

    def set_counters(self, counters: Any) -> None:
        engine = self._engine
        numbers, groups, schedule, scaling, values = copy.deepcopy(counters)
        for parameter, own in zip(self._stepped, numbers, strict=True):
            if own:
                engine.optimizer.state[parameter].update(own)
        for group, own in zip(engine.optimizer.param_groups, groups, strict=True):
            group.update(own)
        if schedule is not None:
            engine.lr_scheduler.load_state_dict(schedule)
        if engine.masters is not None:
            engine.masters.set_counters(scaling)
        for name, value in values.items():
            setattr(engine, name, value)

    def regroup(self, groups: Groups) -> None:
        """Every handle that DeepSpeed keeps and may use during training or after it."""
        engine, grid = self._engine, self._engine.grid
        grid.dp_proc_group = engine.data_parallel_group = engine.seq_data_parallel_group = groups.stage
        grid.ds_model_proc_group = grid.pp_proc_group = groups.pipeline
        engine.module.world_group = groups.world

    def _load(self, data: Any) -> tuple[torch.Tensor, ...]:
        """First-stage inputs as stock prepares them."""
        tensors = [data] if torch.is_tensor(data) else list(data)
        loaded = [tensor.clone().detach().to(self.device) for tensor in tensors]
        if self._engine._reentrant_activation_checkpointing():
            for tensor in loaded:
                tensor.requires_grad = tensor.is_floating_point()
        return tuple(loaded)

    def _labels(self, data: Any) -> Any:
        if torch.is_tensor(data):
            return data.to(self.device)
        return tuple(tensor.to(self.device).detach() for tensor in data)


def _tied_stages(module: deepspeed.PipelineModule) -> tuple[tuple[int, ...], ...]:
    """The stages of each tied layer that lives in several, the same on all workers."""
    stages: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(index))
    return tuple(tuple(sorted(stages[key])) for key in sorted(stages) if len(stages[key]) > 1)


def _ties(engine: PipelineEngine) -> list[Tie]:
    """This stage's copies of tied parameters, in the same order on all stages."""
    topology, module, found = engine.grid.topology(), engine.module, []
    for key, comm in sorted(module.tied_comms.items()):
        stages = tuple(sorted(topology.get_coord(rank).pipe for rank in comm["ranks"]))
        found += [Tie(module._recursive_getattr(module.tied_modules[key], name), stages)
                  for name in comm["weight_attr"] if len(stages) > 1]
    return found
