"""The end of communicators: freeing all threads that wait in them, and tearing them down."""

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
"""Seconds for the abort of a library that may hang in it."""
STUCK = (f"the communication library has not aborted a communicator within {_LONGEST_ABORT:.0f} s, and may never do: "
         "this process ends; `recycle run --worker-restarts` starts it again")
_LONGEST_LEAVE = 2.0
"""Seconds within which a thread that waits in a communicator has left it, if it is not stuck somewhere else."""
_STATUS = 1
"""Exit status of a process with a thread that an abort has not freed."""
_LONGEST_RETIRE = 5.0
"""Seconds that the end of the process waits for communicators to be torn down."""


def foreign(group: dist.ProcessGroup) -> Comm:
    """A group that other code has made and uses, to be aborted or torn down here."""
    return Comm(group, backend_of(group), FRAMEWORK)


def end_process(text: str) -> None:
    """End this process: it has a thread that cannot be freed in any other way."""
    get_logger().critical("megatron-recycle: %s", text)
    logging.shutdown()
    os._exit(_STATUS)


def abort(comms: Sequence[Comm], threads: Threads) -> list[Task]:
    """Free all threads that wait in ``comms``, from any thread; none of their results counts from now on.

    Libraries with a quick abort come first and are done on return. Each communicator of the others gets a thread of
    ``threads``, since one may hang because of another; these are returned.
    """
    for comm in comms:
        comm.void()
    for comm in comms:
        if comm.backend.quick:
            comm.abort()
    return [threads.start("recycle-abort", comm.abort, _LONGEST_ABORT) for comm in comms if not comm.backend.quick]


def retire(comms: Sequence[Comm], threads: Threads, aborting: Sequence[Task] = ()) -> None:
    """Tear ``comms`` down in a thread of ``threads``, once ``aborting`` have ended. In the background, since it takes
    gloo up to a second and is not urgent."""
    def destroy() -> None:
        if not ended(aborting):
            get_logger().warning("megatron-recycle: an abort takes more than %d s; what was connected stays so until "
                                 "this process ends", _LONGEST_ABORT)
            return
        for comm in comms:
            comm.destroy()

    threads.start("recycle-retire", destroy, _LONGEST_RETIRE)


def ended(aborting: Sequence[Task]) -> bool:
    """Whether all of ``aborting`` end within the time limit of an abort, counted from now."""
    limit = time.monotonic() + _LONGEST_ABORT
    for thread in aborting:
        thread.join(max(0.0, limit - time.monotonic()))
    return not any(thread.is_alive() for thread in aborting)


class Teardown:
    """The end of one owner's communicators: aborted once, by the first thread that asks, then torn down.

    Args:
        threads: run the aborts and teardowns.
        stuck: called if an abort hangs while threads have to be freed; ends the process.

    Attributes:
        rests: whether no thread waits that would have to be freed: `abort` does nothing.
        spared: the communicators that were left, and not aborted.
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
        """As `abort`, unless that is done; waits for a thread that is aborting. A thread in a communicator whose abort
        exceeds its limit is never freed: the process ends then, so that peers need not find that out and it can be
        restarted.

        Communicators in ``spare()`` are left instead, since another generation may go on with them. They are aborted,
        too, if nothing has settled (`park`, `retire`) two seconds later: a thread may be stuck in one of them, or wait
        for the device, in a place that it cannot leave.
        """
        if self.rests or not self._abort(comms, spare):
            return
        if self._aborting:
            self.threads.start("recycle-abort-watch", self._watch, _LONGEST_ABORT)
        if self.spared and not self._settled.is_set():
            self.threads.start("recycle-leave-watch", self._watch_spared, _LONGEST_LEAVE + _LONGEST_ABORT)

    def park(self, comms: Sequence[Comm],
             spare: Callable[[], Collection[Comm]]) -> tuple[Collection[Comm], Sequence[Task]]:
        """Communicators that may go on, with no thread in them; and threads that abort the others before teardown."""
        if self.rests:
            return comms, ()
        self._abort(comms, spare)
        kept, aborting = self._settle(keep=True)
        retire([comm for comm in comms if comm not in kept], self.threads, aborting)
        return kept, aborting

    def retire(self, comms: Sequence[Comm]) -> None:
        """As `retire`, after `abort`."""
        self._abort(comms)
        retire(comms, self.threads, self._settle(keep=False)[1])

    def _abort(self, comms: Sequence[Comm], spare: Callable[[], Collection[Comm]] = tuple) -> bool:
        """Whether this call has aborted, and not an earlier one."""
        with self._lock:
            if self._aborting is not None:
                return False
            for comm in comms:
                comm.void()
            self.spared = spare()
            for comm in self.spared:
                comm.leave()
            self._aborting = abort([comm for comm in comms if comm not in self.spared], self.threads)
            return True

    def _settle(self, keep: bool) -> tuple[Collection[Comm], Sequence[Task]]:
        """The communicators spared until now, to ``keep`` or to abort, and all aborts. In one step, so that whichever
        thread comes second knows what the first has begun to abort."""
        self._settled.set()
        with self._lock:
            spared, self.spared = self.spared, ()
            if not keep:
                self._aborting = [*(self._aborting or ()), *abort([*spared], self.threads)]
            return spared, self._aborting or ()

    def _watch_spared(self) -> None:
        if not self._settled.wait(_LONGEST_LEAVE):
            self._settle(keep=False)
            self._watch()

    def _watch(self) -> None:
        if not ended(self._aborting or ()):
            self._stuck(STUCK)
