"""ZeRO-1: DeepSpeed's optimizer in shards, as the runtime drives it.

Stock's `DeepSpeedZeroOptimizer` and `BF16_Optimizer` tie a shard to a data-parallel rank, so that a dead worker's shard
is lost. Here the runtime's table places each shard on several workers. The cuts, the arithmetic of a step and the form
of checkpoints are stock's.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.constants import PARAM_GROUPS
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.utils import get_norm_dtype
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from megatron_recycle.backends.deepspeed.masters import WrappingOptimizer
from megatron_recycle.backends.deepspeed.reshard import (
    BASE,
    MASTERS,
    Whole,
    read_parameter,
    read_universal,
    shards_of,
    unwrapped,
)
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.membership.shards import to_begin_with
from megatron_recycle.runtime.compute.sharded_optimizer import MASTER, ShardedOptimizer, even, trained
from megatron_recycle.runtime.stage import Averaging

_SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of the loss scaling that an update changes."""
_OF_BLOCKS = ("absmax1", "absmax2", "qmap1", "qmap2")
"""Quantisation state of bitsandbytes, per block or shared by all."""


class ZeroOptimizer(WrappingOptimizer):
    """`ShardedOptimizer` as an engine's optimizer.

    Args:
        optimizer: over the model's parameters.
        group: the data-parallel group, whose ranks name shards in checkpoints.
        rank, size: of this worker in it, and its size.
        copies: of each shard.
        names: of the parameters.
        clipping: limit on the gradient's norm; 0: none.
        wire: the type in which gradients travel.
        scaler: stock's, of losses.
        bf16: whether stock would use its `BF16_Optimizer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Any, rank: int, size: int, copies: int,
                 names: Mapping[nn.Parameter, str], clipping: float, wire: torch.dtype, scaler: LossScalerBase,
                 bf16: bool) -> None:
        self._groups = trained(optimizer)
        self.shards = ShardedOptimizer(optimizer, even(self._groups, size), to_begin_with(rank, size, copies), wire)
        super().__init__(optimizer)
        self.dp_process_group = group
        self._rank = rank
        self._names = names
        self.clip_grad = clipping
        """Stock's name, for scripts that set it; an engine's `gradient_clipping` is only its initial value."""
        self.scaler = scaler
        self._bf16 = bf16

    @property
    def round_robin_bit16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters by group, under stock's name, which it reads to write their shapes."""
        return self._groups

    @property
    def averaging(self) -> Averaging:
        """The place where stock divides by the number of pipelines."""
        return "after" if self._bf16 else "before"

    @property
    def norm_type(self) -> torch.dtype:
        """The type in which stock adds up the squares of a gradient norm."""
        return torch.float32 if self._bf16 else get_norm_dtype()

    # ---- the loss's scale

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, and overflows skipped."""
        return self.scaler.dynamic or self.loss_scale != 1.0

    @property
    def loss_scale(self) -> float:
        """The factor of a micro-batch's loss before its backward."""
        return float(self.scaler.cur_scale)

    def counters(self) -> dict[str, Any]:
        """State besides shards that `step` changes or uses."""
        return {"clip_grad": self.clip_grad,
                **{name: vars(self.scaler)[name] for name in _SCALING if name in vars(self.scaler)}}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore the result of `counters`."""
        self.clip_grad = counters["clip_grad"]
        vars(self.scaler).update({name: value for name, value in counters.items() if name != "clip_grad"})

    def step(self, closure: None = None) -> None:
        """One update of this worker's shards, with the gradients loaded into them, already unscaled; after an overflow
        only the scale changes."""
        if self.scales:
            self.scaler.update_scale(self.overflow)
        if not self.overflow:
            self.shards.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the model's gradients."""
        for parameter in self.shards.parameters:
            parameter.grad = None

    # ---- checkpoints

    def state_dict(self, shard: int | None = None) -> dict[str, Any]:
        """Stock's state dict of the rank of ``shard``; of this worker's own rank by default."""
        shard, shards = self._rank if shard is None else shard, self.shards
        inner, held = self.optimizer.state_dict(), shards.held
        if shard not in held:
            raise UnsupportedError(f"this worker does not hold shard {shard} of the optimizer's state by now, but "
                                   f"{', '.join(map(str, held))}: use engine.save_checkpoint(), which finds all")
        place, each = held.index(shard), len(held)
        paddings = [self._padding(number, shard) for number in range(len(self._groups))]
        base = {"state": {number: inner["state"][number * each + place] for number in range(len(self._groups))
                          if number * each + place in inner["state"]},
                "param_groups": [{**group, "params": [number]} for number, group in enumerate(inner["param_groups"])]}
        if self._bf16:
            last = shard == shards.count - 1
            return {"clip_grad": self.clip_grad, BASE: base,
                    MASTERS: [master.detach().clone().requires_grad_() for master in shards.masters(shard)],
                    "group_paddings": paddings if last else [0] * len(paddings),
                    "partition_count": [shards.count] * len(self._groups), "ds_version": deepspeed.__version__,
                    "param_slice_mappings": self._mappings(shard)}
        return {"loss_scaler": copy.copy(self.scaler), "dynamic_loss_scale": self.scaler.dynamic,
                "overflow": self.overflow, "clip_grad": self.clip_grad, BASE: base,
                MASTERS: [master.detach()[:master.numel() - padding]
                           for master, padding in zip(shards.masters(shard), paddings)],
                "zero_stage": ZeroStageEnum.optimizer_states, "group_paddings": paddings,
                "param_alignment_paddings": [[0] * len(group) for group in self._groups],
                "partition_count": [shards.count] * len(self._groups), "ds_version": deepspeed.__version__,
                "param_slice_mappings": self._mappings(shard)}

    def load_state_dict(self, state_dict_list: Sequence[Mapping[str, Any]], load_optimizer_states: bool = True,
                        load_from_fp32_weights: bool = False, **_: Any) -> None:
        """Load this worker's shards from a checkpoint, stock's or ours."""
        for shard in self.shards.held:
            self._load(shard, state_dict_list[shard], load_optimizer_states, load_from_fp32_weights)
            self._load_counters(state_dict_list[shard])
        if not load_from_fp32_weights:
            self.refresh_fp32_params()

    def load_universal(self, checkpoint: str, part: int, parts: int) -> None:
        """Load a universal checkpoint: this worker's shards, and all of its stage's parameters, of which it has
        tensor-parallel part ``part`` of ``parts``. As stock, always with the optimizer's state. Raises RecycleError."""
        saved = read_universal(checkpoint)

        def read(parameter: nn.Parameter) -> Whole:
            found = read_parameter(checkpoint, self._names[parameter], parameter, part, parts)
            with torch.no_grad():
                parameter.copy_(found.master.view_as(parameter))
            return found

        slots = {shard: self.shards.slots(shard) for shard in self.shards.held}
        for shard, state in shards_of(slots, self.shards.parameters, saved[PARAM_GROUPS], read).items():
            self._load(shard, state, optimizer=True, masters=True)
        self._load_counters(saved)

    def update_lp_params(self) -> None:
        """Stock's last step of loading a universal checkpoint: `load_universal` has set parameters already."""

    def _load_counters(self, saved: Mapping[str, Any]) -> None:
        self.clip_grad = saved.get("clip_grad", self.clip_grad)
        if self.scales and saved.get("loss_scaler") is not None:
            self.scaler = copy.copy(saved["loss_scaler"])

    def _load(self, shard: int, saved: Mapping[str, Any], optimizer: bool, masters: bool) -> None:
        shards = self.shards
        if optimizer:
            inner = saved[BASE]
            if not isinstance(inner, Mapping):
                raise UnsupportedError("this checkpoint was written with zero_optimization.elastic_checkpoint, which "
                                       "is not supported yet: load it without the plugin, and save with it off")
            tensors = {name: tensor for name, tensor in shards.tensors(shard).items() if name.startswith(MASTER)}
            numbers = list[dict[str, Any]]()
            for number, (_, size, _) in enumerate(shards.slots(shard)):
                state = unwrapped(inner["state"].get(number, {}))
                found = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
                wrong = [key for key, value in found.items() if value.dim() and value.numel() != size
                         and key not in _OF_BLOCKS]
                if wrong:
                    raise UnsupportedError(f"the checkpoint's {wrong[0]} of parameter group {number} has not {size} "
                                           "numbers: it was written for another model, or with other zero_optimization "
                                           "settings")
                tensors.update({f"{key} {number}": value.to(shards.masters(shard)[number].device if value.dim() else
                                                            value.device, copy=True) for key, value in found.items()})
                numbers.append({key: value for key, value in state.items() if key not in found})
            shards.take(shard, tensors, numbers)
            for group, values in zip(self.param_groups, inner["param_groups"], strict=True):
                group.update({key: value for key, value in values.items() if key != "params"})
        if masters:
            for master, values in zip(shards.masters(shard), saved[MASTERS], strict=True):
                length = min(values.numel(), master.numel())  # with padding, or without
                master.data[:length].copy_(values[:length])

    def refresh_fp32_params(self) -> None:
        """Set the masters from the model's parameters, where only those were loaded."""
        for shard in self.shards.held:
            self.shards.refresh(shard)

    _restore_from_bit16_weights = refresh_fp32_params  # stock's call after loading no optimizer state

    @property
    def numels(self) -> list[int]:
        """The number of elements of each group, without padding."""
        return [sum(parameter.numel() for parameter in group) for group in self._groups]

    def _padding(self, number: int, shard: int) -> int:
        size = self.shards.slots(shard)[number].size
        return min(size, max(0, (shard + 1) * size - self.numels[number]))

    def _mappings(self, shard: int) -> list[OrderedDict[str, fragment_address]]:
        """The ranges of parameters in a shard, by group: for `ds_to_universal`."""
        return [OrderedDict((self._names[piece.parameter],
                             fragment_address(numel=piece.end - piece.start, start=piece.offset))
                            for piece in slot.pieces)
                for slot in self.shards.slots(shard)]


def clipping_coefficient(norm_squares: Sequence[float], stages: int, limit: float) -> float:
    """Stock's clipping of ZeRO-1, operation by operation: sums over shards of a stage, then over stages. NaN if a
    gradient is not finite: the step is left out. ``limit`` 0: gradients stay as they are."""
    each = len(norm_squares) // stages
    total = torch.zeros(1)
    for stage in range(stages):
        of_stage = torch.zeros(1)
        for value in norm_squares[stage * each:(stage + 1) * each]:
            of_stage += value
        total += of_stage
    norm = torch.linalg.vector_norm(torch.stack([total.pow(1.0 / 2.0)]))  # over groups, as if there were one
    if not math.isfinite(norm.item()):
        return math.nan
    if limit <= 0.0:
        return 1.0
    return (1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0)).item()
