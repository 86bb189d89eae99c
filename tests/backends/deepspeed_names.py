"""All that the DeepSpeed backend uses of DeepSpeed beside its documented interface, with the releases that have it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.backends.private_names import Private

NAMES: Sequence[Private] = (
    Private("deepspeed.accelerator", "get_accelerator"),
    Private("deepspeed.checkpoint.constants", "FP32_WEIGHT_KEY PARAM_GROUPS"),
    Private("deepspeed.checkpoint.universal_checkpoint", "load_hp_checkpoint_state"),
    Private("deepspeed.monitor.comet", "CometMonitor"),
    Private("deepspeed.monitor.csv_monitor", "csvMonitor"),
    Private("deepspeed.monitor.monitor", "MonitorMaster"),
    Private("deepspeed.monitor.tensorboard", "TensorBoardMonitor"),
    Private("deepspeed.monitor.wandb", "WandbMonitor"),
    Private("deepspeed.pipe", "PipelineModule"),
    Private("deepspeed.runtime.activation_checkpointing.checkpointing", "CheckpointFunction get_cuda_rng_tracker"),
    Private("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer"),
    Private("deepspeed.runtime.checkpoint_engine.checkpoint_engine", "CheckpointCommitInfo"),
    Private("deepspeed.runtime.engine", "DeepSpeedEngine._configure_zero_optimizer "
            "DeepSpeedEngine._common_checkpoint_state DeepSpeedEngine._configure_bf16_optimizer "
            "DeepSpeedEngine._configure_fp16_optimizer"),
    Private("deepspeed.runtime.fp16.loss_scaler", "CreateLossScaler LossScaleConfig LossScaleProfile LossScalerBase"),
    Private("deepspeed.runtime.pipe.engine", "BATCH_INPUT_TIMER PipelineEngine.is_pipe_partitioned "
            "PipelineEngine.is_grad_partitioned PipelineEngine.is_last_stage"),
    Private("deepspeed.runtime.pipe.module", "LayerSpec TiedLayerSpec PipelineModule"),
    Private("deepspeed.runtime.pipe.topology", "ProcessTopology"),
    Private("deepspeed.runtime.utils", "is_model_parallel_parameter"),
    Private("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    Private("deepspeed.runtime.zero.utils", "get_norm_dtype"),
    Private("deepspeed.utils.bwc", "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size"),
    Private("deepspeed.utils.tensor_fragment", "fragment_address"),
    Private("deepspeed.utils.timer", "SynchronizedWallClockTimer ThroughputTimer"),
)
