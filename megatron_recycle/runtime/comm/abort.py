"""The end of communicators: freeing whoever waits in them, and tearing them down."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.backend import backend_of
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import FRAMEWORK
from megatron_recycle.runtime.comm.threads import Threads

_LONGEST_ABORT = 10.0
"""Seconds that a library which may hang in an abort gets for it."""
_LONGEST_RETIRE = 5.0
"""Seconds that the end of the process waits for communicators to be torn down."""


def foreign(group: dist.ProcessGroup) -> Comm:
    """A group that somebody else has made and uses, to be aborted or torn down here."""
    return Comm(group, backend_of(group), FRAMEWORK)


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
        limit = time.monotonic() + _LONGEST_ABORT
        for thread in aborting:
            thread.join(max(0.0, limit - time.monotonic()))
        if any(thread.is_alive() for thread in aborting):
            get_logger().warning("megatron-recycle: an abort takes more than %d s; what was connected stays so until "
                                 "this process ends", _LONGEST_ABORT)
            return
        for comm in comms:
            comm.backend.destroy(comm.group)

    threads.start("recycle-retire", destroy, _LONGEST_RETIRE)


class Ending:
    """The end of the communicators of one owner: aborted once, by whichever thread comes first, then torn down.

    Attributes:
        threads: those that abort and tear down.
    """

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self._lock = threading.Lock()
        self._aborting: list[threading.Thread] | None = None

    def abort(self, comms: Sequence[Comm]) -> None:
        """As `abort`, unless that is done; waits for a thread that is about it."""
        with self._lock:
            if self._aborting is None:
                self._aborting = abort(comms, self.threads)

    def retire(self, comms: Sequence[Comm]) -> None:
        """As `retire`, after `abort`."""
        self.abort(comms)
        retire(comms, self.threads, self._aborting or ())
