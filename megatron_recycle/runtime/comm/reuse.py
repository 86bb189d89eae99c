"""Communicators that outlive their generation.

Whether it ended at a boundary, as agreed, or by a failure: those of its communicators whose members all go on, and on
which nothing is half-done, need not be made again. (NCCL 2.27 and later can leave members out of one: after a death
that failed on a GPU, and torch 2.11 offers it for nothing else, see docs/gpu.md.) All members of the next generation
meet before they build; each says there which communicators it has, and what it has begun on each (:mod:`.ledger`). All
know what all have said, and so do the same, whatever happens meanwhile: a member that has aborted one, or has another
of that name, does not say that it has it. In doubt it is made again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.abort import STUCK, abort, end_process, ended, retire
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.ledger import agree
from megatron_recycle.runtime.comm.threads import Task, Threads

Words = Sequence[Collection[str]]
"""What the members that a communicator is to have, have said, by rank."""
_KEEPS = "keeps"


def goes_on(identity: str, had: Sequence[str], names: Sequence[str], words: Words) -> bool:
    """Whether the communicator ``identity`` of the members ``had`` goes on as one of ``names``, who have said ``words``
    (by rank): the same for all who ask."""
    if list(names) != list(had):
        return False
    start = f"{_KEEPS}:{identity}:"
    begun = [next((word.removeprefix(start) for word in said if word.startswith(start)), None) for said in words]
    known = [text for text in begun if text is not None]
    return len(known) == len(begun) and agree(known)


class ReusableGroups:
    """Communicators of older generations that nobody waits in, for whoever builds the next one; one at a time.

    Args:
        comms: those that may go on.
        threads: those that abort and tear down.
        rests: whether nothing is under way on them: their generation ended at a boundary.
        aborting: threads that abort others of their generations.
        stuck: called where an abort hangs; ends the process.
    """

    def __init__(self, comms: Collection[Comm], threads: Threads, rests: bool = False,
                 aborting: Sequence[Task] = (), stuck: Callable[[str], None] = end_process) -> None:
        self._lock = threading.Lock()
        self._comms = {comm.name: comm for comm in comms if comm.identity}
        self._threads, self._rests = threads, rests
        self._aborting, self._stuck = aborting, stuck
        self._turn: BuildAttempt | None = None

    def said(self) -> Iterator[str]:
        """What this process says to the other members of the next generation."""
        for comm in self._comms.values():
            if (begun := comm.ledger.begun(comm.size, self._rests)) is not None:
                yield f"{_KEEPS}:{comm.identity}:{begun}"

    def turn(self) -> BuildAttempt:
        """The turn of whoever builds the next generation; that of the one before is over."""
        with self._lock:
            self._turn = BuildAttempt()
            return self._turn

    def clear(self, turn: BuildAttempt, of: str, wanted: Mapping[str, Sequence[str]],
              heard: Callable[[str], Words]) -> None:
        """Abort all that do not go on as one of ``wanted`` (members by name), where an abort takes long, and wait for
        the end of that and of aborts begun before.

        An abort waits for all that is under way on the device, and keeps others waiting: so it comes before anything
        is made or computed. ``heard``: of the members of a name. Raises GenerationOver where the turn is over.
        """
        gone = [had for name, had in [*self._comms.items()] if not had.backend.quick and (
            name not in wanted or not goes_on(had.identity, had.names, wanted[name], heard(name)))]
        with self._lock:
            self._check(turn, of)
            for had in gone:
                del self._comms[had.name]
        self._aborting = [*self._aborting, *self._end(gone)]
        if not ended(self._aborting):
            self._stuck(STUCK)

    def take(self, turn: BuildAttempt, name: str, of: str, names: Sequence[str],
             heard: Callable[[], Words]) -> Comm | None:
        """The communicator ``name`` for the members ``names``; ``of``: whose it is now. None: it has to be made.

        All members come here in the same order. Raises GenerationOver, also where the turn is over.
        """
        had = self._comms.get(name)
        if had is None:
            return None
        kept = goes_on(had.identity, had.names, names, heard())
        with self._lock:
            self._check(turn, of)
            if kept:
                turn.kept[name] = had
        return had.again(of) if kept else None

    def used(self, turn: BuildAttempt) -> None:
        """The generation of ``turn`` stands: what it has not taken is torn down."""
        with self._lock:
            for name in turn.kept:
                self._comms.pop(name, None)
        self.retire()

    def missed(self, turn: BuildAttempt) -> None:
        """The generation of ``turn`` has not come about: what it has left may be used by the next one."""
        with self._lock:
            if turn is self._turn:
                self._turn = None

    def retire(self) -> None:
        """Nobody needs any of them any more."""
        with self._lock:
            gone, self._comms = list(self._comms.values()), {}
        self._end(gone)

    def _check(self, turn: BuildAttempt, of: str) -> None:
        if turn is not self._turn:
            raise GenerationOver(f"{of}: a newer generation has what there was of older ones")

    def _end(self, gone: Sequence[Comm]) -> list[Task]:
        aborting = abort(gone, self._threads)
        retire(gone, self._threads, aborting)
        return aborting


class BuildAttempt:
    """One try to build a generation.

    Attributes:
        kept: what it goes on with, by name.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Comm] = {}
