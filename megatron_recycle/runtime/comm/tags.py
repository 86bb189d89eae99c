"""Tags: the transfer numbers that each purpose may use on each communicator.

A transfer is identified by its two ends and a number, its tag. Communicators are shared by parts of the program that do
not know of each other: each purpose takes a range of numbers of its own from this table, one after the other, so that
no two purposes can collide. In a library without tags (NCCL) only the order identifies a transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ABORT = 2**31 - 1
"""A tag of every communicator that no transfer ever uses. gloo closes a connection on which a receive with it times
out."""


@dataclass(frozen=True)
class Tags:
    """The tags of one purpose on a communicator.

    Args:
        what: name of the transfers, for messages.
        first: the lowest tag.
        count: the number of tags.
        again: whether tags are reused after ``count`` transfers, because the first ones have long ended by then.
    """

    what: str
    first: int
    count: int
    again: bool

    def __getitem__(self, number: int) -> int:
        """The tag of transfer ``number`` (from 0). Raises OverflowError if it is out of range."""
        if not 0 <= number < self.count and not self.again:
            raise OverflowError(f"{self.what} have {self.count} tags, and number {number} was to be used")
        return self.first + number % self.count

    def __contains__(self, tag: int) -> bool:
        return self.first <= tag < self.first + self.count


class Table:
    """The purposes of one kind of communicator."""

    def __init__(self) -> None:
        self._taken: list[Tags] = []

    def __iter__(self) -> Iterator[Tags]:
        return iter(self._taken)

    def take(self, what: str, count: int, *, again: bool = False) -> Tags:
        """The next ``count`` tags, for this purpose alone. Raises OverflowError when not enough are left."""
        first = self._taken[-1].first + self._taken[-1].count if self._taken else 0
        if first + count > ABORT:
            raise OverflowError(f"no {count} tags are left for {what}")
        self._taken.append(Tags(what, first, count, again))
        return self._taken[-1]

    def what(self, tag: int) -> str:
        """The purpose of a transfer with ``tag``."""
        return next((tags.what for tags in self._taken if tag in tags), f"what nobody has taken tag {tag} for")


FRAMEWORK = Table()
"""Tags of communicators for a framework's collectives, and for a worker's parts."""
LEVELS = FRAMEWORK.take("how far a worker's part has come", 1)

WORLD = Table()
"""Tags of `Groups.world`."""
ACTIVATIONS = WORLD.take("activations or gradients", 2**30, again=True)
"""By the running number of a message on its channel, which is one direction between two workers."""
TIES = WORLD.take("a tied parameter's gradient", 2**20)
"""Two for each tied parameter."""
LENT_COPIES = WORLD.take("copies of lent layers", 2**20)
LENT_SUMS = WORLD.take("the sum of lent layers' gradients", 2**28)
"""Both by the loan's place among the plan's."""
FIRST_IN_WORLD = WORLD.take("the first transfer of two workers", 1)

CONTROL = Table()
"""Tags of `Groups.control`."""
LOSSES = CONTROL.take("the loss", 2**30, again=True)
"""By iteration and attempt."""
COMMITS = CONTROL.take("an iteration's commit", 2**29, again=True)
"""By iteration."""
DRAINS = CONTROL.take("how far a void iteration has come", 2**20, again=True)
"""By iteration."""

USED = CONTROL.take("that an iteration's messages are used", 2**24, again=True)
"""By iteration and attempt."""
HALTS = CONTROL.take("where a void iteration ends", 2**20, again=True)
"""By iteration."""
GUARD = CONTROL.take("a copy of a stage's state", 2**28)
"""The description (its size, and the text), the checksums, and the pieces."""

STAGE = Table()
"""Tags of `Groups.stage` and `Groups.stage_control`, which may be the same communicator."""
PIECES = STAGE.take("pieces of the gradient", 2**28)
"""By the piece's place in the logical order; `exact` only."""
SLICES = STAGE.take("a slice of the reduced gradient", 2**10)
"""By the chunk's place in its stage."""
HELD = STAGE.take("the reduced gradient of a peer", 2)
"""The gradient, and the numbers that belong to it."""
SHARD_SLICES = STAGE.take("a shard's slice of the reduced gradient", 2**20)
SHARD_TIES = STAGE.take("a shard's part of a tied parameter's gradient", 2**20)
SHARD_HELD = STAGE.take("a peer's slice of the reduced gradient", 2**20)
SHARD_PARAMETERS = STAGE.take("a shard's parameters", 2**20)
"""By the shard's number."""
SHARD_STATE = STAGE.take("a shard's state", 2**26)
STATE = STAGE.take("a stage's state", 2**28)
"""The description (its size, and the text), the checksums, and the pieces: a shard's for each move."""
FIRST_IN_STAGE = STAGE.take("the first transfer of two peers", 1)
