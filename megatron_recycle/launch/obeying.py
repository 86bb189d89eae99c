"""The coordinator's commands, carried out by the launcher; see `membership.commands`. Each may come twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping

from megatron_recycle.control.wire import Message
from megatron_recycle.launch.processes import Processes, Say, WorkerProcess
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.launch.services import Services
from megatron_recycle.launch.shutdown import Ending
from megatron_recycle.launch.starting import Starting
from megatron_recycle.launch.worker_logs import Follower
from megatron_recycle.membership.failure_kinds import FailureKind


class Obeying:
    """Carries commands out, by the launcher's own parts."""

    def __init__(self, processes: Processes, restarts: Restarts, starting: Starting, ending: Ending,
                 services: Services, follower: Follower, say: Say) -> None:
        self._processes = processes
        self._restarts = restarts
        self._starting = starting
        self._ending = ending
        self._services = services
        self._follower = follower
        self._say = say

    def obey(self, command: Message) -> None:
        """Do it, if it is a command about this host; one that is unknown is none."""
        if (method := _METHODS.get(command["type"])) is not None:
            method(self, command)

    def _begun(self, command: Message) -> None:
        self._restarts.of_host = command["max_failures_per_host"]
        self._restarts.begun(0 if self._ending.over else command["max_restarts"], time.monotonic())
        self._ending.time_to_leave = command["leave_timeout"]

    def _start(self, command: Message) -> None:
        if self._processes.mine(command["beside"], command["pid"]) is not None and not self._ending.over:
            self._starting.begin_move(command["rank"], command["beside"], command["move"])

    def _drop(self, command: Message) -> None:
        self._starting.drop_move(command["rank"], command["move"])

    def _joined(self, command: Message) -> None:
        worker = self._processes.mine(command["rank"], command["pid"])
        if worker is not None and worker.lives:  # told again after the coordinator's return, it may have died since
            self._starting.joined(worker)

    def _speaks(self, command: Message) -> None:
        if (worker := self._processes.mine(command["rank"], command["pid"])) is not None:
            self._follower.speaks(worker.rank, command["offset"])

    def _terminate(self, command: Message) -> None:
        self._ending.terminate(command["seconds"])

    def _progress(self, command: Message) -> None:
        self._services.progress()

    def _out(self, command: Message) -> None:
        worker = self._processes.mine(command["rank"], command["pid"])
        if worker is None or worker.declared:
            return
        worker.declared, worker.out = True, FailureKind(command["kind"])
        if worker.out is FailureKind.UNREACHABLE and not self._ending.over:
            self._cut_off(worker)
        elif self._ending.end is None and worker.out is FailureKind.EXIT:  # it comes by itself, unless it hangs
            if worker.lives:
                why = f"{command['error']}; see" if command["error"] else "see"
                self._say(f"rank {worker.rank} (pid {worker.pid}) has failed: {why} {worker.child.log}")
            worker.kill_at = worker.kill_at or time.monotonic() + self._processes.job.grace.ending
        elif self._ending.end is not None or self._restarts.most:
            worker.child.signal(signal.SIGKILL)  # stopped for good, or to make room for the next one

    def _cut_off(self, worker: WorkerProcess) -> None:
        """The others go on without it; it ends by itself, or has already, and its place is free for another life."""
        if worker.lives:
            worker.kill_at = time.monotonic() + self._processes.job.grace.terminated
        else:
            self._starting.failed(worker)


_METHODS: Mapping[str, Callable[[Obeying, Message], None]] = {
    "begun": Obeying._begun,
    "start": Obeying._start,
    "drop": Obeying._drop,
    "joined": Obeying._joined,
    "terminate": Obeying._terminate,
    "out": Obeying._out,
    "speaks": Obeying._speaks,
    "progress": Obeying._progress,
}
