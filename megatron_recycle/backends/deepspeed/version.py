"""The releases of DeepSpeed that this backend supports; checked before the backend is loaded, since it uses names that
other releases lack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_recycle.backends.options import Options
from megatron_recycle.backends.patching import replace
from megatron_recycle.backends.releases import Release, release_of
from megatron_recycle.errors import UnsupportedError

OLDEST: Release = (0, 19, 8)
"""The first release with which the tests pass. 0.19.6 has all names that are used, but cuts a model into stages and
writes shards of ZeRO-1 in other ways (docs/versions.md)."""
TESTED = "0.19.8"
"""The tested release; others of the same two numbers, from the oldest on, are accepted."""


def is_supported(version: str) -> bool:
    """Whether this backend supports it."""
    release = release_of(version)
    return release[:2] == OLDEST[:2] and release >= OLDEST


def install(options: Options) -> None:
    """Take over `deepspeed.initialize`, right after its import; again: with other options. With an unsupported release
    it raises UnsupportedError for a pipeline module."""
    deepspeed: Any = sys.modules["deepspeed"]
    if is_supported(deepspeed.__version__):
        from megatron_recycle.backends.deepspeed import engine
        engine.install(options)
        return

    def initialize(stock: Callable[..., Any], args: Any = None, model: Any = None, *rest: Any, **keywords: Any) -> Any:
        if options.resolve({}).enabled and isinstance(model, deepspeed.PipelineModule):
            raise UnsupportedError(
                f"DeepSpeed {deepspeed.__version__} ({deepspeed.__file__}) is not supported: the engine that the "
                f"plugin builds on differs between releases; install deepspeed {TESTED} (any from {_shown(OLDEST)} on, "
                f"before {_shown((OLDEST[0], OLDEST[1] + 1))}; DeeperSpeed is an older one under this name, "
                "and gpt-neox trains with this one too), or train without the plugin (RECYCLE_ENABLED=false)")
        return stock(args, model, *rest, **keywords)

    replace(deepspeed, "initialize", initialize)


def _shown(release: Release) -> str:
    return ".".join(map(str, release))
