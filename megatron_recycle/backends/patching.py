"""Replacements of a framework's functions and values: for good, or inside a block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOCK = "recycle_stock"
"""Attribute of a replacement that holds the framework's original."""


def stock_of(now: Any) -> Any:
    """The framework's original behind ``now``; ``now`` itself if it is the original."""
    return getattr(now, STOCK, now)


def replace(holder: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function of ``holder`` by ``function``, which gets the original as first argument; repeatable."""
    setattr(holder, name, _standing_for(stock_of(getattr(holder, name)), function))


def rebind(module: str, name: str, function: Callable[..., Any]) -> None:
    """As `replace`, in all modules that have it. ``module``: one of them."""
    now = getattr(sys.modules[module], name)
    made = _standing_for(stock_of(now), function)
    for found in list(sys.modules.values()):
        if getattr(found, "__dict__", {}).get(name) is now:
            setattr(found, name, made)


def _standing_for(stock: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def made(*arguments: Any, **keywords: Any) -> Any:
        return function(stock, *arguments, **keywords)

    setattr(made, STOCK, stock)
    return made


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Inside the block ``holder``, an object or a module, has these ``values`` as its own attributes."""
    own = vars(holder)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        own.update(before)
        for name in values.keys() - before.keys():
            del own[name]
