"""Communicators that outlive their generation.

Whether a generation ends at a boundary, as agreed, or by a failure: a communicator whose members all go on, and on
which nothing is half-done, need not be made again. (NCCL 2.27 and later can leave members out of one: after a death
that failed on a GPU, and torch 2.11 offers it for nothing else, see docs/gpu.md.) All members of the next generation
meet before they build; each announces its communicators, and the operations begun on each (:mod:`.ledger`). All know
all announcements and so decide alike, whatever happens meanwhile: a member that has aborted a communicator, or has
another of its name, does not announce it. In doubt it is made again.
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
"""Announcements of a communicator's future members, by rank."""
_KEEPS = "keeps"


def goes_on(identity: str, had: Sequence[str], names: Sequence[str], announcements: Words) -> bool:
    """Whether the communicator ``identity`` of the members ``had`` goes on with the members ``names``, whose
    ``announcements`` these are (by rank). The answer is the same on all members."""
    if list(names) != list(had):
        return False
    start = f"{_KEEPS}:{identity}:"
    begun = [next((item.removeprefix(start) for item in announced if item.startswith(start)), None)
             for announced in announcements]
    known = [text for text in begun if text is not None]
    return len(known) == len(begun) and agree(known)


class ReusableGroups:
    """Unused communicators of older generations, for the build of the next one; one build at a time.

    Args:
        comms: the communicators that may go on.
        threads: run the aborts and teardowns.
        rests: whether nothing is under way on them: their generation ended at a boundary.
        aborting: threads that abort others of their generations.
        stuck: called if an abort hangs; ends the process.
    """

    def __init__(self, comms: Collection[Comm], threads: Threads, rests: bool = False,
                 aborting: Sequence[Task] = (), stuck: Callable[[str], None] = end_process) -> None:
        self._lock = threading.Lock()
        self._comms = {comm.name: comm for comm in comms if comm.identity}
        self._threads, self._rests = threads, rests
        self._aborting, self._stuck = aborting, stuck
        self._turn: BuildAttempt | None = None

    def said(self) -> Iterator[str]:
        """This process's announcements to the other members of the next generation."""
        for comm in self._comms.values():
            if (begun := comm.ledger.begun(comm.size, self._rests)) is not None:
                yield f"{_KEEPS}:{comm.identity}:{begun}"

    def turn(self) -> BuildAttempt:
        """Begin a build attempt of the next generation; the one before is over."""
        with self._lock:
            self._turn = BuildAttempt()
            return self._turn

    def clear(self, turn: BuildAttempt, of: str, wanted: Mapping[str, Sequence[str]],
              announced: Callable[[str], Words]) -> None:
        """Abort all that do not go on as one of ``wanted`` (members by name), where aborts are slow, and wait for the
        end of these aborts and of earlier ones.

        An abort waits for all that is under way on the device, and keeps others waiting: so it comes first.
        ``announced``: announcements of a name's members. Raises GenerationOver if ``turn`` is over.
        """
        gone = [had for name, had in [*self._comms.items()] if not had.backend.quick and (
            name not in wanted or not goes_on(had.identity, had.names, wanted[name], announced(name)))]
        with self._lock:
            self._check(turn, of)
            for had in gone:
                del self._comms[had.name]
        self._aborting = [*self._aborting, *self._end(gone)]
        if not ended(self._aborting):
            self._stuck(STUCK)

    def take(self, turn: BuildAttempt, name: str, of: str, names: Sequence[str],
             announced: Callable[[], Words]) -> Comm | None:
        """The communicator ``name`` for the members ``names`` in generation ``of``. None: it has to be made.

        All members call this in the same order. Raises GenerationOver, also if ``turn`` is over.
        """
        had = self._comms.get(name)
        if had is None:
            return None
        kept = goes_on(had.identity, had.names, names, announced())
        with self._lock:
            self._check(turn, of)
            if kept:
                turn.kept[name] = had
        return had.again(of) if kept else None

    def used(self, turn: BuildAttempt) -> None:
        """The generation of ``turn`` is built: tear down the communicators that it has not taken."""
        with self._lock:
            for name in turn.kept:
                self._comms.pop(name, None)
        self.retire()

    def missed(self, turn: BuildAttempt) -> None:
        """The build of ``turn`` has failed: the next one may use the communicators that are left."""
        with self._lock:
            if turn is self._turn:
                self._turn = None

    def retire(self) -> None:
        """Tear down all communicators; none is needed any more."""
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
    """One attempt to build a generation.

    Attributes:
        kept: reused communicators, by name.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Comm] = {}
