"""Values that travel as JSON: each is declared once as a type, from which reading, checking and writing follow."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Annotated, Any, TypeVar

import msgspec

from .errors import PlanError

Kind = TypeVar("Kind")
Read = TypeVar("Read", bound="Value")
Count = Annotated[int, msgspec.Meta(ge=0)]

_learnt: set[Any] = set()
_learning = threading.Lock()
os.register_at_fork(before=_learning.acquire, after_in_parent=_learning.release, after_in_child=_learning.release)


class Value(msgspec.Struct, frozen=True):
    """A frozen record whose JSON form has its fields by name; mapping keys are strings there."""

    def to_json(self) -> dict[str, Any]:
        """The value as plain JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self, str_keys=True, enc_hook=_plain)
        return found

    @classmethod
    def from_json(cls: type[Read], data: Any) -> Read:
        """Read `to_json`'s output, of this version or an earlier one. Raises ValueError, which names the wrong field.
        Undeclared fields are dropped, unless the type forbids them."""
        found: Read = read_as(cls, data)
        return found


def read_as(kind: Any, data: Any, strict: bool = True) -> Any:
    """Decoded JSON as a value of any type; without `strict`, numbers may be text. Raises ValueError."""
    if kind not in _learnt:
        _learn(kind)
    return msgspec.convert(data, kind, strict=strict, str_keys=True)


def read(kind: type[Kind], value: Any, what: str) -> Kind:
    """Part of a plan file as a value. Raises PlanError, which names ``what`` and the wrong field in it."""
    try:
        found: Kind = read_as(kind, value)
    except msgspec.ValidationError as error:
        raise PlanError(f"{what}: {error}") from None
    return found


def _learn(kind: Any) -> None:
    """The library notes a type's fields when it first reads one, without a lock. A second thread that read the type
    meanwhile, or a process forked meanwhile, would crash on half of them: threads and forks wait for the first."""
    with _learning:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(None, kind, str_keys=True)
        _learnt.add(kind)


def _plain(value: Any) -> Any:
    """Subclasses of text and number types, such as torch's version, as `json` writes them."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r:.60} is no value of JSON")
