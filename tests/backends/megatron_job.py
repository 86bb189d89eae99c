"""Megatron training jobs for tests: the body of their worker processes, small and on the CPU."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import megatron_recycle
from megatron_recycle.config import RecycleConfig
from tests.backends.gpt_job import compile_layer
from tests.backends.lent import lend

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
SIZE = ("--length", "8", "--width", "16", "--heads", "2", "--blocks", "4", "--batch", "2", "--log-every", "1000")


_FUSED_NORMS = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.",
                "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
"""Parameters of Transformer Engine's layers, and what core's own are called."""


def train(observer_of: Callable[[str], Any], rank: int, *, stages: int = 2, pipelines: int = 3, tensor: int = 1,
          iterations: int = 4, plugin: bool = True, settings: dict[str, Any] | None = None,
          options: tuple[str, ...] = (), ramp: tuple[int, ...] = (), data_parallel: dict[str, Any] | None = None,
          seed: int = 1, lends: bool = False, fused: bool = False, alike: bool = False,
          compiled: bool = False, adapted: bool = False) -> Any:
    """Train scripts/pretrain_gpt_megatron.py's model; returns its state and the live workers.

    ``ramp``: micro-batches of a pipeline in the first iterations. ``data_parallel``: options of Megatron's
    DistributedDataParallelConfig that the script does not have. ``lends``: whether plans lend layers. ``fused``:
    whether a stand-in for apex's kernels adds weight gradients up; "fused" is how often it did. ``alike``: whether
    weights begin as their names in the whole model say, whichever stage has them; "whole" has them by these names.
    ``compiled``: whether layers are, by torch.compile(). ``adapted``: whether all is frozen but small matrices beside
    the linear layers (LoRA).
    """
    if lends:
        lend()
    if SCRIPTS not in sys.path:
        sys.path.insert(0, SCRIPTS)
    import pretrain_gpt_megatron as script
    from megatron.core import distributed, optimizer, parallel_state

    distributed.DistributedDataParallelConfig = functools.partial(  # type: ignore[assignment,misc]
        distributed.DistributedDataParallelConfig, **(data_parallel or {}))
    parallel_state.initialize_model_parallel = functools.partial(
        parallel_state.initialize_model_parallel,
        num_distributed_optimizer_instances=(data_parallel or {}).get("num_distributed_optimizer_instances", 1))
    added = _fuse() if fused else []
    whole: dict[str, torch.Tensor] = {}
    build = script.build
    if alike:
        script.build = lambda args: _alike(build(args), whole)
    if compiled:
        script.build = lambda args: _compiled(build(args))
    if adapted:
        _adapt()
    made: list[Any] = []
    make = optimizer.get_megatron_optimizer

    def noted(*arguments: Any, **keywords: Any) -> Any:
        made.append(make(*arguments, **keywords))
        return made[-1]

    optimizer.get_megatron_optimizer = noted
    if plugin:
        # Megatron's order of ranks: checked by the backend's own place.
        stage, pipeline, part = rank // (tensor * pipelines), rank // tensor % pipelines, rank % tensor
        name = f"{pipeline}:{stage}" + (f".{part}" if tensor > 1 else "")
        megatron_recycle.enable(
            RecycleConfig(**{"heartbeat_interval": 0.2, "heartbeat_timeout": 15.0, "planner_budget": 0.0,
                             "stall_floor": 60.0, "step": "barrier", **(settings or {})}), observer=observer_of(name))
    state = script.main([*SIZE, "--data", __file__, "--stages", str(stages), "--tensor", str(tensor),
                         "--iterations", str(iterations), "--seed", str(seed),
                         *(("--ramp", *map(str, ramp)) if ramp else ()), *options])
    result = {"losses": [loss for loss in state["losses"] if loss is not None],
              "norms": state["norms"], "zeros": state["zeros"],
              "validations": state["validations"], "stage": state["stage"],
              "pipeline": state["pipeline"], "members": None,
              "parameters": {name: value.float().numpy().copy() for name, value in state["parameters"].items()},
              "state": [{key: value.float().numpy().copy() for key, value in one.items()}
                        for one in state["optimizer"]]}
    result["whole"] = {name: value.detach().float().numpy().copy() for name, value in whole.items()}
    result["shards"], result["fused"] = _shards(made[0]), len(added)
    if plugin:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        schedule: Any = get_forward_backward_func()
        result["members"] = [str(worker) for worker in schedule.session.live()]
        result["borrowed"] = len(schedule.session.worker.site.trainable.neighbours.parameters)
        result["rerouted"] = schedule.log_part()
        result["kind of norm"] = type(schedule._stage.result[1]).__name__
        schedule.session.finish()
    torch.distributed.destroy_process_group()
    return result


def _alike(built: Any, whole: dict[str, torch.Tensor]) -> Any:
    """What the script has ``built``, with weights that go by their names in the ``whole`` model."""
    from megatron.core.utils import get_attr_wrapped_model

    _, models, optimizer = built
    for part in (get_attr_wrapped_model(model, "pre_process", return_model_obj=True) for model in models):
        for name, parameter in part.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(part.decoder.layers[int(parts[2])].layer_number - 1)
            if parts[0] == "output_layer" and part.share_embeddings_and_output_weights:
                parts = ["embedding", "word_embeddings", "weight"]
            name = ".".join(parts)
            for fused, own in _FUSED_NORMS.items():
                name = name.replace(fused, own)
            whole[name] = parameter
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator) + ("norm.weight" in name))
    optimizer.reload_model_params()
    return built


def _compiled(built: Any) -> Any:
    """What the script has ``built``, with compiled layers."""
    for layer in (layer for model in built[1] for layer in model.modules()):
        if type(layer).__name__ == "TransformerLayer":
            compile_layer(layer, whole=False)
    return built


class _Adapter(torch.nn.Module):
    """A linear layer of core's, frozen, with two small matrices beside it that are trained."""

    def __init__(self, linear: Any, inside: int = 4) -> None:
        super().__init__()
        outside, width = linear.weight.shape
        self.linear = linear
        self.down, self.up = torch.nn.Linear(width, inside, bias=False), torch.nn.Linear(inside, outside, bias=False)
        self.to(linear.weight.dtype)

    def forward(self, hidden: torch.Tensor, *more: Any, **named: Any) -> tuple[torch.Tensor, Any]:
        output, bias = self.linear(hidden, *more, **named)
        return output + self.up(self.down(hidden)), bias


