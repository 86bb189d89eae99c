"""Communicators that outlive their generation.

Whether it ended at a boundary, as agreed, or by a failure: those of its communicators whose members all go on, and on
which nothing is half-done, need not be made again, which takes NCCL seconds for each; nor, where the library can leave
members out of one (NCCL 2.27 and later), those that only lose some. All members of the next generation meet before they
build; each says there which communicators it has, and what it has begun on each (:mod:`.ledger`). All know what all
have said, and so do the same, whatever happens meanwhile: a member that has aborted one, or has another of that name,
does not say that it has it. In doubt it is made again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.abort import abort, retire
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.ledger import agree
from megatron_recycle.runtime.comm.threads import Threads

Heard = Callable[[], Sequence[Collection[str]]]
"""What the members that a communicator is to have, have said, by rank."""
_KEEPS, _SHRINKS = "keeps", "shrinks"


class Fate(Enum):
    """The end of a communicator, or not."""

    KEPT = "kept"
    SHRUNK = "shrunk"
    MADE_AGAIN = "made again"


def fate(identity: str, had: Sequence[str], names: Sequence[str], words: Sequence[Collection[str]]) -> Fate:
    """What becomes of the communicator ``identity`` of the members ``had``, if ``names`` go on, who have said ``words``
    (by rank): the same for all who ask."""
    if not set(names) <= set(had):
        return Fate.MADE_AGAIN
    if len(names) < len(had):
        return Fate.SHRUNK if all(f"{_SHRINKS}:{identity}" in said for said in words) else Fate.MADE_AGAIN
    start = f"{_KEEPS}:{identity}:"
    begun = [next((word.removeprefix(start) for word in said if word.startswith(start)), None) for said in words]
    known = [text for text in begun if text is not None]
    return Fate.KEPT if len(known) == len(begun) and agree(known) else Fate.MADE_AGAIN


class Rested:
    """Communicators of older generations that nobody waits in, for whoever builds the next one; one at a time.

    Args:
        comms: those that may go on.
        threads: those that abort and tear down.
        rests: whether nothing is under way on them: their generation ended at a boundary.
    """

    def __init__(self, comms: Collection[Comm], threads: Threads, rests: bool = False) -> None:
        self._lock = threading.Lock()
        self._comms = {comm.name: comm for comm in comms if comm.identity}
        self._threads, self._rests = threads, rests
        self._turn: Turn | None = None

    def said(self) -> Iterator[str]:
        """What this process says to the other members of the next generation."""
        for comm in self._comms.values():
            if (begun := comm.ledger.begun(comm.size, self._rests)) is not None:
                yield f"{_KEEPS}:{comm.identity}:{begun}"
            if not comm.ledger.gone and comm.shrinks:
                yield f"{_SHRINKS}:{comm.identity}"

    def turn(self) -> Turn:
        """The turn of whoever builds the next generation; that of the one before is over."""
        with self._lock:
            self._turn = Turn()
            return self._turn

    def take(self, turn: Turn, name: str, of: str, names: Sequence[str], heard: Heard) -> Comm | None:
        """The communicator ``name`` for the members ``names``; ``of``: whose it is now. None: it has to be made.

        All members come here in the same order. Raises GenerationOver, also where the turn is over.
        """
        had = self._comms.get(name)
        if had is None:
            return None
        found = fate(had.identity, had.names, names, heard())
        # What is under way on it may keep the device from making another one.
        over = found is Fate.MADE_AGAIN and not had.backend.quick and not had.ledger.idle
        with self._lock:
            if turn is not self._turn:
                raise GenerationOver(f"{of}: a newer generation has what there was of older ones")
            if found is Fate.KEPT:
                turn.kept[name] = had
                return had.again(of)
            if found is Fate.SHRUNK or over:  # whatever becomes of it: nobody else may use this one from now on
                del self._comms[name]
            if found is Fate.SHRUNK:
                turn.over.append(had)
        if found is Fate.SHRUNK:
            return had.without(set(had.names) - set(names), of, ends=not self._rests)
        if over:
            for thread in self._end([had]):
                thread.join()
        return None

    def used(self, turn: Turn) -> None:
        """The generation of ``turn`` stands: what it has not taken is torn down."""
        with self._lock:
            for name in turn.kept:
                self._comms.pop(name, None)
        self.retire()
        retire(turn.over, self._threads, abort(turn.over, self._threads))

    def missed(self, turn: Turn) -> None:
        """The generation of ``turn`` has not come about: what it has left may be used by the next one."""
        with self._lock:
            if turn is self._turn:
                self._turn = None
        retire(turn.over, self._threads, abort(turn.over, self._threads))

    def retire(self) -> None:
        """Nobody needs any of them any more."""
        with self._lock:
            gone, self._comms = list(self._comms.values()), {}
        self._end(gone)

    def _end(self, gone: Sequence[Comm]) -> list[threading.Thread]:
        aborting = abort(gone, self._threads)
        retire(gone, self._threads, aborting)
        return aborting


class Turn:
    """One try to build a generation.

    Attributes:
        kept: what it goes on with, by name.
        over: what has been replaced by something smaller.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Comm] = {}
        self.over: list[Comm] = []
