"""Replaces Megatron's schedule function, and checks options once they are parsed.

Runs as soon as core's schedules are loaded, in the middle of the import of `megatron.core`: so nothing of Megatron is
imported here, and the backend itself only when a schedule is asked for.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_recycle.backends.megatron.option_report import refuse_or_tell, unknown
from megatron_recycle.backends.megatron.version import check_version, is_supported
from megatron_recycle.backends.megatron.writers import name_run, unopened
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.patching import rebind
from megatron_recycle.backends.rank_order import spreads
from megatron_recycle.environment import Launched
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.standalone import is_joining

SCHEDULES = "megatron.core.pipeline_parallel.schedules"

ARGUMENTS = "megatron.training.global_vars"
"""Megatron-LM's module that gets its arguments once they are parsed and validated."""

GROUPS = "megatron.core.parallel_state"
"""Core's module that numbers the ranks."""

_USUAL, _SPREAD = "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"
_NAME = "get_forward_backward_func"


def install(options: Options) -> None:
    """Make `get_forward_backward_func` return ours in all modules that have it; again: with other options.

    The function raises UnsupportedError if this version of megatron-core is not supported.
    """
    made: list[Any] = []

    def get_forward_backward_func(stock: Callable[..., Any], *args: Any, **keywords: Any) -> Callable[..., Any]:
        # Not before: if a flag turns the plugin on, flags are still being parsed then.
        settings = options.resolve({})
        if options.config is None and "step" not in settings.sources:
            # Megatron's loop reads gradient norms between steps, and a script may too.
            settings = replace(settings, step="barrier")
        if not settings.enabled:
            options.stay_off()
            return stock(*args, **keywords)
        if is_deepspeeds_fork():
            return stock(*args, **keywords)
        if not made:
            check_version()
            from megatron_recycle.backends.megatron.schedule import RecycleSchedule
            made.append(RecycleSchedule(settings, options))
        return made[0]

    rebind(SCHEDULES, _NAME, get_forward_backward_func)


@functools.cache
def is_deepspeeds_fork() -> bool:
    """Whether `megatron.core` is an old one that a DeepSpeed script has brought along (Megatron-DeepSpeed's): its loop
    asks for a schedule even where DeepSpeed's engine trains. Logs one line on it, once."""
    if hasattr(sys.modules.get("megatron.core"), "__version__") or "deepspeed" not in sys.modules:
        return False
    if not Launched.read().rank:
        get_logger().warning(
            "megatron-recycle: %s is a fork of megatron-core without a version: its schedules stay as they are, and "
            "only what deepspeed.PipelineEngine trains goes on after a failure", sys.modules["megatron.core"].__file__)
    return True


def watch_arguments(options: Options) -> None:
    """Judge Megatron-LM's options as soon as it has parsed them, before it builds anything; again: with other options.

    All refusals are printed at once, in each rank's log or, where ranks share a terminal, by one rank of a host; they
    end every rank with status 2. The first rank prints a line for each option that is changed.
    """

    def set_global_variables(stock: Callable[..., Any], args: Any, *rest: Any, **keywords: Any) -> Any:
        settings = options.resolve({})
        if settings.enabled:
            refuse_or_tell(lambda: _judge(args, settings.chunks))
            name_run(args)
            if is_joining():
                with unopened(args):
                    return stock(args, *rest, **keywords)
        return stock(args, *rest, **keywords)

    rebind(ARGUMENTS, "set_global_variables", set_global_variables)


def watch_groups(options: Options) -> None:
    """Make `initialize_model_parallel` count ranks by `placement`, if its script leaves Megatron's usual order; again:
    with other options. Experts, context parallelism and weights cut once more keep that order. So does an unsupported
    version, which is refused when it asks for a schedule."""
    if not is_supported():
        return

    def initialize_model_parallel(stock: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        given = inspect.signature(stock).bind(*args, **keywords)
        given.apply_defaults()
        wanted, settings = given.arguments, options.resolve({})
        others = ("context_parallel_size", "expert_model_parallel_size", "hierarchical_context_parallel_sizes",
                  "gtp_remat_size", "expert_gtp_remat_size")
        if (settings.enabled and wanted.get("order") == _USUAL and all(wanted.get(name) in (None, 1) for name in others)
                and spreads(options, settings, wanted["pipeline_model_parallel_size"],
                            wanted["tensor_model_parallel_size"], dist.get_world_size())):
            keywords = {**keywords, "order": _SPREAD}
        returned = stock(*args, **keywords)
        if settings.enabled and settings.chunks > 1:
            from megatron_recycle.backends.megatron import vshape
            vshape.install()
        return returned

    rebind(GROUPS, "initialize_model_parallel", initialize_model_parallel)


def _judge(arguments: Any, chunks: int) -> list[str]:
    from megatron_recycle.backends.megatron.training import check_arguments, keep_batch
    check_version()
    return [*check_arguments(arguments, chunks), *keep_batch(arguments, Launched.read().microbatches),
            *unknown(arguments)]
