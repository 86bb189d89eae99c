"""A persistent mapping: updates return a new one, at a cost far below that of a copy. For states that follow thousands
of workers message by message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

_BUCKETS = 64

Value = TypeVar("Value")


class Table(Mapping[str, Value]):
    """As a dict with str keys; `put` returns another table, which shares all but one bucket with this one."""

    __slots__ = ("_buckets", "_size")

    def __init__(self, items: Mapping[str, Value] | None = None) -> None:
        buckets: list[dict[str, Value]] = [{} for _ in range(_BUCKETS)]
        for key, value in (items or {}).items():
            buckets[hash(key) % _BUCKETS][key] = value
        self._buckets = buckets
        self._size = len(items or {})

    def put(self, key: str, value: Value) -> Table[Value]:
        """This table with ``value`` under ``key``."""
        made: Table[Value] = Table.__new__(Table)
        index = hash(key) % _BUCKETS
        before = self._buckets[index]
        made._buckets = [*self._buckets]
        made._buckets[index] = {**before, key: value}
        made._size = self._size + (key not in before)
        return made

    def __getitem__(self, key: str) -> Value:
        return self._buckets[hash(key) % _BUCKETS][key]

    def __iter__(self) -> Iterator[str]:
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Table({dict(self)!r})"


def put(items: Mapping[str, Value], key: str, value: Value) -> Table[Value]:
    """``items`` with ``value`` under ``key``."""
    return (items if isinstance(items, Table) else Table(items)).put(key, value)
