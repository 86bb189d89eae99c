"""Variables of the script that its model, loss function and data are computed with.

A failure may undo an iteration after training has returned to the script, and the script may have set a variable for
the next one by then: a weight in the loss that is annealed, a dataset's stage of difficulty, a hook. The iteration is
run again with what it was run with before, so these variables are found, and their values kept.
"""

from __future__ import annotations

import argparse
import dis
import functools
import operator
import queue
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError

_DEPTH = 6  # attributes of attributes
_MOST = 20_000  # objects that are looked at
_LONGEST = 1000  # elements of a container that is looked into: samples lie in longer ones
_SMALL = 4096  # elements of a tensor whose values are kept
_PLAIN = (bool, int, float, complex, str, bytes)
_LIBRARIES = {"megatron_recycle", "torch", "numpy", "deepspeed", *sys.stdlib_module_names}
_OPEN = (argparse.Namespace, SimpleNamespace)
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules"}  # otherwise watched, or looked into below
_THREADED = (threading.Thread, type(threading.Lock()), type(threading.RLock()), queue.Queue)
_GONE = object()
_NOTHING: dict[Any, Any] = {}


@dataclass(frozen=True)
class Change:
    """A variable that has become another: ``holder`` has ``before`` and then ``after`` under ``name``."""

    holder: _Holder
    name: Any
    before: Any
    after: Any

    def undo(self) -> None:
        """Raises UnsupportedError for a tensor that is too large for its values to have been kept."""
        self.holder.write(self.name, self.before)

    def redo(self) -> None:
        self.holder.write(self.name, self.after)


class Variables:
    """Variables within reach of a model and of further functions and objects, and their values at this moment.

    It watches closures of functions, the globals and attributes that their code names, attributes, buffers and hooks of
    modules, and items of short lists and dicts. It leaves out objects of threads, and the insides of torch, DeepSpeed,
    numpy and Python.

    Args:
        model: the stage.
        others: a loss function, a dataset and the like.
    """

    def __init__(self, model: nn.Module, others: Iterable[Any]) -> None:
        self._names: set[str] = set()
        self._always = _holders([model, *others], self._names)
        self._watched: Sequence[_Holder] = ()
        self._lately: list[_Holder] | None = None  # of which nothing is kept yet
        self._empty: list[Any] = []
        self._kept: list[_Kept] = []
        self._watch(self._always)

    def keep(self) -> None:
        """From now on these values are the ones to compare with."""
        if self._lately is not None:
            self._watch([*self._always, *self._lately])
        elif any(self._empty):
            self._watch(self._watched)
        else:
            self._kept = [kept if kept.stands() else _Kept.of(kept.holder) for kept in self._kept]

    def changes(self) -> list[Change]:
        """The changes since `keep`. Insides of new values are watched from the next `keep` on, until other values
        come."""
        found = []
        filled = [_Kept(_Contents(container), {"": ()}) for container in self._empty if container]
        for kept in (*self._kept, *filled):
            if kept.stands() or kept.holder.gone():
                continue
            holder, before, now = kept.holder, kept.values, kept.holder.read()
            if not _all_alike(before, now):
                found += [Change(holder, name, before.get(name, _GONE), now.get(name, _GONE))
                          for name in {**before, **now} if not _alike(before.get(name, _GONE), now.get(name, _GONE))]
        if found:
            self._lately = _holders([change.after for change in found], self._names)
        return found

    def _watch(self, holders: Sequence[_Holder]) -> None:
        """Keep the values of ``holders``. Most are empty containers, of hooks that a module does not have, which one
        look tells of all."""
        self._watched, self._lately = holders, None
        self._empty = [holder.container for holder in holders if isinstance(holder, _Contents) and not holder.container]
        self._kept = [_Kept.of(holder) for holder in holders if not isinstance(holder, _Contents) or holder.container]


# ---- what holds variables


class _Holder:
    """Something with variables in it."""

    def read(self) -> dict[Any, Any]:
        raise NotImplementedError

    def things(self) -> Sequence[Any] | None:
        """While these are the same objects, so are those that `read` gives; None: no objects tell that."""
        now = self.read()
        return *now, *now.values()

    def write(self, name: Any, value: Any) -> None:
        raise NotImplementedError

    def gone(self) -> bool:
        """Whether nobody has it any more: whoever had has changed, and is looked at for itself."""
        return False


