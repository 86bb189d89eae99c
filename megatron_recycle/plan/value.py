"""Values that travel as JSON: each is declared once as a type, from which reading, checking and writing follow."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

Read = TypeVar("Read", bound="Value")


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
        return msgspec.convert(data, cls, str_keys=True)


def _plain(value: Any) -> Any:
    """Subclasses of text and number types, such as torch's version, as `json` writes them."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r:.60} is no value of JSON")
