"""Generators of random numbers that models, datasets and modules keep for themselves."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Found = tuple[str, Any]
"""Where it was found, and the generator."""

_DEPTH = 6  # attributes of attributes
_LONGEST = 1000  # elements of a container that is looked into: samples lie in longer ones
_MOST = 20_000  # objects that are looked at
_WITHOUT_TRACKERS = {"torch", "numpy", "sympy"}


def generators_in(holder: Any) -> Iterator[Found]:
    """Generators of torch, Python and numpy that ``holder``, its parts or the functions of either keep or name.

    The search goes through attributes, short containers, and the globals and closures of functions and methods. It
    leaves out torch, numpy and Python themselves.
    """
    seen: set[int] = set()
    left: list[tuple[str, Any, int]] = [("", holder, 0)]
    while left and len(seen) < _MOST:
        path, thing, depth = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if _is_generator(thing):
            yield path or type(thing).__name__, thing
        elif depth < _DEPTH:
            inside = 1 if isinstance(thing, nn.Module) else depth + 1  # models may be deeper than that
            with suppress(Exception):  # whatever a user's objects do when they are looked at
                left += [(f"{path}.{name}" if path else name, part, inside) for name, part in _parts(thing)]


def trackers_in(modules: Mapping[str, ModuleType]) -> Iterator[Found]:
    """Objects with `get_states`, `set_states` and `fork`, as Megatron's RNG tracker, that modules keep; torch, numpy
    and sympy, which have the most names, are left out."""
    known: set[type] = set()
    trackers: set[type] = set()
    for module_name, module in list(modules.items()):
        if module_name.partition(".")[0] in _WITHOUT_TRACKERS:
            continue
        values = getattr(module, "__dict__", {}).copy()
        kinds = set(map(type, values.values()))
        trackers.update(kind for kind in kinds - known if _tracks(kind))
        known |= kinds
        if not trackers.isdisjoint(kinds):
            yield from ((f"{module_name}.{name}", value) for name, value in values.items() if type(value) in trackers)


def _tracks(kind: type) -> bool:
    return all(callable(getattr(kind, part, None)) for part in ("get_states", "set_states", "fork"))


def _is_generator(thing: Any) -> bool:
    return _generates(type(thing))  # type: ignore[arg-type]  # a type is hashable


@functools.lru_cache(maxsize=1000)
def _generates(kind: type) -> bool:
    """Asked once for each class: torch's own answers in Python."""
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))
    return issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, (list, tuple, set)):
        if len(thing) <= _LONGEST:
            yield from ((str(index), part) for index, part in enumerate(thing))
    elif isinstance(thing, dict):
        if len(thing) <= _LONGEST:
            yield from ((_named(key, index), part) for index, (key, part) in enumerate(thing.items()))
    elif isinstance(thing, functools.partial):
        yield from (("function", thing.func), ("arguments", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, MethodType):
        yield "self", thing.__self__
        yield "function", thing.__func__
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif not isinstance(thing, (ModuleType, type, torch.Tensor)) and hasattr(thing, "__dict__"):
        yield from _of_object(thing)


def _named(key: Any, index: int) -> str:
    """A dictionary's key by itself where it is short; a parameter's text would be all of its numbers."""
    return str(key) if isinstance(key, (str, int, float)) else f"{type(key).__name__} {index}"


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    if _is_ours_or_librarys(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # not bound yet
            yield name, cell.cell_contents
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if _is_generator(value) or isinstance(value, FunctionType):
            yield name, value


def _of_object(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, nn.Module):
        yield from thing._modules.items()
    yield from ((name, part) for name, part in vars(thing).items()
                if name not in ("_parameters", "_buffers", "_modules"))
    for kind in type(thing).__mro__:
        if not _is_ours_or_librarys(kind.__module__):
            yield from ((name, part) for name, part in vars(kind).items()
                        if isinstance(part, FunctionType) or _is_generator(part))


def _is_ours_or_librarys(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("megatron_recycle", "torch", "numpy", "deepspeed", "builtins", "random")
