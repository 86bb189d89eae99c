"""Refusals: settings that the job does not support are refused before the worker takes part."""

from __future__ import annotations

from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import ConfigError, UnsupportedError
from megatron_recycle.policy import POLICIES
from megatron_recycle.runtime import shards
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.site import Framework


def check(framework: Framework, place: Place, config: RecycleConfig) -> None:
    """Refuse settings that this framework, this grid or a stage of this kind does not support. Raises ConfigError and
    UnsupportedError."""
    if config.on_leave == "checkpoint" and framework.save_last is None:
        raise UnsupportedError("on_leave checkpoint has no way to save from this script: it is there with DeepSpeed, "
                               "and with Megatron-LM's own training loop. Leave it out, and save often enough")
    if config.guard == "memory" and place.grid.stages == 1:
        raise ConfigError("guard memory keeps a stage's copy on a worker of another stage, and a pipeline of one stage "
                          "has none: leave guard out, and give `recycle run --job-restarts N` for the loss of the last "
                          "worker")
    if not POLICIES[config.policy].reroutes and place.grid.pipelines == 1:
        raise ConfigError(f"policy {config.policy} goes on with pipelines that are whole, and this job has one only: "
                          "leave policy out, and give `recycle run --job-restarts N` for the loss of a worker")
    if POLICIES[config.policy].in_flight == "whole" and place.parts > 1:
        raise ConfigError(f"policy {config.policy} is not there with tensor parallelism, whose parts would go on from "
                          "different places: give policy rollback, or leave it out")
    shards.check(framework.stage, place, config)
    _check_chunks(place, config)


def _check_chunks(place: Place, config: RecycleConfig) -> None:
    """Refuse settings that stages with several chunks do not support yet. Raises UnsupportedError."""
    if not place.placement:
        if config.chunks > 1:
            raise UnsupportedError(f"chunks {config.chunks}, and this framework's stages have one each: leave it out, "
                                   "DeepSpeed's PipelineModule and Megatron's GPTModel are cut into V-shaped stages")
        return
    found = [setting for setting, present in {
        "moves of workers to other stages": config.moves,
        f"policy {config.policy}": not POLICIES[config.policy].reroutes}.items() if present]
    if found:
        raise UnsupportedError(f"stages with several chunks cannot have {' or '.join(found)} yet: leave that out, or "
                               "give each stage one chunk (Megatron: no virtual pipelines)")
