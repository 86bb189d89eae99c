"""Slows a process by stopping and continuing it many times a second, so that all its work takes longer."""

from __future__ import annotations

import os
import signal
import threading

from megatron_recycle.tools.chaos.job import ChaosError, TargetJob

_RUNS = 0.002
"""Seconds that the process runs between two stops: shorter than an action of any real model."""


class Pacer:
    """Makes `worker` take `factor` times as long, until `end`. The worker always runs again afterwards.

    Raises ChaosError if the process is not a live worker of the job.
    """

    def __init__(self, job: TargetJob, worker: str, factor: float) -> None:
        with job.held(worker) as descriptor:
            self._process = os.dup(descriptor)
        self._stopped = _RUNS * (factor - 1.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"slow {worker}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.wait(_RUNS):
                signal.pidfd_send_signal(self._process, signal.SIGSTOP)
                self._over.wait(self._stopped)
                signal.pidfd_send_signal(self._process, signal.SIGCONT)
        except ProcessLookupError:
            return  # it has ended

    def end(self) -> None:
        """Let the process run at its own pace."""
        self._over.set()
        self._thread.join()
        try:
            signal.pidfd_send_signal(self._process, signal.SIGCONT)
        except ProcessLookupError as error:
            raise ChaosError("the slowed worker has ended") from error
        finally:
            os.close(self._process)
