"""megatron-recycle: training that goes on, in the same processes, when workers fail.

The public API is small. `enable()` switches the plugin on for a script; `add_arguments(parser)` adds a flag that does
so. `RecycleConfig` holds the settings. `register_state()` registers script state beside the model, `status()` returns
the job's state, `on_event()` registers a callback for its events. `Factory` and `Observer` are types for `enable()`;
errors are those of `megatron_recycle.errors`. Importing this package loads neither torch nor OR-Tools: each name
imports its needs when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_recycle.environment import Launched

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "DataError", "Factory", "JobEnded", "JobStatus", "Observer", "RecycleConfig", "RecycleError",
    "SaveError", "UnsupportedError", "VerificationError", "__version__", "add_arguments", "enable", "on_event",
    "register_state", "status",
]

_ELSEWHERE = {
    "Factory": "megatron_recycle.runtime.compute.data",
    "JobStatus": "megatron_recycle.job_status",
    "Observer": "megatron_recycle.runtime.phases",
    "RecycleConfig": "megatron_recycle.config",
    **dict.fromkeys(("ConfigError", "DataError", "JobEnded", "RecycleError", "SaveError", "UnsupportedError",
                     "VerificationError"), "megatron_recycle.errors"),
}
"""Name of the public API -> the module that it is loaded from when it is first used."""

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from megatron_recycle.config import RecycleConfig as RecycleConfig
    from megatron_recycle.errors import ConfigError as ConfigError
    from megatron_recycle.errors import DataError as DataError
    from megatron_recycle.errors import JobEnded as JobEnded
    from megatron_recycle.errors import RecycleError as RecycleError
    from megatron_recycle.errors import SaveError as SaveError
    from megatron_recycle.errors import UnsupportedError as UnsupportedError
    from megatron_recycle.errors import VerificationError as VerificationError
    from megatron_recycle.job_status import JobStatus as JobStatus
    from megatron_recycle.runtime.compute.data import Factory as Factory
    from megatron_recycle.runtime.phases import Observer as Observer


def enable(
    config: RecycleConfig | None = None,
    *,
    flags: argparse.Namespace | None = None,
    data: Factory | None = None,
    observer: Observer | None = None,
) -> None:
    """Switch the plugin on: from now on `deepspeed.initialize()` returns an engine that survives failures.

    Call it before the framework's engine is built. Calling it again replaces the earlier settings.

    Args:
        config: the settings, as they are. None: they are resolved when the engine is built, from the JSON
            section "recycle", environment variables and `flags`.
        flags: the namespace of a parser that `add_arguments` was applied to; it may still be in the making.
        data: `factory(pipeline) -> iterator` over that pipeline's micro-batches, the same sequence each time it
            is called; for scripts that have no dataset to give to `deepspeed.initialize(training_data=...)`. An item is
            one micro-batch as the stock engine would get it from its data iterator: under DeepSpeed the pair
            `(inputs, labels)`, tensors (or tuples of tensors) whose first dimension is
            `train_micro_batch_size_per_gpu`, of the types that the first stage and the loss take; on the CPU, or on the
            worker's own device. It must not end before training does.
        observer: an object with `on(phase, iteration, action)`, called in the training thread at the beginning of every
            phase of this process's training, so it has to be quick; `phase` is a text such as "forward", `iteration`
            counts from 0, `action` is None outside of a plan's actions. The names of phases may change before 1.0.

    Raises:
        ImportError: no supported framework is installed.
        ConfigError: settings that contradict each other.
    """
    from megatron_recycle import backends

    launched = Launched.read()
    if observer is None and launched.chaos:
        from megatron_recycle.observe.holds import observer_for

        observer = observer_for(launched)

    def embed(settings: RecycleConfig) -> tuple[str, str]:
        from megatron_recycle.launch import embedded

        return embedded.start(settings)

    backends.enable(config, flags=flags, data=data, observer=observer, embed=embed)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--recycle` and one flag per setting to `parser`, and return it; reading `--recycle` calls `enable()`.

    In Megatron-LM: `pretrain(..., extra_args_provider=megatron_recycle.add_arguments)`.
    """
    from megatron_recycle import config

    config.add_arguments(parser, when_given=lambda namespace: enable(flags=namespace))
    return parser


def register_state(name: str, thing: Any) -> None:
    """Register script state beside the model (an average of the weights): a process that joins a running job takes it
    over from a peer. Call it before the first iteration, or at the same one on all ranks.

    Args:
        name: the same on all ranks of a stage.
        thing: has `state_dict()`, of numbers, text, None, lists, tuples, dicts and tensors, and `load_state_dict()`.
            The script changes it between two iterations only, as its peers' scripts do.

    Raises:
        ConfigError: it has no such methods, or the name is taken.
        UnsupportedError: its state holds something else.
    """
    from megatron_recycle.runtime.registered import register

    register(name, thing)


def status() -> JobStatus | None:
    """State of the job as this process knows it: live and missing workers, the committed iteration.

    Costs microseconds, needs no other process, and may be called from any thread. After a failure another rank may give
    another answer at the same iteration: agree (by an all-reduce, say) before ranks act alike on it, for instance to
    leave an evaluation out.

    Returns:
        None without the plugin, and before the framework's engine is built.
    """
    from megatron_recycle.job_status import HERE

    return HERE.status()


def on_event(callback: Callable[[Mapping[str, Any]], None]) -> None:
    """Register ``callback`` for the job's events in this process. Call it at any time; each call adds one.

    Callbacks run in the training thread, at the end of the engine call (`train_batch()`, `train_step()`) in which the
    event happened. Each gets a dict: ``event`` is "lost", "joined", "resumed", "last_copy", "whole" or "ended"; ``t``
    the Unix time in seconds of the call; ``generation``, ``iteration``, ``live`` and ``of`` (numbers of workers),
    ``workers`` (list of "d:s"), with "last_copy" ``stages``; "ended" has ``status`` and ``message`` instead. All live
    processes get the events, a joining one first the missing workers; `status().is_logging_rank` is true on one worker.
    A callback must not wait for other ranks. Its exceptions are logged, and training goes on.

    Raises:
        TypeError: it cannot be called.
    """
    from megatron_recycle.job_status import HERE

    HERE.add(callback)


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
