"""The modules and parameters of a model, walked again only after a change.

They are needed in several places before every iteration, and walking a tree in Python takes longer than the look-ups.
So the modules' contents are kept in one flat list, and compared with the present ones: a few microseconds.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Parts:
    """The parts of a model, in torch's order, each once.

    Attributes:
        modules: the model itself first.
        parameters: by name.
    """

    modules: tuple[nn.Module, ...]
    parameters: Mapping[str, nn.Parameter]


class ModuleTree:
    """A model whose parts may be removed, added and replaced.

    Neither the model's own `named_parameters()` nor its `named_modules()` is called: a backend may watch those.

    Args:
        model: the stage.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parts = self._walk()

    @property
    def parts(self) -> Parts:
        """The present parts: the same object for as long as none has been replaced."""
        names, objects = self._held
        names_now, objects_now = _held_by(self._parts.modules)
        if names_now != names or not all(map(operator.is_, objects_now, objects)):
            self._parts = self._walk()
        return self._parts

    def _walk(self) -> Parts:
        modules = list(_modules_in(self._model, "", set()))
        self._held = _held_by([module for _, module in modules])
        parameters: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for prefix, module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameters[_joined(prefix, name)] = parameter
        return Parts(tuple(module for _, module in modules), parameters)


def _held_by(modules: Sequence[nn.Module]) -> tuple[list[str], list[Any]]:
    """All names in ``modules``, and the objects that they name."""
    spaces = [space for module in modules for space in (module._parameters, module._modules)]
    return list(chain.from_iterable(spaces)), list(chain.from_iterable(map(dict.values, spaces)))


def _modules_in(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    for key, part in module._modules.items():
        if part is not None:
            yield from _modules_in(part, _joined(name, key), seen)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
