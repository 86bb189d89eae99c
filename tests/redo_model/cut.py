"""A stage whose optimizer state is cut into shards, as one process on paper has it: a number for each shard instead of
masters and moments, and one for the part of the parameters that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_recycle.membership.shards import ShardTable
from tests.redo_model import values


class Cut:
    """The shards of a process, and its stage's parameters.

    Args:
        stage: its own.
        count: of the stage's shards.
        held: those that this process has.

    Attributes:
        pieces: parameters as they are here, by shard.
        state: the shards that this process has.
        gathered: the iteration after which `pieces` are those of all shards; None: nobody knows.
        owed: shards that are to be copied: (shard, giver, taker).
        had: by shard who has it until then; None: the generation's table says so.
    """

    def __init__(self, stage: int, count: int, held: Iterable[int]) -> None:
        self.pieces = [values.piece(stage, shard) for shard in range(count)]
        self.state = {shard: self.pieces[shard] for shard in held}
        self.gathered: int | None = -1
        self.owed: Sequence[tuple[int, str, str]] = ()
        self.had: Sequence[Sequence[str]] | None = None
        self._saved: Mapping[int, int] = {}

    @property
    def whole(self) -> int:
        """The stage's parameters."""
        return values.of(*self.pieces)

    def keep_only(self, held: Iterable[int]) -> None:
        """Let go of what was given away."""
        own = set(held)
        self.state = {shard: value for shard, value in self.state.items() if shard in own}

    def save(self) -> None:
        self._saved = dict(self.state)

    def undo(self) -> None:
        """What others have stepped comes from them."""
        self.state.update(self._saved)
        self._follow(self._saved)
        self.gathered = None

    def step(self, slices: Mapping[int, int], coefficient: float) -> None:
        """Raises KeyError where a slice of the gradient is not here."""
        for shard, value in self.state.items():
            self.state[shard] = values.stepped(value, slices[shard], coefficient)
        self._follow(self.state)
        self.gathered = None

    def _follow(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self.pieces[shard] = self.state[shard]

    def owe(self, table: ShardTable) -> None:
        self.owed = tuple(table.moves)
        self.had = table.had if self.owed else None

    def told(self, holds: int, copies: int) -> dict[str, Any]:
        """For a report."""
        return {"shards": {"of": len(self.pieces), "copies": copies,
                           "held": {str(shard): holds for shard in self.state}}}
