"""megatron-recycle: training that goes on, in the same processes, when workers fail.

The public API is small: `enable()` switches the plugin on for a script, `add_arguments(parser)` adds a flag
that does so, `RecycleConfig` holds the settings. Importing this package loads neither torch nor OR-Tools: each name
imports its needs when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_recycle.environment import Launched

__version__ = "0.1.0"

__all__ = ["RecycleConfig", "__version__", "add_arguments", "enable", "register_state"]

if TYPE_CHECKING:
    import argparse

    from megatron_recycle.config import RecycleConfig as RecycleConfig
    from megatron_recycle.runtime.compute.data import Factory
    from megatron_recycle.runtime.phases import Observer


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
            is called; for scripts that have no dataset to give to `deepspeed.initialize(training_data=...)`.
        observer: told of every phase of this process's training (see `runtime.phases.Observer`).

    Raises:
        ImportError: no supported framework is installed.
        ConfigError: settings that contradict each other.
    """
    from megatron_recycle import backends

    launched = Launched.read()
    if observer is None and launched.chaos:
        from megatron_recycle.chaos.observer import observer_for

        observer = observer_for(launched)

    def embed(settings: RecycleConfig) -> tuple[str, str]:
        from megatron_recycle.launch import embedded

        return embedded.start(settings)

    backends.enable(config, flags=flags, data=data, observer=observer, embed=embed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--recycle` and one flag per setting to `parser`; reading `--recycle` calls `enable()`."""
    from megatron_recycle import config

    config.add_arguments(parser, when_given=lambda namespace: enable(flags=namespace))


def register_state(name: str, thing: Any) -> None:
    """Have what the script keeps beside the model (an average of the weights) taken over from a peer where this process
    comes into a running job. Call it before the first iteration, or at the same one on all ranks.

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


def __getattr__(name: str) -> Any:
    if name == "RecycleConfig":
        from megatron_recycle.config import RecycleConfig

        return RecycleConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
