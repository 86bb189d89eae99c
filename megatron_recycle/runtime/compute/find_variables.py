"""Where the variables of a script are: within reach of a model, its loss function and its data, as their code and their
attributes lead there."""

from __future__ import annotations

import argparse
import functools
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_recycle.runtime.compute.holders import (
    PLAIN,
    Cell,
    Contents,
    Elements,
    Holder,
    Hooks,
    Named,
    OfEngine,
    Values,
)

_DEPTH = 6  # attributes of attributes
MOST = 20_000
"""Objects that a search looks at."""
_LONGEST = 1000  # elements of a container that is looked into: samples lie in longer ones
_LIBRARIES = {"megatron_recycle", "torch", "numpy", "deepspeed", *sys.stdlib_module_names}
_OPEN = (argparse.Namespace, SimpleNamespace)
_THREADED = (threading.Thread, type(threading.Lock()), type(threading.RLock()), queue.Queue)


def holders_in(things: Sequence[Any], names: set[str]) -> tuple[list[Holder], bool]:
    """Variables of ``things`` and of all that they lead to, and whether that is all of them, or there are more than
    `MOST` objects. Names in the code of functions are added to ``names``."""
    found: list[Holder] = []
    seen: dict[int, Any] = {}  # the things themselves too, or others may get their ids
    left: list[tuple[Any, int]] = [(thing, 0) for thing in reversed(things)]
    while left and len(seen) < MOST:
        thing, depth = left.pop()
        if id(thing) in seen or thing is None or isinstance(thing, (*PLAIN, Values)):
            continue
        seen[id(thing)] = thing
        inside = 1 if isinstance(thing, nn.Module) else depth + 1  # models may be deeper than that
        if depth < _DEPTH:
            with suppress(Exception):  # whatever a user's objects do when they are looked at
                left += [(part, inside) for part in list(_look_at(thing, found, names))]
    return found, not left


def _look_at(thing: Any, found: list[Holder], names: set[str]) -> Iterator[Any]:
    """Notes what ``thing`` holds; gives what is to be looked at besides."""
    if isinstance(thing, nn.Module):
        if type(thing).__module__.startswith("megatron_recycle."):
            found.append(OfEngine(vars(thing), names, type(thing)))
            yield from found[-1].read().values()
            return
        found += [Named(vars(thing)), Contents(thing._buffers)]
        found += [Hooks(parameter) for parameter in thing._parameters.values() if parameter is not None]
        yield from (*vars(thing).values(), *thing._modules.values(), *thing._buffers.values(), type(thing))
    elif isinstance(thing, torch.Tensor):
        if not isinstance(thing, nn.Parameter) and thing.is_leaf and not thing.requires_grad:
            found.append(Elements(thing))
    elif isinstance(thing, (list, dict)):
        if len(thing) <= _LONGEST:
            found.append(Contents(thing))
            yield from thing.values() if isinstance(thing, dict) else thing
    elif isinstance(thing, (tuple, set, frozenset)):
        if len(thing) <= _LONGEST:
            yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, CellType):
        found.append(Cell(thing))
        with suppress(ValueError):
            yield thing.cell_contents
    elif isinstance(thing, FunctionType):
        yield from _look_at_function(thing, found, names)
    elif isinstance(thing, type):
        for kind in thing.__mro__:
            if not _is_librarys(kind.__module__):
                found.append(Named(vars(kind), names, kind))
                for part in vars(kind).values():
                    part = getattr(part, "fget", None) or getattr(part, "__func__", part)  # of a property or a class
                    if isinstance(part, FunctionType):
                        yield part
    elif not isinstance(thing, ModuleType) and hasattr(thing, "__dict__"):
        data = type(thing).__module__.startswith("torch.utils.data")
        if _is_librarys(type(thing).__module__) and not data and not isinstance(thing, _OPEN):
            return
        if any(isinstance(part, _THREADED) for part in vars(thing).values()):
            return
        if data:
            found.append(Named(vars(thing)))
        else:
            found.append(Named(vars(thing), names))
        yield from vars(thing).values()
        yield type(thing)


def _look_at_function(function: FunctionType, found: list[Holder], names: set[str]) -> Iterator[Any]:
    if _is_librarys(function.__module__):
        return
    own = set(_names(function.__code__))
    names |= own
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    found.append(Named(function.__globals__, own))
    yield from (function.__globals__[name] for name in own if name in function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_librarys(module: str | None) -> bool:
    name = module or ""
    return name.partition(".")[0] in _LIBRARIES or name.startswith(("megatron.core", "megatron.training"))
