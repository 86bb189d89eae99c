"""The frameworks that the plugin works with; each module here is the only one that imports its framework."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec

from megatron_recycle import nccl_settings
from megatron_recycle.backends.lazy import when_imported
from megatron_recycle.backends.megatron import hook as megatron_hook
from megatron_recycle.backends.megatron import setup as megatron_setup
from megatron_recycle.backends.megatron import training as megatron_training
from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.runtime.admission import set_up
from megatron_recycle.runtime.compute.data import Factory
from megatron_recycle.runtime.interpreter import Observer
from megatron_recycle.runtime.start import Embed

__all__ = ["Options", "enable"]


def enable(config: RecycleConfig | None, *, flags: argparse.Namespace | None, data: Factory | None,
           observer: Observer | None, embed: Embed | None) -> None:
    """Make the installed frameworks build what survives failures; see `megatron_recycle.enable`.

    A framework that the script never imports is not loaded. ``embed`` starts a coordinator for a job whose launcher
    brings none.
    """
    os.environ.update(nccl_settings.defaults(os.environ))  # before torch makes a group; recycle run sets them, too
    options = Options(config, flags, data, observer, embed, set_up())
    installed = [name for name in ("deepspeed", "megatron") if find_spec(name) is not None]
    if not installed:
        raise ImportError("megatron-recycle found no framework to plug into; install one with "
                          "pip install megatron-recycle[deepspeed] or megatron-recycle[megatron]")
    if "deepspeed" in installed:
        when_imported("deepspeed", lambda: _install_deepspeed(options))
    if "megatron" in installed:
        when_imported(megatron_hook.SCHEDULES, lambda: megatron_hook.install(options))
        when_imported(megatron_hook.ARGUMENTS, lambda: megatron_hook.watch_arguments(options))
        when_imported(megatron_training.LOOP, lambda: megatron_setup.install(options))


def _install_deepspeed(options: Options) -> None:
    from megatron_recycle.backends.deepspeed.engine import install
    install(options)
