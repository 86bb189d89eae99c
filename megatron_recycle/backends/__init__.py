"""The supported frameworks; each folder here is the only code that imports its framework."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from megatron_recycle.backends.lazy import when_imported
from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.environment import Launched
from megatron_recycle.runtime.comm.job_store import take_over
from megatron_recycle.runtime.comm.standalone import set_up
from megatron_recycle.runtime.compute.data import Factory
from megatron_recycle.runtime.phases import Observer
from megatron_recycle.runtime.start import Embed

__all__ = ["BACKENDS", "Options", "enable"]

BACKENDS: Mapping[str, str] = {
    "deepspeed": "deepspeed.version:install",
    "megatron.bridge.training.setup": "megatron.bridge:watch_setup",
    "megatron.bridge.training.train": "megatron.bridge:watch_training",
    "megatron.core.optimizer.distrib_optimizer": "megatron.optimizer_groups:watch",
    "megatron.core.parallel_state": "megatron.hook:watch_groups",
    "megatron.core.pipeline_parallel.schedules": "megatron.hook:install",
    "megatron.training.global_vars": "megatron.hook:watch_arguments",
    "megatron.training.training": "megatron.training:install",
}
"""A framework's module -> the backend function (``module:function``) that takes it over as soon as it is loaded. Called
with `Options`, and perhaps again with others."""


def enable(config: RecycleConfig | None, *, flags: argparse.Namespace | None, data: Factory | None,
           observer: Observer | None, embed: Embed | None) -> None:
    """Make the installed frameworks build engines that survive failures; see `megatron_recycle.enable`.

    Frameworks that the script never imports are not loaded, and neither are their backends. ``embed`` starts a
    coordinator for a job whose launcher brings none.
    """
    if Launched.read().by_recycle_run:
        take_over()
    options = Options(config, flags, data, observer, embed, set_up())
    frameworks = {module.partition(".")[0] for module in BACKENDS}
    installed = {name for name in frameworks if find_spec(name) is not None}
    if not installed:
        raise ImportError("megatron-recycle found no framework to plug into; install one with "
                          "pip install 'deepspeed>=0.19.8,<0.20' or pip install 'megatron-core>=0.16,<0.20' einops")
    for module, function in BACKENDS.items():
        if module.partition(".")[0] in installed:
            when_imported(module, partial(_install, function, options))


def _install(function: str, options: Options) -> None:
    module, _, name = function.partition(":")
    getattr(import_module(f"{__name__}.{module}"), name)(options)
