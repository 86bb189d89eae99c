"""Random generators that models, datasets and modules keep for themselves."""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections import UserDict, UserList, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_recycle.observe.log import get_logger

Found = tuple[str, Any]
"""Path of the generator, and the generator."""

_DEPTH = 6  # attributes of attributes
_LONGEST = 1000  # elements of a container that is searched: samples lie in longer ones
_MOST = 100_000  # objects that are searched
_LISTS = (list, tuple, set, frozenset, deque, UserList)
_DICTS = (dict, UserDict)
_OPEN = (*_LISTS, *_DICTS, functools.partial, MethodType, FunctionType, argparse.Namespace, SimpleNamespace)
"""Types of libraries whose instances hold objects of the script."""
_NOTHING = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, ModuleType)
_LIBRARIES = {"megatron_recycle", "torch", "numpy", "deepspeed", *sys.stdlib_module_names}
_WITHOUT_TRACKERS = {"torch", "numpy", "sympy"}


def generators_in(holder: Any) -> Iterator[Found]:
    """Generators of torch, Python and numpy that ``holder``, its parts or the functions of either keep or name.

    The search covers attributes, short containers, and names in functions and methods: globals and closures, and
    attributes by these names of the script's modules. It leaves out torch, numpy, Python and the frameworks themselves.
    """
    seen: set[int] = set()
    left: list[tuple[str, Any, int]] = [("", holder, 0)]
    while left:
        path, candidate, depth = left.pop()
        if id(candidate) in seen:
            continue
        if len(seen) == _MOST:
            get_logger().warning("megatron-recycle: %s leads to more than %d objects; those behind %s and others were "
                                 "not searched for generators of random numbers", type(holder).__name__, _MOST, path)
            return
        seen.add(id(candidate))
        if _is_generator(candidate):
            yield path or type(candidate).__name__, candidate
        elif depth < _DEPTH:
            inside = 1 if isinstance(candidate, nn.Module) else depth + 1  # models may be deeper than that
            with suppress(Exception):  # a user's objects may do anything when inspected
                left += [(f"{path}.{name}" if path else name, part, inside) for name, part in _parts(candidate)
                         if not isinstance(part, _NOTHING) and not (isinstance(part, (*_LISTS, *_DICTS)) and not part)]


def trackers_in(modules: Mapping[str, ModuleType]) -> Iterator[Found]:
    """Objects in modules that have `get_states`, `set_states` and `fork`, as Megatron's RNG tracker; torch, numpy and
    sympy, which have the most names, are left out."""
    known: set[type] = set()
    trackers: set[type] = set()
    for module_name, module in list(modules.items()):
        if module_name.partition(".")[0] in _WITHOUT_TRACKERS:
            continue
        values = getattr(module, "__dict__", {}).copy()
        kinds = set(map(type, values.values()))
        trackers.update(kind for kind in kinds - known if all(
            callable(getattr(kind, part, None)) for part in ("get_states", "set_states", "fork")))
        known |= kinds
        if not trackers.isdisjoint(kinds):
            yield from ((f"{module_name}.{name}", value) for name, value in values.items() if type(value) in trackers)


def _is_generator(candidate: Any) -> bool:
    return _generates(type(candidate))  # type: ignore[arg-type]  # a type is hashable


@functools.lru_cache(maxsize=1000)
def _generates(kind: type) -> bool:
    """Whether ``kind`` is a class of generators; cached by class, since torch's own check runs in Python."""
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))
    return issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom)


def _parts(candidate: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(candidate, _LISTS):
        if len(candidate) <= _LONGEST:
            yield from ((str(index), part) for index, part in enumerate(candidate))
    elif isinstance(candidate, _DICTS):
        if len(candidate) <= _LONGEST:
            yield from ((_named(key, index), part) for index, (key, part) in enumerate(candidate.items()))
    elif isinstance(candidate, functools.partial):
        yield from (("function", candidate.func), ("arguments", candidate.args), ("keywords", candidate.keywords))
    elif isinstance(candidate, MethodType):
        yield "self", candidate.__self__
        yield "function", candidate.__func__
    elif isinstance(candidate, FunctionType):
        yield from _of_function(candidate)
    elif isinstance(candidate, type):
        yield from _of_class(candidate)
    else:
        yield from _of_object(candidate)


def _named(key: Any, index: int) -> str:
    """A dictionary's key if it is short; the text of a parameter would be all of its numbers."""
    return str(key) if isinstance(key, (str, int, float)) else f"{type(key).__name__} {index}"


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    if _is_librarys(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if name != "__class__":  # that of super(), whose object leads there as well
            with suppress(ValueError):  # not bound yet
                yield name, cell.cell_contents
    yield from vars(function).items()
    named = _named_in(function.__globals__, set(_names(function.__code__)), frozenset())
    if _is_installed(function.__module__):  # its objects and classes lead through the whole package
        named = ((name, part) for name, part in named if _is_generator(part) or isinstance(part, FunctionType))
    yield from named


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _named_in(values: Mapping[str, Any], names: Collection[str], known: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """The values of these ``names`` in ``values``, and recursively in the script's modules among them; ``known``:
    modules being searched already."""
    for name in names:
        value = values.get(name)
        if isinstance(value, ModuleType):
            if value.__name__ not in known and not _is_librarys(value.__name__):
                found = _named_in(vars(value), names, known | {value.__name__})
                yield from ((f"{name}.{path}", part) for path, part in found)
        elif _is_generator(value) or isinstance(value, _OPEN) or not _is_librarys(
                (value if isinstance(value, type) else type(value)).__module__):
            yield name, value


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for each in kind.__mro__:
        if not _is_librarys(each.__module__):
            yield from ((name, getattr(part, "fget", None) or getattr(part, "__func__", part))  # of a property, ...
                        for name, part in vars(each).items())


def _of_object(candidate: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(candidate, nn.Module):
        yield from candidate._modules.items()
    for kind in type(candidate).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(candidate, name):
                yield name, getattr(candidate, name)
    yield from ((name, part) for name, part in getattr(candidate, "__dict__", {}).items()
                if name not in ("_parameters", "_buffers", "_modules"))
    yield from _of_class(type(candidate))


@functools.lru_cache(maxsize=1000)
def _is_installed(module: str) -> bool:
    """Whether ``module`` is of an installed package, and not of the script's own code."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _is_librarys(module: str | None) -> bool:
    name = module or ""
    return name.partition(".")[0] in _LIBRARIES or name.startswith(("megatron.core", "megatron.training"))
