"""Refusals of the DeepSpeed backend, before training and with the remedy: features that it does not keep correct
yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from megatron_recycle.backends.hidden_state import statistics
from megatron_recycle.errors import UnsupportedError

_GIVEN_UP = {
    "amp": "its losses are scaled by a handle that knows nothing of re-routed micro-batches (use fp16 or bf16)",
    "compression_training": "its schedule changes weights outside of the optimizer's step, which no undo knows",
    "quantize_training": "its quantizer changes weights outside of the optimizer's step, which no undo knows",
    "eigenvalue": "it is there for quantize_training",
    "progressive_layer_drop": "which layers a micro-batch goes through would depend on the steps of whoever runs it",
    "curriculum_learning": "its samples change their length between iterations",
}
_COMMUNICATING_OPTIMIZERS = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")


def check_supported(engine: PipelineEngine) -> None:
    """Raises UnsupportedError listing all features of ``engine`` that cannot be kept correct."""
    found = [message for unsupported, message in _features(engine) if unsupported]
    found += [f"{name} ({type(module).__name__}) changes its buffers in forward; use a normalisation without "
              "running statistics, such as LayerNorm" for name, module in statistics(engine.module)]
    if found:
        raise UnsupportedError(
            "megatron-recycle does not support this configuration yet:\n- " + "\n- ".join(found)
            + '\nTo train without the plugin set "recycle": {"enabled": false} in the DeepSpeed JSON.')


def torch_optimizer(engine: PipelineEngine) -> Any:
    """The engine's torch optimizer, without a wrapper that keeps fp32 copies."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _zero_features(engine: PipelineEngine) -> list[tuple[bool, str]]:
    """Features that stock supports with ZeRO-1 and the plugin does not, or only with it."""
    zero, sharded = engine._config.zero_config, engine.zero_optimization_stage() == 1
    names = ("round_robin_gradients", "parameter_alignment", "elastic_checkpoint", "offload_optimizer", "zenflow")
    return [(not sharded and bool(engine.load_universal_checkpoint()), "checkpoint.load_universal without ZeRO, where "
             "DeepSpeed loads none either: set zero_optimization.stage to 1, or leave it out"),
            *((sharded and bool(getattr(zero, name, None)), f"zero_optimization.{name}: leave it out")
              for name in names)]


def _scaled_gradients(engine: PipelineEngine) -> list[tuple[bool, str]]:
    return [
        (not engine.postscale_gradients() and engine.zero_optimization_stage() == 1, "prescale_gradients with ZeRO-1, "
         "where DeepSpeed has none unless reduce_scatter is off: leave it out")]


def given_up(config: Mapping[str, Any]) -> list[str]:
    """Refusals of JSON sections that DeepSpeed dropped by 0.19.8, which says so itself, and 0.19.6 still has."""
    return [f"{name}: {reason}; remove the section" for name, reason in _GIVEN_UP.items()
            if (section := config.get(name)) and (not isinstance(section, Mapping) or section.get("enabled", True))]


def _of_8_bits(optimizer: Any) -> bool:
    """Whether an optimizer's state is bitsandbytes' 8-bit blocks: its ``Adam8bit``, or ``Adam(optim_bits=8)``."""
    return type(optimizer).__name__.endswith("8bit") or getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8


def _features(engine: PipelineEngine) -> list[tuple[bool, str]]:
    optimizer = torch_optimizer(engine)
    return [
        (engine.fp16_enabled() and (engine.fp16_auto_cast() or engine.fp16_master_weights_and_gradients()),
         "fp16.auto_cast and fp16.fp16_master_weights_and_grads: leave them out"),
        (engine.torch_autocast_enabled(), "torch_autocast: remove the section, use bf16 or fp32"),
        (engine.zero_optimization_stage() > 1, "ZeRO 2 and 3: set zero_optimization.stage to 1 or 0"),
        *_zero_features(engine),
        (not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ in _COMMUNICATING_OPTIMIZERS,
         f"optimizer {type(optimizer).__name__}: use one of torch.optim, for instance "
         '{"type": "Adam", "params": {"torch_adam": true}}'),
        (_of_8_bits(optimizer) and engine.bfloat16_enabled() and not engine.zero_optimization_stage(),
         f"optimizer {type(optimizer).__name__} with bf16 and without ZeRO, where DeepSpeed's blocks of 8-bit state go "
         "on from parameter to parameter: set zero_optimization.stage to 1"),
        (engine.has_moe_layers, "mixture-of-experts layers: use dense ones"),
        (any(engine.grid.topology().get_dim(axis) > 1 for axis in engine.grid.topology().get_axis_names()
             if axis not in ("pipe", "data", "model")), "a topology with further axes than pipe, data and model: let "
         "these have size 1"),
        (engine.module.dynamic_shape, "PipelineModule(dynamic_shape=True): use one shape for all micro-batches"),
        (engine.module.seed_layers, "PipelineModule(seed_layers=True): randomness is seeded by place already"),
        (engine.curriculum_learning_enabled() or engine.random_ltd_enabled(), "curriculum learning and random-LTD: "
         "turn them off"),
        (any(isinstance(part, nn.Embedding) and part.sparse for part in engine.module.modules()),
         "sparse embedding gradients: use nn.Embedding(sparse=False)"),
        (engine.communication_data_type not in (None, torch.float16 if engine.fp16_enabled() else torch.float32)
         and not engine.bfloat16_enabled() and engine.zero_optimization_stage() != 1,
         "communication_data_type: leave it at its default"),
        *_scaled_gradients(engine),
        *((True, line) for line in given_up(engine._config._param_dict)),
        (engine._config.checkpoint_config["writer"] is not None or engine._config.datastates_config.enabled,
         "checkpoint.writer and datastates, which write in the background or share the writing with peers that may be "
         "gone: leave them out, checkpoints are written at once"),
        (engine.use_node_local_storage(), "checkpoint.use_node_local_storage: save to a folder that all hosts share"),
        (engine.wall_clock_breakdown() and engine.steps_per_print() is None, "wall_clock_breakdown without "
         "steps_per_print, with which DeepSpeed fails in its first step: set steps_per_print as well"),
        (engine.flops_profiler_enabled(), "flops_profiler, which DeepSpeed does not print under pipelines: turn it "
         "off, and give a stage's module to deepspeed.profiling.flops_profiler.get_model_profile()"),
    ]
