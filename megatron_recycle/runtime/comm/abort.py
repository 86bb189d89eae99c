"""The end of communicators: freeing whoever waits in them, and tearing them down."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch.distributed as dist

from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.backend import backend_of
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import FRAMEWORK
from megatron_recycle.runtime.comm.threads import Task, Threads

_LONGEST_ABORT = 10.0
"""Seconds that a library which may hang in an abort gets for it."""
STUCK = (f"the communication library has not aborted a communicator within {_LONGEST_ABORT:.0f} s, and may never do: "
         "this process ends; `recycle run --max-restarts` starts it again")
_LONGEST_LEAVE = 2.0
"""Seconds within which whoever waits in a communicator has left it, if it is not stuck somewhere else."""
_STATUS = 1
"""Exit status of a process that an abort has not freed."""
_LONGEST_RETIRE = 5.0
"""Seconds that the end of the process waits for communicators to be torn down."""


def foreign(group: dist.ProcessGroup) -> Comm:
    """A group that somebody else has made and uses, to be aborted or torn down here."""
    return Comm(group, backend_of(group), FRAMEWORK)


def end_process(text: str) -> None:
    """End this process, in which a thread cannot be freed: what it hangs in, nothing else gets it out of."""
    get_logger().critical("megatron-recycle: %s", text)
    logging.shutdown()
    os._exit(_STATUS)


def abort(comms: Sequence[Comm], threads: Threads) -> list[Task]:
    """Free whoever waits in ``comms``, from any thread; no result of theirs counts from the moment this is called.

    Libraries that are quick about it come first and are done on return. Each communicator of the others gets a thread
    of ``threads``, since one may hang on another's account; these are returned.
    """
    for comm in comms:
        comm.aborted = True
    for comm in comms:
        if comm.backend.quick:
            comm.abort()
    return [threads.start("recycle-abort", comm.abort, _LONGEST_ABORT) for comm in comms if not comm.backend.quick]


def retire(comms: Sequence[Comm], threads: Threads, aborting: Sequence[Task] = ()) -> None:
    """Tear ``comms`` down in a thread of ``threads``, once ``aborting`` have ended: it takes gloo up to a second, and
    nobody needs it done."""
    def destroy() -> None:
        if not ended(aborting):
            get_logger().warning("megatron-recycle: an abort takes more than %d s; what was connected stays so until "
                                 "this process ends", _LONGEST_ABORT)
            return
        for comm in comms:
            comm.destroy()

    threads.start("recycle-retire", destroy, _LONGEST_RETIRE)


def ended(aborting: Sequence[Task]) -> bool:
    """Whether these have ended within the time that an abort may take, counted from now."""
    limit = time.monotonic() + _LONGEST_ABORT
    for thread in aborting:
        thread.join(max(0.0, limit - time.monotonic()))
    return not any(thread.is_alive() for thread in aborting)


class Ending:
    """The end of the communicators of one owner: aborted once, by whichever thread comes first, then torn down.

    Args:
        threads: those that abort and tear down.
        stuck: called where an abort hangs that somebody has to be freed by; ends the process.

    Attributes:
        rests: whether nobody waits who would have to be freed: `abort` does nothing.
        spared: those that were left, and not aborted.
    """

    def __init__(self, threads: Threads, stuck: Callable[[str], None] = end_process) -> None:
        self.threads = threads
        self.rests = False
        self.spared: Collection[Comm] = ()
        self._stuck = stuck
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._aborting: list[Task] | None = None

    def abort(self, comms: Sequence[Comm], spare: Callable[[], Collection[Comm]] = tuple) -> None:
        """As `abort`, unless that is done; waits for a thread that is about it. Whoever waits in a communicator whose
        abort takes longer than it may is never freed: the process ends then, so that the others need not find that out,
        and may be started again.

        Those that ``spare()`` names are left instead, since another generation may go on with them. They are aborted,
        too, if nobody has settled (`park`, `retire`) two seconds later: somebody may be stuck in one of them, or wait
        for the device, in a place that nobody can leave.
        """
        if self.rests or not self._abort(comms, spare):
            return
        if self._aborting:
            self.threads.start("recycle-abort-watch", self._watch, _LONGEST_ABORT)
        if self.spared and not self._settled.is_set():
            self.threads.start("recycle-leave-watch", self._watch_spared, _LONGEST_LEAVE + _LONGEST_ABORT)

    def park(self, comms: Sequence[Comm],
             spare: Callable[[], Collection[Comm]]) -> tuple[Collection[Comm], Sequence[Task]]:
        """Those that may go on: nobody waits in them; and the threads that abort others, which are torn down then."""
        if self.rests:
            return comms, ()
        self._abort(comms, spare)
        kept, aborting = self._settle(), self._aborting or ()
        retire([comm for comm in comms if comm not in kept], self.threads, aborting)
        return kept, aborting

    def retire(self, comms: Sequence[Comm]) -> None:
        """As `retire`, after `abort`."""
        self._abort(comms)
        aborting = [*(self._aborting or ()), *abort([*self._settle()], self.threads)]
        retire(comms, self.threads, aborting)

    def _abort(self, comms: Sequence[Comm], spare: Callable[[], Collection[Comm]] = tuple) -> bool:
        """Whether it was done here, and not before."""
        with self._lock:
            if self._aborting is not None:
                return False
            for comm in comms:
                comm.aborted = True
            self.spared = spare()
            for comm in self.spared:
                comm.leave()
            self._aborting = abort([comm for comm in comms if comm not in self.spared], self.threads)
            return True

    def _settle(self) -> Collection[Comm]:
        """Nobody waits any more; those that have been spared until now."""
        self._settled.set()
        with self._lock:
            spared, self.spared = self.spared, ()
        return spared

    def _watch_spared(self) -> None:
        if not self._settled.wait(_LONGEST_LEAVE):
            self._aborting = [*(self._aborting or ()), *abort([*self._settle()], self.threads)]
            self._watch()

    def _watch(self) -> None:
        if not ended(self._aborting or ()):
            self._stuck(STUCK)
