"""Options of lent layers: their settings beside parameters and buffers, which copies of the layers get too.

A newly built layer follows its configuration and the script's variables at that time. So its copies get the options
that the layer had when the job began, and the script's changes since (a dropout's probability, a mode). Leftovers of a
forward (a table that is computed once) they compute themselves.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.comm import Comm

PLAIN = (bool, int, float, str, type(None))
_OF_ALL = vars(nn.Module()).keys() - {"training"}
"""Attributes that every module has: its parameters, hooks and the like, which are checked elsewhere."""
_HANDLES = (torch.distributed.ProcessGroup, Comm)
"""Groups of tensor-parallel layers, which differ by generation; backends put them in, in copies too."""
_LONGEST = 1000  # elements of a container that is searched

Key = tuple[int, str, str]
"""Number of a layer, name of a module in it, name of the attribute."""


class Options:
    """Watches the attributes of layers, from now on.

    Numbers and texts, and lists, tuples and dicts of them, are sent to copies. Of others, tensors and functions for
    instance, only a replacement or a write by the script is noticed: then the layer cannot be copied any more.

    Args:
        layers: gives them by their numbers, as they are now.
    """

    def __init__(self, layers: Callable[[], Mapping[int, nn.Module]]) -> None:
        self._layers = layers
        self._seen = self._now()
        # Texts may differ from worker to worker: the name of a device, for instance.
        self._set: dict[Key, Any] = {
            key: state for key, state in self._seen.items() if _is_sendable(state, texts=False)}
        self._unsendable: set[Key] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block in which layers are run, and may change themselves."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """An attempt begins: all differences since the end of the last one are the script's changes."""
        now = self._now()
        for key in self._seen.keys() | now.keys():
            if key not in self._seen or key not in now or not _same(self._seen[key], now[key]):
                if key in now and _is_sendable(now[key]):
                    self._set[key] = now[key]
                    self._unsendable.discard(key)
                else:
                    self._unsendable.add(key)

    def end(self) -> None:
        """An attempt has ended, in which layers may have changed themselves."""
        self._seen = self._now()

    def told(self, first: int, end: int) -> bytes:
        """The options of layers ``first`` up to ``end``, as bytes. Raises UnsupportedError if the script has changed
        one that cannot be sent."""
        unsendable = sorted(key for key in self._unsendable if first <= key[0] < end)
        if unsendable:
            number, module, name = unsendable[0]
            raise UnsupportedError(f"the script has changed {f'{module}.{name}' if module else name} of layer {number} "
                                   "since the job began, which a neighbour that runs this layer is not told: only "
                                   "numbers, texts, and lists, tuples and dicts of them are. Make it a buffer, set it "
                                   "before the job begins, or set lend to off")
        options = [[*key, state] for key, state in sorted(self._set.items(), key=lambda item: item[0])
                   if first <= key[0] < end]
        return zlib.compress(json.dumps(options).encode())

    def _now(self) -> dict[Key, Any]:
        return {(number, name, key): _state(value) for number, layer in self._layers().items()
                for name, module in layer.named_modules() for key, value in vars(module).items()
                if key not in _OF_ALL and not (isinstance(value, torch.Tensor) and value.grad_fn is not None)
                and not isinstance(value, _HANDLES)}


def put(options: bytes, layers: Mapping[int, nn.Module], before: bytes = b"") -> None:
    """Set in copies the `told` options of the layers of these numbers, except those already in ``before``."""
    known = {(*key,): state for *key, state in json.loads(zlib.decompress(before))} if before else {}
    for number, name, key, state in json.loads(zlib.decompress(options)):
        if (number, name, key) not in known or not _same(known[number, name, key], state):
            setattr(layers[number].get_submodule(name), key, _value(state))


class _Other:
    """A value that cannot be sent to copies, and its number of writes."""

    def __init__(self, value: Any) -> None:
        try:
            self._value: Callable[[], Any] = weakref.ref(value)  # do not keep it alive
        except TypeError:
            self._value = lambda: value
        self._version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Other) and self._version == other._version and (
            (own := self._value()) is not None and own is other._value())

    __hash__ = None  # type: ignore[assignment]


def _state(value: Any) -> Any:
    """``value`` as it is now, in a form that JSON takes, with `_Other` where there is none."""
    if isinstance(value, PLAIN) and not isinstance(value, Enum):
        return value
    if type(value) in (list, tuple) and len(value) <= _LONGEST:
        return [type(value).__name__, *map(_state, value)]
    if type(value) is dict and len(value) <= _LONGEST:
        return ["dict", *([_state(key), _state(each)] for key, each in value.items())]
    return _Other(value)


def _value(state: Any) -> Any:
    if not isinstance(state, list):
        return state
    kind, *items = state
    if kind == "dict":
        return {_value(key): _value(each) for key, each in items}
    return tuple(map(_value, items)) if kind == "tuple" else list(map(_value, items))


def _is_sendable(state: Any, texts: bool = True) -> bool:
    if isinstance(state, list):
        kind, *items = state
        return all(_is_sendable(item, texts) for pair in items for item in (pair if kind == "dict" else [pair]))
    return not isinstance(state, _Other) and (texts or not isinstance(state, str))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other or (isinstance(one, float) and one != one and other != other))
