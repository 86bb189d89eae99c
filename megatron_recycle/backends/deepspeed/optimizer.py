"""State of optimizers and learning-rate schedules outside of `state` and `param_groups`.

A step that is undone and repeated must find everything unchanged. Attributes of plain data are copied and restored, as
state is. Changes in other objects, or by hooks, cannot be undone: with staggered steps they are refused at the first
steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizers

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.edits import copied, same

_TORCH = ("state", "param_groups", "defaults")
"""Attributes of every optimizer that are restored elsewhere, or do not change."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_DEPTH = 5
"""The depth of a look into nested attributes and items."""
_REMEDY = ('with "step": "staggered" a step may be undone and made again, which would do that twice. Set '
           '"recycle": {"step": "barrier"}')


def own_data(holder: Any) -> dict[str, Any]:
    """The attributes of ``holder`` (an optimizer or a schedule) that are plain data, without torch's own, and an
    optimizer's state that belongs to no parameter."""
    found = {name: value for name, value in _attributes(holder) if _is_plain(value)}
    loose = _loose(holder)
    return {"attributes": found, "loose": loose} if loose else {"attributes": found}


def put_back(holder: Any, data: Mapping[str, Any]) -> None:
    """Restore the result of `own_data` in ``holder``."""
    attributes = data["attributes"]
    for name, value in list(_attributes(holder)):
        if _is_plain(value) and name not in attributes:
            delattr(holder, name)
    for name, value in attributes.items():
        if not same(getattr(holder, name, None), value):
            setattr(holder, name, copied(value))
    loose = data.get("loose", {})
    for key in set(_loose(holder)) - set(loose):
        del holder.state[key]
    if loose:
        holder.state.update(copied(loose))


def schedule_data(schedule: Any) -> Any:
    """The state of a learning-rate schedule: its own state dict, or its attributes if it has none."""
    if schedule is None:
        return None
    return schedule.state_dict() if _keeps_itself(schedule) else own_data(schedule)


def set_schedule(schedule: Any, data: Any) -> None:
    """Restore the result of `schedule_data`."""
    if schedule is None:
        return
    if _keeps_itself(schedule):
        schedule.load_state_dict(data)
    else:
        put_back(schedule, data)


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises UnsupportedError, with names, if ``optimizer`` has step hooks."""
    hooks = [hook for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
             for hook in getattr(optimizer, kind, {}).values()]
    hooks += [*torch_optimizers._global_optimizer_pre_hooks.values(),
              *torch_optimizers._global_optimizer_post_hooks.values()]
    if hooks:
        names = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
        raise UnsupportedError(f"the optimizer has step hooks ({names}): {_REMEDY}")


class FirstSteps:
    """Checks that the first few steps change nothing that cannot be restored.

    Args:
        holders: optimizer and schedule, by their names in messages.

    ``known``: objects that are restored, or are no part of them: tensors by `data_ptr`, others by `id`.
    """

    def __init__(self, holders: Mapping[str, Any]) -> None:
        self._holders = holders
        self._left = 3
        self._before: dict[str, Any] = {}

    @property
    def over(self) -> bool:
        """Whether these steps are done."""
        return not self._left

    def before(self, known: Collection[int]) -> None:
        """Call it before a step."""
        self._before = self._traces(known)

    def after(self, known: Collection[int]) -> None:
        """Call it after a step. Raises UnsupportedError naming the attributes that it changed."""
        self._left -= 1
        now = self._traces(known)
        changed = sorted(name for name in now if name in self._before and now[name] != self._before[name])
        if changed:
            raise UnsupportedError(f"a step changes {', '.join(changed)}, which cannot be put back: {_REMEDY}")

    def _traces(self, known: Collection[int]) -> dict[str, Any]:
        return {f"{title}.{name}": _trace(value, known, _DEPTH) for title, holder in self._holders.items()
                if not _keeps_itself(holder) or isinstance(holder, torch.optim.Optimizer)
                for name, value in _attributes(holder) if not _is_plain(value)}


def _keeps_itself(schedule: Any) -> bool:
    return hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")


def _attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(holder, "__dict__", {}).items():
        if name not in _TORCH and not name.startswith("_optimizer_"):
            yield name, value


def _loose(holder: Any) -> dict[Any, Any]:
    if not isinstance(holder, torch.optim.Optimizer):
        return {}
    return {key: value for key, value in holder.state.items() if not isinstance(key, torch.Tensor)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return isinstance(value, (list, tuple, set, frozenset)) and all(map(_is_plain, value))


def _trace(value: Any, known: Collection[int], depth: int) -> Any:
    """A fingerprint of ``value``, ``depth`` levels deep, that differs once ``value`` has changed."""
    if isinstance(value, torch.Tensor):
        return None if value.data_ptr() in known else (tuple(value.shape), value.detach().double().sum().item())
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    if depth == 0 or id(value) in known or isinstance(value, type) or inspect.isroutine(value):
        return None
    if isinstance(value, Mapping):
        return [(_trace(key, known, depth - 1), _trace(item, known, depth - 1)) for key, item in list(value.items())]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_trace(item, known, depth - 1) for item in value]
    if isinstance(value, nn.Module):
        return [_trace(tensor, known, depth - 1) for tensor in (*value.parameters(), *value.buffers())]
    return [(name, _trace(item, known, depth - 1)) for name, item in vars(value).items()] if hasattr(
        value, "__dict__") else None
