"""Functions of Megatron's in whose place others stand, in all modules that have them. Nothing of Megatron is imported
here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

STOCK = "recycle_stock_function"
"""Attribute of such a function: the one that it stands for."""


def rebind(module: str, name: str, function: Callable[..., Any]) -> None:
    """Put ``function``, which is given the original one first, in that one's place in all modules that have it."""
    now = getattr(sys.modules[module], name)
    stock = getattr(now, STOCK, now)
    bound = functools.partial(function, stock)
    setattr(bound, STOCK, stock)
    for found in list(sys.modules.values()):
        if getattr(found, "__dict__", {}).get(name) is now:
            setattr(found, name, bound)
