"""The parameter groups of a distributed optimizer, which itself forgets parameters without a part on its rank.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_recycle.backends.megatron.version import is_supported
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.patching import replace

_MODULE = "megatron.core.optimizer.distrib_optimizer"
_GROUPS = "recycle_groups"


def watch(options: Options) -> None:
    """Make each distributed optimizer remember its parameter groups from before its cut; again: with other options.
    Unsupported versions stay as they are: they are refused when they ask for a schedule."""
    if not is_supported():
        return

    def begin(stock: Callable[..., None], self: Any, optimizer: Any, *rest: Any, **keywords: Any) -> None:
        groups = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
        stock(self, optimizer, *rest, **keywords)
        setattr(self, _GROUPS, groups)

    replace(sys.modules[_MODULE].DistributedOptimizer, "__init__", begin)


def groups_of(optimizer: Any) -> list[list[Any]] | None:
    """The model's parameters in each group of a distributed optimizer; None if it was made before `watch`."""
    return getattr(optimizer, _GROUPS, None)
