"""Buffers that change in forward: what a micro-batch leaves in them would depend on where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron_recycle.errors import UnsupportedError


def statistics(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of ``module`` that are known to keep running statistics, by name."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return [(name, part) for name, part in module.named_modules()
            if isinstance(part, kinds) and part.track_running_stats]


def check_unchanged(module: nn.Module, forward: Callable[[], Any]) -> Any:
    """Run ``forward()``; raises UnsupportedError naming the buffers of ``module`` that it changed."""
    def versions() -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}

    before = versions()
    result = forward()
    changed = sorted(name for name, version in versions().items() if before.get(name) != version)
    if changed:
        raise UnsupportedError(
            f"these buffers change in forward: {', '.join(changed)}. What a micro-batch leaves in them would depend on "
            "where it runs; keep such state out of the model, or train without the plugin")
    return result
