"""Puts the plugin's schedule where Megatron's is looked up.

Runs as soon as core's schedules are loaded, which is in the middle of the import of `megatron.core`: so nothing
of Megatron is imported here, and the backend itself only when a schedule is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_recycle.backends.options import Options

SCHEDULES = "megatron.core.pipeline_parallel.schedules"

_NAME = "get_forward_backward_func"
_STOCK = "recycle_stock_function"


def install(options: Options) -> None:
    """Make `get_forward_backward_func` return ours in all modules that have it; again: with other options.

    The function raises UnsupportedError if this version of megatron-core is not supported.
    """
    now = getattr(sys.modules[SCHEDULES], _NAME)
    stock = getattr(now, _STOCK, now)
    made: list[Any] = []

    def get_forward_backward_func(*args: Any, **keywords: Any) -> Callable[..., Any]:
        # Not before: flags are still being read when the plugin is switched on by one.
        settings = options.resolve({})
        if options.config is None and "step" not in settings.sources:
            # Megatron's loop looks at gradient norms between steps, and so may a script.
            settings = replace(settings, step="barrier")
        if not settings.enabled:
            return stock(*args, **keywords)
        if not made:
            from megatron_recycle.backends.megatron_version import check_version
            check_version()
            from megatron_recycle.backends.megatron import RecycleSchedule
            made.append(RecycleSchedule(settings, options))
        return made[0]

    setattr(get_forward_backward_func, _STOCK, stock)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is now:
            setattr(module, _NAME, get_forward_backward_func)
