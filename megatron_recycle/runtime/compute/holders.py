"""What holds variables of a script: functions' closures, attributes, lists and dicts, hooks, tensors.

Each kind of holder reads and writes its variables by name. Whether it is still as it was is told by the identity of the
objects in it, which is quick, or by a comparison of their values.
"""

from __future__ import annotations

import dis
import functools
import operator
import weakref
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError

PLAIN = (bool, int, float, complex, str, bytes)
GONE = object()
"""The value of a variable that is not there."""
_SMALL = 4096  # elements of a tensor whose values are kept
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules"}  # otherwise watched, or looked into by who finds them
_NOTHING: dict[Any, Any] = {}


class Holder:
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
class Kept:
    """The content of a holder."""

    holder: Holder
    values: dict[Any, Any]
    things: Sequence[Any] | None = None

    @classmethod
    def of(cls, holder: Holder) -> Kept:
        things = holder.things()
        if things is not None:  # nor is what a forward has left, with all behind it, to be kept
            things = [GONE if isinstance(thing, torch.Tensor) and thing.grad_fn is not None else thing
                      for thing in things]
        return cls(holder, holder.read(), things)

    def stands(self) -> bool:
        """Whether that is in it still; if not, it may be all the same."""
        if self.things is None:
            return False
        now = self.holder.things()
        return now is not None and len(now) == len(self.things) and all(map(operator.is_, now, self.things))


class Named(Holder):
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
            return [space.get(name, GONE) for name in names]
        return [part for item in space.items() if item[0] in names for part in item]

    def write(self, name: Any, value: Any) -> None:
        if self._kind is not None:
            delattr(self._kind, name) if value is GONE else setattr(self._kind, name, value)
        elif value is GONE:
            self._space.pop(name, None)
        else:
            self._space[name] = value


class OfEngine(Named):
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


class Contents(Holder):
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


class Hooks(Holder):
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


class Cell(Holder):
    """A variable that a function has taken along."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def read(self) -> dict[Any, Any]:
        with suppress(ValueError):  # not bound
            return {"": self._cell.cell_contents}
        return {}

    def write(self, name: Any, value: Any) -> None:
        if value is GONE:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = value


@dataclass(frozen=True)
class Values:
    """The count of a tensor's changes, and its values if it is small."""

    version: int
    copy: torch.Tensor | None


class Elements(Holder):
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
        return {"": Values(-1 if small else tensor._version, tensor.detach().clone() if small else None)}

    def things(self) -> None:
        return None

    def write(self, name: Any, value: Any) -> None:
        tensor = self._tensor()
        if tensor is None or value is GONE:
            return
        if value.copy is None:
            raise UnsupportedError(
                f"the script has written to a tensor of the model or the data, of shape {tuple(tensor.shape)}, "
                "while the last iteration could still be undone. Put another one in its place, call engine.settle() "
                'before the change, or set "step": "barrier"')
        with torch.no_grad():
            tensor.copy_(value.copy)


def all_alike(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(map(operator.is_, one.values(), other.values())) or all(map(alike, one.values(), other.values()))


def alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Values):
        return one.version == other.version and (one.copy is None or torch.equal(one.copy, other.copy))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return isinstance(one, PLAIN) and (one == other or (one != one and other != other))


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
