"""End of a host's part of a job: by the coordinator's word, by a signal, or because no coordinator leads it any more.

In every case workers first have time to end by themselves, then get SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from msgspec.structs import replace

from megatron_recycle.launch.processes import Processes, Say
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.membership.protocol import End, Interrupt

_ASKS = (signal.SIGTERM, signal.SIGHUP)
"""The signals that ask the job to leave; systemd and a terminal that goes away send both, or one of them twice."""
_SAME_SIGNAL = 2.0
"""Seconds in which another one is the same: Slurm sends it to every process, srun and scripts pass it on."""


class Ending:
    """The end of the job on this host.

    Args:
        tell: gets messages for the coordinator.

    Attributes:
        end: the coordinator's word, once it is there.
        told: messages already sent to the coordinator, and sent again after a reconnect.
        interrupted: whether a signal has asked for the end.
        begun: whether training has begun, so that workers hear of the end from the coordinator.
        time_to_leave: seconds that the job has to save and end after a request to go; None: it goes at once.
    """

    def __init__(self, processes: Processes, restarts: Restarts, say: Say, tell: Callable[[Interrupt], None]) -> None:
        self.end: End | None = None
        self.told: tuple[Interrupt, ...] = ()
        self.interrupted = False
        self.begun = False
        self.time_to_leave: float | None = None
        self._processes = processes
        self._restarts = restarts
        self._say = say
        self._tell = tell
        self._asked = 0.0
        self._passed_on = self._handled = False
        self._kill_at: tuple[float, int] | None = None

    @property
    def over(self) -> bool:
        """Whether the job has ended or is asked to."""
        return self.end is not None or self.interrupted

    @property
    def saves(self) -> bool:
        """Whether the job still has to save after a request to go."""
        return (self.end is None and self.interrupted and not self._processes.job.joining
                and self.time_to_leave is not None)

    def finish(self, message: End) -> None:
        """Take the coordinator's word on how the job ended."""
        if self.end is not None:
            return
        self.end = message
        self._restarts.cancel()
        grace = self._processes.job.grace
        well = not message.status or message.finished  # scripts that have ended may take their time
        self._deadline(grace.well if well else grace.failed, signal.SIGTERM)
        soon = time.monotonic() + grace.terminated
        for worker in self._processes.workers.values():
            if worker.kill_at is not None and not message.status:  # it is about to end, with a status of its own
                worker.kill_at = min(worker.kill_at, soon)
            elif worker.out is not None:  # it may be stopped for good; no worker waits for it
                worker.child.signal(signal.SIGKILL)

    def give_up(self, message: str) -> None:
        """End without a coordinator, which can no longer reach the workers either."""
        self.finish(End(1, message))
        self._deadline(0.0, signal.SIGTERM)

    def interrupt(self, number: int, moment: float | None = None) -> None:
        """The first signal asks the workers to end, and with them the job, unless these have only joined it; the second
        kills at once."""
        moment = time.monotonic() if moment is None else moment
        if self.interrupted and number in _ASKS and moment - self._asked < _SAME_SIGNAL:
            return
        if self.interrupted:
            self._processes.signal_all(signal.SIGKILL)
            return
        self.interrupted, self._asked = True, moment
        self._restarts.cancel()
        name, grace = signal.Signals(number).name, self._processes.job.grace
        if self._processes.job.joining:
            self._say(f"{name}: the workers of this host leave the job; a second one ends them at once")
            self._pass_on()
            self._deadline(grace.well, signal.SIGKILL)
        elif number in _ASKS and self._handled:
            return  # another host was asked to end, too
        elif number in _ASKS and self.time_to_leave is not None:
            self._say(f"{name}: the job saves what is committed (on_leave) and ends, within "
                      f"{self.time_to_leave:.0f} s (leave_timeout); a second one ends it at once")
            self._tell_signal(number)
            self._deadline(self.time_to_leave + grace.terminated, signal.SIGTERM)
        else:
            self._say(f"{name}: ending all workers")
            self._tell_signal(number)
            if number in _ASKS and self.begun:
                # The coordinator knows whether scripts handle it. They could end before it has heard of the signal, as
                # if they had come to their end.
                self._deadline(grace.terminated, signal.SIGTERM)
            else:
                self._pass_on()
                self._deadline(grace.terminated, signal.SIGKILL)

    def terminate(self, seconds: float) -> None:
        """Pass a SIGTERM to the job on to the scripts, which handle it themselves and have so long. Idempotent."""
        if self.end is not None or self._handled:
            return
        self._handled = True
        self.told = tuple(replace(message, handled=True) for message in self.told)
        self._restarts.cancel()
        self._say(f"the script handles SIGTERM itself: it has {seconds:.0f} s to end; a second one ends it at once")
        if not self._passed_on:
            self._pass_on()
        self._kill_at = (time.monotonic() + seconds + self._processes.job.grace.terminated, signal.SIGKILL)

    def _tell_signal(self, number: int) -> None:
        self.told = (Interrupt(128 + number, f"interrupted by {signal.Signals(number).name}"),)
        self._tell(self.told[0])

    def _pass_on(self) -> None:
        self._passed_on = True
        self._processes.signal_all(signal.SIGTERM)

    def check_deadline(self) -> None:
        """End overdue workers: by a signal first, then by force."""
        if self._kill_at is None or time.monotonic() < self._kill_at[0]:
            return
        number, self._kill_at = self._kill_at[1], None
        if live := [str(worker.rank) for worker in self._processes.live()]:
            name = signal.Signals(number).name
            self._say(f"rank {', '.join(live)} still running after the end of the job: {name}")
            self._passed_on |= number == signal.SIGTERM
            self._processes.signal_all(number)
            self._deadline(self._processes.job.grace.terminated, signal.SIGKILL)

    def _deadline(self, seconds: float, number: int) -> None:
        moment = time.monotonic() + seconds
        if self._kill_at is None or moment < self._kill_at[0] or number == signal.SIGKILL:
            self._kill_at = (moment, number)
