"""Communicators that outlive their generation.

A generation that ends at a boundary, as agreed, has nothing under way. Those of its communicators whose members all go
on need not be made again, which takes NCCL seconds for each; nor, where the library can leave members out of one
(NCCL 2.27 and later), those that only lose some. A member that has aborted one, or has another of that name, does not
say that it has it; all members know what all have said, and so do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_recycle.runtime.comm.comm import Comm

Said = Callable[[str], bool]
"""Whether all members that a communicator is to have, have said this."""


class Rested:
    """Communicators of an older generation on which nothing is under way.

    Args:
        comms: all of them; those that have been aborted do not count.

    Attributes:
        used: those that have another generation now.
    """

    def __init__(self, comms: Sequence[Comm]) -> None:
        self.used: list[Comm] = []
        self._had = {comm.name: comm for comm in comms if comm.identity and not comm.aborted}

    def said(self) -> Iterator[str]:
        """What this process says to the other members of the next generation: one word for each that it has, and
        for each that it can leave members out of."""
        for comm in self._had.values():
            yield _keeps(comm)
            if comm.backend.shrinks(comm.group):
                yield _shrinks(comm)

    def take(self, name: str, of: str, names: Sequence[str], said: Said) -> Comm | None:
        """The communicator ``name`` for the members ``names``; ``of``: whose it is now. None: it has to be made.

        All members come here in the same order. Raises GenerationOver.
        """
        had = self._had.get(name)
        if had is None or not set(names) <= set(had.names):
            return None
        if len(names) == len(had.names):
            if not said(_keeps(had)):
                return None
            had.of = of
            self.used.append(had)
            return had
        return had.without(set(had.names) - set(names), of) if said(_shrinks(had)) else None


def _keeps(comm: Comm) -> str:
    return f"keeps:{comm.identity}"


def _shrinks(comm: Comm) -> str:
    return f"shrinks:{comm.identity}"
