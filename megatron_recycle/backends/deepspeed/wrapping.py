"""DeepSpeed's engine with optimizers that the runtime can step, undo and copy, also for 16 bits and shards."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScaleConfig, LossScaleProfile
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size

from megatron_recycle.backends.deepspeed import optimizer_checkpoint
from megatron_recycle.backends.deepspeed.masters import MasterWeightOptimizer
from megatron_recycle.backends.deepspeed.reshard import recut
from megatron_recycle.backends.deepspeed.zero import ZeroOptimizer


class WrappingEngine(PipelineEngine):
    """`PipelineEngine` that wraps an optimizer in one of ours; an fp32 one without shards stays as it is.

    Args:
        copies: workers that hold each shard; 0: all of a stage.

    Attributes:
        masters: the optimizer, if it has fp32 copies of 16-bit parameters.
        sharded: the optimizer, if its state is cut into shards (ZeRO-1).
        goes_back: whether the checkpoint being loaded is this job's own.
    """

    def __init__(self, copies: int, *args: Any, **keywords: Any) -> None:
        self.masters: MasterWeightOptimizer | None = None
        self.sharded: ZeroOptimizer | None = None
        self.goes_back = False
        self._copies = copies
        super().__init__(*args, **keywords)

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        """Shards that the runtime places on several workers. Unsupported settings are refused after construction."""
        if optimizer is None or self.zero_optimization_stage() != 1:
            return optimizer
        return self._configure_shards(optimizer, bf16=False)

    def _configure_shards(self, optimizer: Any, bf16: bool) -> ZeroOptimizer:
        group = self.seq_data_parallel_group
        scaler = CreateLossScaler(self.get_data_types()[0], self.loss_scale(), self.dynamic_loss_scale(),
                                  self.dynamic_loss_scale_args())
        size = dist.get_world_size(group)
        self.sharded = ZeroOptimizer(optimizer, group, dist.get_rank(group), size, self._copies or size,
                                     self.param_names, self.gradient_clipping(), self.communication_data_type, scaler,
                                     bf16)
        return self.sharded

    def _common_checkpoint_state(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        """As stock; with two chunks the optimizer's state by name."""
        state: dict[str, Any] = super()._common_checkpoint_state(*args, **keywords)
        if state["optimizer"] is not None:
            state["optimizer"] = optimizer_checkpoint.written(self, state["optimizer"])
        return state

    def _load_checkpoint(self, *args: Any, **keywords: Any) -> Any:
        """As stock, also if it was written by stages with other layers."""
        with optimizer_checkpoint.reading(self, *args, **keywords):
            return super()._load_checkpoint(*args, **keywords)

    def _load_zero_checkpoint(self, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        """As stock, also from another number of pipelines."""
        if self.sharded is None:
            return super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states)
        if self.load_universal_checkpoint():
            self.sharded.load_universal(str(Path(load_dir, tag)), bwc_tensor_model_parallel_rank(self.mpu),
                                        bwc_tensor_model_parallel_world_size(self.mpu))
            return True
        self.sharded.load_state_dict(self._get_all_zero_checkpoints(load_dir, tag), load_optimizer_states,
                                     self.zero_load_from_fp32_weights())
        return True

    def _get_all_zero_checkpoint_state_dicts(self, zero_ckpt_names: list[str]) -> list[Any]:
        """As stock, for all shards that this worker holds, at the start or on a way back."""
        if self.sharded is None:
            return super()._get_all_zero_checkpoint_state_dicts(zero_ckpt_names)
        count, held, numels = self.sharded.shards.count, self.sharded.shards.held, self.sharded.numels

        @functools.cache
        def read(number: int) -> Any:
            found = self.checkpoint_engine.load(zero_ckpt_names[number], map_location="cpu")
            return optimizer_checkpoint.read_shard(self, found["optimizer_state_dict"])

        written = len(zero_ckpt_names)
        return [None if shard not in held else read(shard) if written == count else
                recut(read, written, shard, count, numels) for shard in range(count)]

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        if optimizer is not None and self.zero_optimization_stage() == 1:
            return self._configure_shards(optimizer, bf16=True)
        return self._configure_fp16_optimizer(optimizer, torch.bfloat16)

    def _configure_fp16_optimizer(self, optimizer: Any, low_precision_dtype: torch.dtype) -> Any:
        """fp32 master weights and moments whole on every peer; stock's numbers for the loss scale."""
        if optimizer is None:
            return None  # refused with a message once the engine is built
        scaling = LossScaleConfig(low_precision_dtype, self.dynamic_loss_scale(), self.loss_scale(),
                                  self.dynamic_loss_scale_args(), profile=LossScaleProfile.UNFUSED)
        self.masters = MasterWeightOptimizer(optimizer, scaling)
        return self.masters

    def load_universal_checkpoint(self) -> bool:
        """As stock, except that the job's own checkpoints are never universal."""
        return not self.goes_back and bool(super().load_universal_checkpoint())

    def zero_load_from_fp32_weights(self) -> bool:
        """As stock, but always on a way back to a checkpoint of this job: masters made from 16 bits would differ."""
        return self.goes_back or super().zero_load_from_fp32_weights()
