"""Pre-emption: SIGTERM asks a worker to leave its job."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

from megatron_recycle.control import Agent

_SAME_SIGNAL = 2.0
"""Seconds within which another SIGTERM counts as the same one."""


def leave_on_sigterm(agent: Agent) -> None:
    """SIGTERM (a pre-emption, a spot notice) makes this worker leave the job at the next boundary.

    A second one, or one when this process has no work (the job is over or has not begun, or it waits to come in), ends
    the process at once. Within two seconds it is the same one: Slurm signals every process, and the launcher passes its
    own on. If the script has a handler of its own, now or later, SIGTERM calls that and does nothing else. For workers
    of `recycle run` only: another launcher ends the siblings of a worker that has left.
    """
    def do_nothing(number: int, frame: object) -> None:
        """Does nothing: a thread does the work. The training thread may wait in the communication library for long,
        and a handler runs only between two steps of the interpreter."""

    def handled() -> bool:
        found = signal.getsignal(signal.SIGTERM)
        return found is not do_nothing and callable(found)

    agent.handles_sigterm = handled
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:  # the script's own
        signal.set_wakeup_fd(before)
        return

    def listen() -> None:
        asked: float | None = None
        while number := os.read(reading, 1):
            if number[0] == signal.SIGTERM and not handled():
                if asked is not None and time.monotonic() - asked < _SAME_SIGNAL and agent.ended is None:
                    continue
                asked = time.monotonic()
                if agent.leaving or agent.ended is not None or agent.generation == 0 or agent.outside:
                    ctypes.CDLL(None).signal(signal.SIGTERM, 0)  # the default; Python's own is for the main thread
                    os.kill(os.getpid(), signal.SIGTERM)
                agent.leave()

    def leave_to_default() -> None:
        """A forked child (a data loader) dies of SIGTERM as ever, and its signals are not ours."""
        signal.set_wakeup_fd(-1)
        if not handled():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, do_nothing)
    os.register_at_fork(after_in_child=leave_to_default)
    threading.Thread(target=listen, name="recycle-signals", daemon=True).start()
