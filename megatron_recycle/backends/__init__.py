"""The frameworks that the plugin works with; each module here is the only one that imports its framework."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.runtime.data import Factory
from megatron_recycle.runtime.interpreter import Observer
from megatron_recycle.runtime.link import Embed

__all__ = ["Options", "enable"]


def enable(config: RecycleConfig | None, *, flags: argparse.Namespace | None, data: Factory | None,
           observer: Observer | None, embed: Embed | None) -> None:
    """Make the installed framework build engines that survive failures; see `megatron_recycle.enable`.

    ``embed`` starts a coordinator for a job whose launcher brings none.
    """
    if find_spec("deepspeed") is None:
        raise ImportError("megatron-recycle found no framework to plug into; install one with "
                          "pip install megatron-recycle[deepspeed]")
    from megatron_recycle.backends.deepspeed import install
    install(Options(config, flags, data, observer, embed))
