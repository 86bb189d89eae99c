"""Parameter groups that follow layers to other stages: an optimizer's, or those for an optimizer yet to be made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_MEMBERS, _NAMES = "params", "param_names"
_PLAIN = (bool, int, float, str, type(None))


class Groups:
    """The groups that a script gives to `deepspeed.initialize()`; the script's own lists are changed in place.

    Attributes:
        model_parameters: for the engine; None if an optimizer has them.
    """

    def __init__(self, optimizer: Any, model_parameters: Any) -> None:
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        if isinstance(model_parameters, dict):
            model_parameters = [model_parameters]
        elif model_parameters is not None and not isinstance(model_parameters, list):
            model_parameters = list(model_parameters)  # a generator can be read only once
        self.model_parameters = model_parameters if self._optimizer is None else None
        self._groups: list[dict[str, Any]] | None = None
        if self._optimizer is not None:
            self._groups = self._optimizer.param_groups
        elif model_parameters is not None:
            self._groups = model_parameters if model_parameters and isinstance(model_parameters[0], dict) else [
                {_MEMBERS: model_parameters}]

    @property
    def given(self) -> bool:
        """Whether the script has given any; otherwise the engine takes all parameters."""
        return self._groups is not None

    @property
    def trouble(self) -> str:
        """The reason why they cannot follow; empty: they can."""
        if self._optimizer is None:
            return ""
        kind = type(self._optimizer).__name__
        if self._optimizer.state:
            return (f"the optimizer ({kind}) has stepped, or been loaded, before deepspeed.initialize(): what it keeps "
                    "would stay on the wrong stage. Give it without state, and load through engine.load_checkpoint()")
        lists = [group[_MEMBERS] for group in self._optimizer.param_groups]
        held = [name for name, value in vars(self._optimizer).items() if name not in ("param_groups", "state")
                and _holds(value, lists)]
        return (f"the optimizer ({kind}) keeps parameters in its {', '.join(held)} as well, which do not follow: give "
                "a callable that makes it of the parameters that it is called with") if held else ""

    @property
    def settings(self) -> list[list[str]]:
        """Each group's settings beside its parameters: these must be equal on all stages."""
        return [[f"{key}={_word(value)}" for key, value in sorted(group.items()) if key not in (_MEMBERS, _NAMES)]
                for group in self._groups or ()]

    @property
    def places(self) -> dict[int, tuple[int, str | None]]:
        """Number of the group, and the name in it, of each parameter, by id."""
        return {id(one): (number, name) for number, group in enumerate(self._groups or ())
                for one, name in _members(group)}

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """The parameters of each group, in their order."""
        return [[one for one, _ in _members(group)] for group in self._groups or ()]

    def follow(self, gone: Collection[int], arrived: Sequence[tuple[nn.Parameter, int | None, str | None]],
               order: Sequence[nn.Parameter]) -> None:
        """Remove the parameters ``gone`` (ids), and add those of ``arrived`` with their groups' numbers and names. The
        model's parameters come in its ``order``, followed by the groups' other ones."""
        places = {id(one): place for place, one in enumerate(order)}
        out = {*gone, *(id(one) for one, _, _ in arrived)}
        for number, group in enumerate(self._groups or ()):
            found = {id(one): (one, name) for one, name in _members(group) if id(one) not in out}
            found |= {id(one): (one, name) for one, into, name in arrived if into == number}
            _put_members(group, sorted(found.values(), key=lambda member: places.get(id(member[0]), len(places))))


def _members(group: Mapping[str, Any]) -> list[tuple[nn.Parameter, str | None]]:
    given = group[_MEMBERS]
    if isinstance(given, torch.Tensor):
        return [(given, None)]
    if not isinstance(given, list):
        given = list(given)
        assert isinstance(group, dict)
        group[_MEMBERS] = given
    if _NAMES in group:
        return list(zip(given, group[_NAMES], strict=True))
    return [(one[1], one[0]) if isinstance(one, tuple) else (one, None) for one in given]


def _put_members(group: dict[str, Any], members: Sequence[tuple[nn.Parameter, str | None]]) -> None:
    if _NAMES in group:
        group[_NAMES][:] = [name for _, name in members]
        group[_MEMBERS][:] = [one for one, _ in members]
        return
    new = [one if name is None else (name, one) for one, name in members]
    if isinstance(group[_MEMBERS], list):
        group[_MEMBERS][:] = new  # lists that the script holds stay right
    else:
        group[_MEMBERS] = new


def _holds(value: Any, known: Sequence[Any], deep: int = 2) -> bool:
    """Whether ``value`` contains parameters, outside of the groups' own lists."""
    if any(value is one for one in known):
        return False
    if isinstance(value, nn.Parameter):
        return True
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, set)) else ()
    return deep > 0 and any(_holds(one, known, deep - 1) for one in inner)


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_word, value))})"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
