"""What the script has set in layers that are lent: copies of them get it too.

A layer that is built anew is as it was when the job began. What a forward leaves in it (a table that is computed once)
its copies make for themselves; what the script sets (a dropout's probability, a mode) they have to be told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import nn

_PLAIN = (bool, int, float, str, type(None))

Plain = bool | int | float | str | None
Key = tuple[int, str, str]
"""Number of a layer, name of a module in it, name of the attribute."""


class Options:
    """Watches plain attributes (numbers, texts) of ``layers``, given by their numbers, from now on."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._seen = self._now()
        self._set: dict[Key, Plain] = {}

    def begin(self) -> None:
        """An attempt begins: what is different since the last one has ended the script has set."""
        for key, value in self._now().items():
            if key not in self._seen or not _same(self._seen[key], value):
                self._set[key] = value

    def end(self) -> None:
        """An attempt has ended, in which layers may have changed themselves."""
        self._seen = self._now()

    def told(self, first: int, end: int) -> bytes:
        """What the script has set in the layers of these numbers."""
        return json.dumps([[*key, value] for key, value in sorted(self._set.items()) if first <= key[0] < end]).encode()

    def _now(self) -> dict[Key, Plain]:
        return {(number, name, key): value for number, layer in self._layers.items()
                for name, module in layer.named_modules() for key, value in vars(module).items()
                if not key.startswith("_") and isinstance(value, _PLAIN)}


def put(told: bytes, layers: Mapping[int, nn.Module]) -> None:
    """Set in copies what was `told` of the layers of these numbers."""
    for number, name, key, value in json.loads(told):
        setattr(layers[number].get_submodule(name), key, value)


def _same(one: Plain, other: Plain) -> bool:
    return type(one) is type(other) and (one == other or one != one)
