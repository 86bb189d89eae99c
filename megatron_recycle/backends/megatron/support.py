"""Refusals of the Megatron backend, before training and with the remedy: features that it does not keep correct yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_recycle.backends.hidden_state import statistics
from megatron_recycle.backends.megatron import te, vshape
from megatron_recycle.backends.megatron.distributed import check as check_distributed
from megatron_recycle.backends.megatron.options import ANYWHERE, apply, message, with_history
from megatron_recycle.backends.megatron.script import foreign_synchronisation
from megatron_recycle.errors import UnsupportedError


def optimizer_of(config: Any) -> MegatronOptimizer:
    """The optimizer that Megatron's own training loop ties to a model's configuration. Raises UnsupportedError."""
    optimizer = getattr(config.grad_scale_func, "__self__", None)
    if not isinstance(optimizer, MegatronOptimizer):
        raise UnsupportedError("the optimizer cannot be found from the model: set config.grad_scale_func = "
                               "optimizer.scale_loss before the first call of forward_backward_func(), also if that is "
                               "an evaluation, as Megatron's own training loop does. A job that only evaluates needs "
                               "no plugin: start it without (torchrun, or RECYCLE_ENABLED=false)")
    return optimizer


def single_optimizers(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def check_supported(models: Sequence[Any], config: Any, optimizer: MegatronOptimizer, chunks: int = 1) -> list[str]:
    """Raises UnsupportedError listing all features of this job that cannot be kept correct.

    Returns lines on options that it has changed in the configurations (see `options`). ``chunks``: chunks per stage
    that the plugin is to make.
    """
    singles = single_optimizers(optimizer)
    holders = [_sizes(), config, *(model.ddp_config for model in models if hasattr(model, "ddp_config")),
               *(single.config for single in singles[:1])]
    found, changed = apply(ANYWHERE, holders)
    found += vshape.wrong(models) if chunks > 1 else []
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if len(models) != virtual:
        found.append(f"{len(models)} models of a worker where the virtual pipeline has {virtual} chunks on each stage: "
                     "give forward_backward_func() one for each, and initialize_model_parallel() "
                     f"virtual_pipeline_model_parallel_size={len(models) if len(models) > 1 else None}")
    found += [f"{name} around the model: wrap it in megatron.core.distributed.DistributedDataParallel"
              for name in {type(model).__name__: None for model in models
                           if not isinstance(model, DistributedDataParallel)}]
    if not _is_stocks(config.finalize_model_grads_func):
        found.append("a finalize_model_grads_func of your own: gradients are final when the plugin has reduced them")
    found += [f"a {name} of your own: the plan decides when gradients are reduced; leave it unset"
              for name in foreign_synchronisation(config, models)]
    found += _optimizer(singles)
    found += check_distributed(singles)
    if parallel_state.get_tensor_model_parallel_world_size() > 1 and any(
            getattr(parameter, "average_gradients_across_tp_domain", False)
            for model in models for parameter in model.parameters()):
        found.append("parameters with average_gradients_across_tp_domain (models of Hugging Face): their gradients are "
                     "means over tensor-parallel ranks; set tensor_model_parallel_size to 1")
    found += [f"{name} ({type(part).__name__}) changes its buffers in forward; use LayerNorm or RMSNorm"
              for model in models for name, part in statistics(model)]
    found += te.wrong(models, config) + with_history(config)
    if found:
        raise UnsupportedError(message(found))
    return changed


def overflows_earlier(models: Sequence[Any], optimizer: MegatronOptimizer, reduction: str) -> list[str]:
    """A line, if gradients summed in fp16 overflow at another loss scale than stock's."""
    in_fp16 = any(parameter.main_grad.dtype is torch.float16 for model in models for parameter in model.parameters()
                  if hasattr(parameter, "main_grad"))
    if reduction != "exact" or not in_fp16 or getattr(single_optimizers(optimizer)[0], "grad_scaler", None) is None:
        return []
    return ["reduction exact divides gradients by the number of pipelines once they are summed, stock before that: in "
            "fp16 sums overflow at a smaller loss scale. For stock's steps sum them in fp32 "
            "(--accumulate-allreduce-grads-in-fp32), or give reduction fast"]


def check_call(keywords: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for unsupported arguments of forward_backward_func()."""
    for name in ("collect_non_loss_data", "adjust_tensor_shapes_fn", "force_all_reduce"):
        if keywords.get(name):
            raise UnsupportedError(f"forward_backward_func({name}=...) is not supported yet; leave it out")
    for name, standard in (("p2p_communicator", _communicates), ("pg_collection", _is_standard)):
        given = keywords.get(name)
        if given is not None and not standard(given):
            raise UnsupportedError(
                f"forward_backward_func({name}=...) has process groups of its own, which nobody would renew after a "
                "failure: make them by parallel_state.initialize_model_parallel() "
                "(ProcessGroupCollection.use_mpu_process_groups(); under Megatron-Bridge dist.use_decentralized_pg "
                "false), or leave it out")


def check_caller(frame: FrameType | None) -> None:
    """Raises UnsupportedError if NeMo 2's own loop, which is untested, is among the callers of ``frame``."""
    while frame is not None:
        if f"{frame.f_globals.get('__name__')}.".startswith("nemo.lightning."):
            raise UnsupportedError("NeMo 2's own loop (nemo.lightning) was never run with this plugin: train by "
                                   "Megatron-Bridge's pretrain() or by Megatron-LM's, or without the plugin (torchrun, "
                                   "or RECYCLE_ENABLED=false)")
        frame = frame.f_back


def _communicates(communicator: Any) -> bool:
    """Whether it is core's own for `parallel_state`'s pipelines: the plugin sends in its place."""
    kind = type(communicator)
    return (kind.__name__ == "P2PCommunicator" and kind.__module__.startswith("megatron.core.")
            and communicator.pp_group is parallel_state.get_pipeline_model_parallel_group())


def _is_standard(collection: Any) -> bool:
    """Whether its groups are `parallel_state`'s current ones."""
    def groups(holder: Any) -> list[Any]:
        values = [value for value in vars(holder).values() if value is not None]
        return [one for value in values for one in (value if isinstance(value, list) else [value])]

    known = set(map(id, groups(parallel_state)))
    return isinstance(collection, ProcessGroupCollection) and all(id(one) in known for one in groups(collection))


def _is_stocks(finalize: Any) -> bool:
    """Whether it is core's function to reduce gradients, with standard groups if it names any."""
    if isinstance(finalize, partial) and not finalize.args and {*finalize.keywords} <= {"pg_collection"}:
        given = finalize.keywords.get("pg_collection")
        return finalize.func is finalize_model_grads and (given is None or _is_standard(given))
    return finalize is None or finalize is finalize_model_grads


def _sizes() -> SimpleNamespace:
    """The parallel groups' actual sizes, whatever a configuration says."""
    return SimpleNamespace(
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size())


def _optimizer(singles: Sequence[MegatronOptimizer]) -> list[str]:
    if len(singles) == 1 and type(singles[0]) in (
            FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer):
        return []
    if singles and (singles[0].config.optimizer_cpu_offload):
        return []  # named already
    names = ", ".join(type(single).__name__ for single in singles)
    return [f"optimizer {names}: use one of Megatron's plain ones (--optimizer adam or sgd)"]
