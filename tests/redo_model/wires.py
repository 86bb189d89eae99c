"""Messages between the workers of one generation, and sums over several of them, as the scheduler sees them."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable
from typing import Any

Tag = Hashable


class Together:
    """Something that several processes make together: complete once each has given its part. Who hears of that when is
    chance."""

    __slots__ = ("given", "members")

    def __init__(self, members: Collection[str]) -> None:
        self.members = frozenset(members)
        self.given: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        return len(self.given) == len(self.members)


class Wires:
    """The process groups of one epoch."""

    def __init__(self, members: Collection[str]) -> None:
        self.members = tuple(members)
        self.under_way: list[tuple[str, str, Tag, Any]] = []
        """Sender, receiver, tag and content of each message."""
        self._there: dict[tuple[str, Tag], Any] = {}
        self._together: dict[Tag, Together] = {}

    def send(self, sender: str, receiver: str, tag: Tag, content: Any) -> None:
        self.under_way.append((sender, receiver, tag, content))

    def deliver(self, draw: random.Random) -> None:
        """One message comes."""
        _, receiver, tag, content = self.under_way.pop(draw.randrange(len(self.under_way)))
        self._there[receiver, tag] = content

    def came(self, receiver: str, tag: Tag) -> bool:
        return (receiver, tag) in self._there

    def take(self, receiver: str, tag: Tag) -> Any:
        return self._there.pop((receiver, tag))

    def read(self, receiver: str, tag: Tag) -> Any:
        """Take it, and leave it there."""
        return self._there[receiver, tag]

    def together(self, tag: Tag, members: Collection[str] | None = None) -> Together:
        found = self._together.get(tag)
        if found is None:
            found = self._together[tag] = Together(self.members if members is None else members)
        return found

    def lose(self, name: str, draw: random.Random) -> None:
        """A process is dead: each of its messages that is under way is lost or not, and so is its part of what is made
        together."""
        self.under_way = [each for each in self.under_way if each[0] != name or draw.random() < 0.3]
        for each in self._together.values():
            if not each.complete and name in each.given and draw.random() < 0.5:
                del each.given[name]