def _adapt() -> None:
    """Models with such layers."""
    from megatron.core.models.gpt import gpt_model

    stock = gpt_model.GPTModel

    class Adapted(stock):  # type: ignore[misc,valid-type]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.requires_grad_(False)
            for layer in self.decoder.layers:
                for part, name in ((layer.self_attention, "linear_qkv"), (layer.self_attention, "linear_proj"),
                                   (layer.mlp, "linear_fc2")):
                    setattr(part, name, _Adapter(getattr(part, name)))

    gpt_model.GPTModel = Adapted  # type: ignore[misc]


def _fuse() -> list[torch.dtype]:
    """Linear layers with `gradient_accumulation_fusion`; the types of the sums that are added to, one by one."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import transformer_config

    added: list[torch.dtype] = []

    def kernel(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        added.append(total.dtype)
        total.addmm_(gradient.t().to(total.dtype), inputs.to(total.dtype))

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=kernel, wgrad_gemm_accum_fp16=kernel)
    layers._grad_accum_fusion_available = True
    config = transformer_config.TransformerConfig
    transformer_config.TransformerConfig = lambda **given: config(**{**given, "gradient_accumulation_fusion": True})
    return added


def _shards(optimizer: Any) -> dict[int, list[dict[str, Any]]]:
    """By number, the shards of a distributed optimizer's state that this worker has: parameter by parameter."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    single: Any = optimizer.chained_optimizers[0]
    if not isinstance(single, DistributedOptimizer):
        return {}
    stage = getattr(get_forward_backward_func(), "_stage", None)
    views = ({single.data_parallel_group.rank(): single} if stage is None else
             {shard: stage.distributed.view(shard) for shard in stage.shards.held})
    return {shard: [{key: value.detach().float().numpy().copy()
                     for key, value in view._get_main_param_and_optimizer_states(parameter).items()}
                    for parameter in view.model_param_gbuf_map] for shard, view in views.items()}
