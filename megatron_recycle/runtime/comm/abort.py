"""The end of communicators: freeing whoever waits in them, and tearing them down."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.backend import backend_of
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import FRAMEWORK
from megatron_recycle.runtime.comm.threads import Threads

_LONGEST_ABORT = 10.0
"""Seconds that a library which may hang in an abort gets for it."""
_STUCK = 1
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
    os._exit(_STUCK)


def abort(comms: Sequence[Comm], threads: Threads) -> list[threading.Thread]:
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


def retire(comms: Sequence[Comm], threads: Threads, aborting: Sequence[threading.Thread] = ()) -> None:
    """Tear ``comms`` down in a thread of ``threads``, once ``aborting`` have ended: it takes gloo up to a second, and
    nobody needs it done."""
    def destroy() -> None:
        if not _ended(aborting):
            get_logger().warning("megatron-recycle: an abort takes more than %d s; what was connected stays so until "
                                 "this process ends", _LONGEST_ABORT)
            return
        for comm in comms:
            comm.backend.destroy(comm.group)

    threads.start("recycle-retire", destroy, _LONGEST_RETIRE)


class Ending:
    """The end of the communicators of one owner: aborted once, by whichever thread comes first, then torn down.

    Args:
        threads: those that abort and tear down.
        stuck: called where an abort hangs that somebody has to be freed by; ends the process.

    Attributes:
        rests: whether nobody waits who would have to be freed: `abort` does nothing.
    """

    def __init__(self, threads: Threads, stuck: Callable[[str], None] = end_process) -> None:
        self.threads = threads
        self.rests = False
        self._stuck = stuck
        self._lock = threading.Lock()
        self._aborting: list[threading.Thread] | None = None

    def abort(self, comms: Sequence[Comm]) -> None:
        """As `abort`, unless that is done; waits for a thread that is about it. Whoever waits in a communicator whose
        abort takes longer than it may is never freed: the process ends then, so that the others need not find that out,
        and may be started again."""
        if not self.rests and self._abort(comms):
            self.threads.start("recycle-abort-watch", self._watch, _LONGEST_ABORT)

    def retire(self, comms: Sequence[Comm]) -> None:
        """As `retire`, after `abort`."""
        self._abort(comms)
        retire(comms, self.threads, self._aborting or ())

    def _abort(self, comms: Sequence[Comm]) -> bool:
        """Whether aborts are under way that were begun here."""
        with self._lock:
            if self._aborting is not None:
                return False
            self._aborting = abort(comms, self.threads)
            return bool(self._aborting)

    def _watch(self) -> None:
        if not _ended(self._aborting or ()):
            self._stuck(f"the communication library has not aborted a communicator within {_LONGEST_ABORT:.0f} s, and "
                        "may never do: this process ends; `recycle run --max-restarts` starts it again")


def _ended(aborting: Sequence[threading.Thread]) -> bool:
    """Whether these have ended within the time that an abort may take, counted from now."""
    limit = time.monotonic() + _LONGEST_ABORT
    for thread in aborting:
        thread.join(max(0.0, limit - time.monotonic()))
    return not any(thread.is_alive() for thread in aborting)
