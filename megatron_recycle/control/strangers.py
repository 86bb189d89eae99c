"""Strangers: connections that have not said hello yet. When there are too many, one of them has to go.

A process with the token says hello within milliseconds; a stranger stays until its time is over. So the oldest
connection has to go, of the address that has most of them: neither one address nor many can keep out a process with the
token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Guest = TypeVar("Guest", bound=Hashable)


class Strangers(Generic[Guest]):
    """The waiting ones, in order of arrival.

    Args:
        room: how many may wait at a time.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._waiting: dict[Guest, str] = {}
        self._from: dict[str, dict[Guest, None]] = {}
        self._sizes: Counter[int] = Counter()
        """Addresses by how many wait from them. With thousands of them nobody wants to count each time."""

    def __len__(self) -> int:
        return len(self._waiting)

    def came(self, guest: Guest, source: str) -> Guest | None:
        """One more waits; returns who has to go for it, if the room is full."""
        self._waiting[guest] = source
        self._from.setdefault(source, {})[guest] = None
        self._resized(len(self._from[source]) - 1, len(self._from[source]))
        if len(self._waiting) <= self._room:
            return None
        most = max(self._sizes)
        oldest = next(one for one, source in self._waiting.items() if len(self._from[source]) == most)
        self.gone(oldest)
        return oldest

    def gone(self, guest: Guest) -> None:
        """It has said hello, or has left."""
        source = self._waiting.pop(guest, None)
        if source is not None:
            del self._from[source][guest]
            self._resized(len(self._from[source]) + 1, len(self._from[source]))
            if not self._from[source]:
                del self._from[source]

    def _resized(self, before: int, now: int) -> None:
        self._sizes[now] += 1
        self._sizes[before] -= 1
        for size in (before, now):
            if size == 0 or not self._sizes[size]:
                del self._sizes[size]