@dataclass(frozen=True)
class _Kept:
    """The content of a holder."""

    holder: _Holder
    values: dict[Any, Any]
    things: Sequence[Any] | None = None

    @classmethod
    def of(cls, holder: _Holder) -> _Kept:
        things = holder.things()
        if things is not None:  # nor is what a forward has left, with all behind it, to be kept
            things = [_GONE if isinstance(thing, torch.Tensor) and thing.grad_fn is not None else thing
                      for thing in things]
        return cls(holder, holder.read(), things)

    def stands(self) -> bool:
        """Whether that is in it still; if not, it may be all the same."""
        if self.things is None:
            return False
        now = self.holder.things()
        return now is not None and len(now) == len(self.things) and all(map(operator.is_, now, self.things))


class _Named(_Holder):
    """Variables of ``space`` that are in ``names``, each for itself; those of a class by way of ``kind``."""

    def __init__(self, space: Any, names: Set[str] | None = None, kind: type | None = None) -> None:
        self._space = space
        self._names = names
        self._kind = kind

    def read(self) -> dict[Any, Any]:
        space, names = self._space, self._names
        if names is None:
            return {name: value for name, value in space.items() if name not in _OF_MODULES
                    and not (isinstance(value, torch.Tensor) and value.grad_fn is not None)}  # left by a forward
        if len(space) > len(names):
            return {name: space[name] for name in names if name in space}
        return {name: value for name, value in space.items() if name in names}

    def things(self) -> Sequence[Any]:
        space, names = self._space, self._names
        if names is None:
            return *space, *space.values()
        if len(space) > len(names):
            return [space.get(name, _GONE) for name in names]
        return [part for item in space.items() if item[0] in names for part in item]

    def write(self, name: Any, value: Any) -> None:
        if self._kind is not None:
            delattr(self._kind, name) if value is _GONE else setattr(self._kind, name, value)
        elif value is _GONE:
            self._space.pop(name, None)
        else:
            self._space[name] = value


class _OfEngine(_Named):
    """Attributes that a script has given an engine, which a model or a loss function may know. Those that the engine's
    own code sets are its own, and training changes them: they are no variables of the script."""

    def __init__(self, space: Any, names: Set[str], kind: type) -> None:
        super().__init__(space, names)
        self._own = _set_by(kind)

    def read(self) -> dict[Any, Any]:
        names = self._names or ()
        return {name: value for name, value in self._space.items() if name in names and name not in self._own}

    def things(self) -> Sequence[Any]:
        return [part for item in self.read().items() for part in item]


class _Contents(_Holder):
    """All that a list or a dict contains, in its order."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def read(self) -> dict[Any, Any]:
        return {"": tuple(self.container.items() if isinstance(self.container, dict) else self.container)}

    def things(self) -> Sequence[Any]:
        if isinstance(self.container, dict):
            return *self.container, *self.container.values()
        return tuple(self.container)

    def write(self, name: Any, value: Any) -> None:
        if isinstance(self.container, dict):
            self.container.clear()
            self.container.update(value)
        else:
            self.container[:] = value


class _Hooks(_Holder):
    """On a parameter's gradient."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def read(self) -> dict[Any, Any]:
        return {"": tuple((self._parameter._backward_hooks or _NOTHING).items())}

    def things(self) -> Sequence[Any]:
        hooks = self._parameter._backward_hooks
        return (*hooks, *hooks.values()) if hooks else ()

    def write(self, name: Any, value: Any) -> None:
        hooks = self._parameter._backward_hooks
        if hooks is not None:
            hooks.clear()
            hooks.update(value)


class _Cell(_Holder):
    """A variable that a function has taken along."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def read(self) -> dict[Any, Any]:
        with suppress(ValueError):  # not bound
            return {"": self._cell.cell_contents}
        return {}

    def write(self, name: Any, value: Any) -> None:
        if value is _GONE:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = value


@dataclass(frozen=True)
class _Values:
    """The count of a tensor's changes, and its values if it is small."""

    version: int
    copy: torch.Tensor | None


