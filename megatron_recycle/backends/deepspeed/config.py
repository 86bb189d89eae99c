"""The DeepSpeed configuration before there is an engine: its place, and optimizers that will be compiled."""

from __future__ import annotations

import base64
import copy
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson
from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory

from megatron_recycle.errors import ConfigError
from megatron_recycle.observe.log import get_logger

_GLOBAL, _SIZE, _ACCUMULATION = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_COMPILED = {"adam": "FusedAdam", "adamw": "FusedAdam", "lamb": "FusedLamb", "lion": "FusedLion"}
"""DeepSpeed's own optimizers by their name in a configuration."""
_FOLDERS = {"FusedAdam": "fused_adam", "FusedLamb": "fused_lamb", "FusedLion": "fused_lion"}
"""Their folders in torch's folder of extensions."""
_STALE = 600.0
"""Seconds after which a lock on a build counts as left by a dead process."""


def read_config(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration that `deepspeed.initialize()` will find with the arguments ``given``, by name: a dict, a file
    of JSON or Hjson, or such text in base64. {} if there is none, or it cannot be read, which DeepSpeed then reports
    itself."""
    args = given.get("args")
    config = given.get("config") or given.get("config_params") or getattr(args, "deepspeed_config", None)
    if not isinstance(config, (str, os.PathLike)):
        return config if isinstance(config, Mapping) else {}
    try:
        if os.path.exists(config):
            with open(config, encoding="utf-8") as file:
                return hjson.load(file)
        return hjson.loads(base64.urlsafe_b64decode(os.fspath(config)).decode())
    except (OSError, ValueError):
        return {}


def keep_batch(config: Mapping[str, Any], microbatches: int, pipelines: int) -> dict[str, Any]:
    """``config`` for a job started again with another number of pipelines: an iteration keeps its total of
    ``microbatches``, of the same size.

    Raises ConfigError if the pipelines cannot share them.
    """
    if microbatches % pipelines:
        raise ConfigError(f"the script was started again and makes {pipelines} pipelines, which cannot share the "
                          f"{microbatches} micro-batches of an iteration: let their number follow WORLD_SIZE")
    kept = {**config, _ACCUMULATION: microbatches // pipelines}
    if config.get(_SIZE) is None and config.get(_GLOBAL) is not None:
        kept[_SIZE] = config[_GLOBAL] // microbatches
    return kept


def with_config(given: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments ``given`` to `deepspeed.initialize()`, by name, with the configuration ``kept`` in place of the
    script's."""
    args: Any = given.get("args")
    if getattr(args, "deepspeed_config", None) is not None:
        args = copy.copy(args)
        args.deepspeed_config = None
    return {**given, "args": args, "config": dict(kept), "config_params": None}


def say_before_compiling(config: Mapping[str, Any], client_optimizer: Any) -> None:
    """One line if DeepSpeed is about to compile an optimizer for a CPU: it takes minutes without output."""
    section = config.get("optimizer")
    if client_optimizer is not None or not isinstance(section, Mapping) or get_accelerator().device_name() != "cpu":
        return
    kind, parameters = str(section.get("type", "")), section.get("params") or {}
    fused = _COMPILED.get(kind.lower())
    if fused is not None and not parameters.get("torch_adam"):
        remedy = ('"torch_adam": true in its params takes torch\'s own instead' if fused == "FusedAdam" else
                  "an optimizer of torch.optim needs no compiler")
        get_logger().warning('megatron-recycle: for the optimizer {"type": "%s"} DeepSpeed compiles its %s on this '
                             "machine now, unless it did so before: that may take minutes. %s", kind, fused, remedy)
        _say_of_lock(Path(_get_build_directory(_FOLDERS[fused], False)) / "lock")


def _say_of_lock(lock: Path) -> None:
    """One line if torch will wait for a build whose process has ended: it would wait for ever, in silence."""
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return  # no process compiles
    if age > _STALE:
        get_logger().error("megatron-recycle: this start waits while there is %s, which a process that compiled made "
                           "%.0f minutes ago. If none compiles any more, it was ended: remove the file", lock, age / 60)
