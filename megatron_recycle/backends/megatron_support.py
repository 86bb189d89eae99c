"""What the Megatron backend does not keep correct yet, refused before training with the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from megatron_recycle.backends.buffers import statistics
from megatron_recycle.errors import UnsupportedError


def optimizer_of(config: Any) -> MegatronOptimizer:
    """The optimizer that Megatron's own training loop ties to a model's configuration. Raises UnsupportedError."""
    optimizer = getattr(config.grad_scale_func, "__self__", None)
    if not isinstance(optimizer, MegatronOptimizer):
        raise UnsupportedError("the optimizer cannot be found from the model: set config.grad_scale_func = "
                               "optimizer.scale_loss before training, as Megatron's own training loop does")
    return optimizer


def single_optimizers(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def check_supported(models: Sequence[Any], config: Any, optimizer: MegatronOptimizer) -> None:
    """Raises UnsupportedError that lists everything about this job that cannot be kept correct."""
    if len(models) != 1 or config.virtual_pipeline_model_parallel_size is not None:
        found = ["virtual pipelines: leave virtual_pipeline_model_parallel_size unset"]
    elif not isinstance(models[0], DistributedDataParallel):
        found = [f"{type(models[0]).__name__} around the model: wrap it in megatron.core.distributed."
                 "DistributedDataParallel"]
    else:
        model = models[0]
        found = [message for unsupported, message in
                 [*_parallelism(config), *_data_parallel(model.ddp_config), *_model(config)]
                 if unsupported]
        found += _optimizer(optimizer)
        found += [f"{name} ({type(part).__name__}) changes its buffers in forward; use LayerNorm or RMSNorm"
                  for name, part in statistics(model)]
        foreign = sorted({type(part).__name__ for part in model.modules()
                          if type(part).__module__.startswith("transformer_engine")})
        if foreign:
            found.append(f"Transformer Engine layers ({', '.join(foreign)}): use the local implementation "
                         "(--transformer-impl local)")
    if found:
        raise UnsupportedError(
            "megatron-recycle does not support this configuration yet:\n- " + "\n- ".join(found)
            + "\nTo train without the plugin leave --recycle out (or set RECYCLE_ENABLED=false).")


def check_call(keywords: Mapping[str, Any], microbatches: int) -> None:
    """Raises UnsupportedError if forward_backward_func() is called with what cannot be kept correct.

    ``microbatches`` is the number of micro-batches that the job began with.
    """
    if keywords["num_microbatches"] != microbatches:
        raise UnsupportedError(f"the number of micro-batches changed from {microbatches} to "
                               f"{keywords['num_microbatches']}: leave --rampup-batch-size out, and evaluate with the "
                               "global batch size of training")
    for name in ("collect_non_loss_data", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection",
                 "force_all_reduce"):
        if keywords.get(name):
            raise UnsupportedError(f"forward_backward_func({name}=...) is not supported yet; leave it out")


def _parallelism(config: Any) -> list[tuple[bool, str]]:
    return [
        (parallel_state.get_tensor_model_parallel_world_size() > 1 and config.qk_layernorm,
         "qk_layernorm with tensor parallelism: its gradients are summed over tensor-parallel ranks; leave one of them "
         "out"),
        (config.sequence_parallel, "sequence parallelism: leave sequence_parallel off"),
        (parallel_state.get_context_parallel_world_size() > 1,
         "context parallelism: set context_parallel_size to 1"),
        (parallel_state.get_expert_model_parallel_world_size() > 1 or bool(config.num_moe_experts),
         "experts and expert parallelism: use dense layers"),
        (parallel_state.get_pipeline_model_parallel_world_size() < 2,
         "a pipeline of one stage: set pipeline_model_parallel_size to 2 or more"),
    ]


def _data_parallel(config: Any) -> list[tuple[bool, str]]:
    return [
        (config.use_distributed_optimizer, "the distributed optimizer: a dead worker takes its share of the state "
         "along; leave use_distributed_optimizer off"),
        (config.overlap_grad_reduce, "overlap_grad_reduce: the reduction follows the plan; leave it off"),
        (config.average_in_collective, "average_in_collective: it would divide by the number of survivors; leave it "
         "off"),
    ]


def _model(config: Any) -> list[tuple[bool, str]]:
    return [
        (config.fp16, "fp16: its loss scale follows what other stages overflow; use bf16"),
        (bool(config.fp8) or bool(config.fp4), "fp8 and fp4: scales change in forward; use bf16"),
        (bool(config.mtp_num_layers), "multi-token prediction: leave mtp_num_layers unset"),
        (config.cuda_graph_impl != "none" or config.enable_cuda_graph, "CUDA graphs: leave them off"),
        (config.overlap_p2p_comm, "overlap_p2p_comm: leave it off"),
        (config.variable_seq_lengths, "variable_seq_lengths: use one length for all micro-batches"),
        (config.defer_embedding_wgrad_compute, "defer_embedding_wgrad_compute: weight gradients are deferred by the "
         "plan already; leave it off"),
        (config.num_microbatches_with_partial_activation_checkpoints is not None,
         "num_microbatches_with_partial_activation_checkpoints: leave it unset"),
        (config.fine_grained_activation_offloading, "fine-grained activation offloading: leave it off"),
        (config.enable_autocast, "enable_autocast: use bf16"),
        (getattr(config, "has_cond_embedder", False), "conditional embedders: their gradients cross all stages"),
        (config.finalize_model_grads_func not in (None, finalize_model_grads),
         "a finalize_model_grads_func of your own: gradients are final when the plugin has reduced them"),
    ]


def _optimizer(optimizer: MegatronOptimizer) -> list[str]:
    singles = single_optimizers(optimizer)
    if len(singles) == 1 and singles[0].config.optimizer_cpu_offload:
        return ["optimizer_cpu_offload: its state is spread over several optimizers; leave it off"]
    if len(singles) != 1 or type(singles[0]) not in (FP32Optimizer, Float16OptimizerWithFloat16Params):
        names = ", ".join(type(single).__name__ for single in singles)
        return [f"optimizer {names}: use one of Megatron's plain ones (--optimizer adam or sgd)"]
    return []
