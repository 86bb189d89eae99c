"""The DeepSpeed configuration before there is an engine: where DeepSpeed would find it, and what it will compile."""

from __future__ import annotations

import base64
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import hjson
from deepspeed.accelerator import get_accelerator

from megatron_recycle.observe.log import get_logger

_COMPILED = {"adam": "FusedAdam", "adamw": "FusedAdam", "lamb": "FusedLamb", "lion": "FusedLion"}
"""DeepSpeed's own optimizers by their name in a configuration."""


def read_config(initialize: Callable[..., Any], *arguments: Any, **keywords: Any) -> Mapping[str, Any]:
    """The configuration that ``initialize(*arguments, **keywords)`` will find: a dict, a file of JSON or Hjson, or
    such text in base64; {} if there is none, or none that can be read, which DeepSpeed then says itself."""
    given = inspect.signature(initialize).bind_partial(*arguments, **keywords).arguments
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


def say_before_compiling(config: Mapping[str, Any], client_optimizer: Any) -> None:
    """One line if DeepSpeed is about to compile an optimizer for a CPU: that takes minutes, in which nothing moves."""
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