class _Elements(_Holder):
    """The values of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def gone(self) -> bool:
        return self._tensor() is None

    def read(self) -> dict[Any, Any]:
        tensor = self._tensor()
        if tensor is None:
            return {}
        small = tensor.numel() <= _SMALL
        return {"": _Values(-1 if small else tensor._version, tensor.detach().clone() if small else None)}

    def things(self) -> None:
        return None

    def write(self, name: Any, value: Any) -> None:
        tensor = self._tensor()
        if tensor is None or value is _GONE:
            return
        if value.copy is None:
            raise UnsupportedError(
                f"the script has written to a tensor of the model or the data, of shape {tuple(tensor.shape)}, "
                "while the last iteration could still be undone. Put another one in its place, call engine.settle() "
                'before the change, or set "step": "barrier"')
        with torch.no_grad():
            tensor.copy_(value.copy)


def _all_alike(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(map(operator.is_, one.values(), other.values())) or all(map(_alike, one.values(), other.values()))


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _Values):
        return one.version == other.version and (one.copy is None or torch.equal(one.copy, other.copy))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return isinstance(one, _PLAIN) and (one == other or (one != one and other != other))


# ---- where they are


def _holders(things: Sequence[Any], names: set[str]) -> list[_Holder]:
    """Variables of ``things`` and of all that they lead to. Names in the code of functions are added to ``names``."""
    found: list[_Holder] = []
    seen: dict[int, Any] = {}  # the things themselves too, or others may get their ids
    left: list[tuple[Any, int]] = [(thing, 0) for thing in reversed(things)]
    while left and len(seen) < _MOST:
        thing, depth = left.pop()
        if id(thing) in seen or thing is None or isinstance(thing, (*_PLAIN, _Values)):
            continue
        seen[id(thing)] = thing
        inside = 1 if isinstance(thing, nn.Module) else depth + 1  # models may be deeper than that
        if depth < _DEPTH:
            with suppress(Exception):  # whatever a user's objects do when they are looked at
                left += [(part, inside) for part in list(_look_at(thing, found, names))]
    return found


def _look_at(thing: Any, found: list[_Holder], names: set[str]) -> Iterator[Any]:
    """Notes what ``thing`` holds; gives what is to be looked at besides."""
    if isinstance(thing, nn.Module):
        if type(thing).__module__.startswith("megatron_recycle."):
            found.append(_OfEngine(vars(thing), names, type(thing)))
            yield from found[-1].read().values()
            return
        found += [_Named(vars(thing)), _Contents(thing._buffers)]
        found += [_Hooks(parameter) for parameter in thing._parameters.values() if parameter is not None]
        yield from (*vars(thing).values(), *thing._modules.values(), *thing._buffers.values(), type(thing))
    elif isinstance(thing, torch.Tensor):
        if not isinstance(thing, nn.Parameter) and thing.is_leaf and not thing.requires_grad:
            found.append(_Elements(thing))
    elif isinstance(thing, (list, dict)):
        if len(thing) <= _LONGEST:
            found.append(_Contents(thing))
            yield from thing.values() if isinstance(thing, dict) else thing
    elif isinstance(thing, (tuple, set, frozenset)):
        if len(thing) <= _LONGEST:
            yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, CellType):
        found.append(_Cell(thing))
        with suppress(ValueError):
            yield thing.cell_contents
    elif isinstance(thing, FunctionType):
        yield from _look_at_function(thing, found, names)
    elif isinstance(thing, type):
        for kind in thing.__mro__:
            if not _is_librarys(kind.__module__):
                found.append(_Named(vars(kind), names, kind))
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
            found.append(_Named(vars(thing)))
        else:
            found.append(_Named(vars(thing), names))
        yield from vars(thing).values()
        yield type(thing)


def _look_at_function(function: FunctionType, found: list[_Holder], names: set[str]) -> Iterator[Any]:
    if _is_librarys(function.__module__):
        return
    own = set(_names(function.__code__))
    names |= own
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    found.append(_Named(function.__globals__, own))
    yield from (function.__globals__[name] for name in own if name in function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@functools.cache
def _set_by(kind: type) -> Set[str]:
    """Names of the attributes that the methods of ``kind`` set, of whatever object."""
    codes = [part.__code__ for each in kind.__mro__ for part in vars(each).values() if isinstance(part, FunctionType)]
    found = set()
    while codes:
        code = codes.pop()
        found |= {item.argval for item in dis.get_instructions(code) if item.opname == "STORE_ATTR"}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


def _is_librarys(module: str | None) -> bool:
    name = module or ""
    return name.partition(".")[0] in _LIBRARIES or name.startswith(("megatron.core", "megatron.training"))
