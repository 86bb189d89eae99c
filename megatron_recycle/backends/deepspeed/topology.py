"""The order of ranks in a pipeline model built with a number of stages and no topology; a worker's place in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology

from megatron_recycle.backends.deepspeed.chunks import chunks_of
from megatron_recycle.backends.deepspeed.relayout import remember_method
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.patching import replace
from megatron_recycle.backends.rank_order import spreads
from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import ConfigError
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.standalone import backend_for
from megatron_recycle.runtime.place import Place


def place(options: Options) -> None:
    """Make `PipelineModule` count ranks by `placement`, if its script does not say; again: other options."""

    def init(stock: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        given = inspect.signature(stock).bind(*arguments, **keywords)
        stages, size = given.arguments.get("num_stages"), dist.get_world_size()
        settings = options.resolve({})
        if (settings.enabled and stages and given.arguments.get("topology") is None and size % stages == 0
                and spreads(options, settings, stages, 1, size)):
            given.arguments["topology"] = ProcessTopology(["data", "pipe"], [size // stages, stages])
        stock(*given.args, **given.kwargs)
        given.apply_defaults()
        remember_method(arguments[0], given.arguments["partition_method"])

    replace(PipelineModule, "__init__", init)


def check_not_too_late(settings: RecycleConfig) -> None:
    """Raises ConfigError if DeepSpeed's JSON asks for an order of ranks: the model already has its topology."""
    if "JSON" in (source := settings.sources.get("placement", "")):
        raise ConfigError(f"{source} comes too late: PipelineModule has counted the ranks before the JSON is read. "
                          "Give --recycle-placement, or RECYCLE_PLACEMENT in the environment")


def place_of(engine: PipelineEngine) -> Place:
    """The place of the worker of ``engine`` in the grid."""
    grid, topology = engine.grid, engine.grid.topology()
    axes = topology.get_axis_names()
    parts = topology.get_dim("model") if "model" in axes else 1
    # Further axes have size 1: others are refused.
    rest = {axis: 0 for axis in axes if axis not in ("pipe", "data")}
    ranks = {Worker(pipeline, stage): tuple(
        topology.get_rank(pipe=stage, data=pipeline, **{**rest, **({"model": part} if "model" in axes else {})})
        for part in range(parts)) for pipeline in range(grid.data_parallel_size)
        for stage in range(grid.pipe_parallel_size)}
    chunks = chunks_of(engine.module)
    return Place(me=Worker(grid.get_data_parallel_id(), grid.get_stage_id()), part=grid.get_slice_parallel_rank(),
                 ranks=ranks, grid=Grid(grid.pipe_parallel_size, (engine.micro_batches,) * grid.data_parallel_size),
                 backend=backend_for(engine.device), placement=() if chunks is None else chunks.placement)
