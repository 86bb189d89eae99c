"""The coordinator's commands, carried out by the launcher; see `membership.commands`. Each may come twice."""

from __future__ import annotations

import signal
import time

from megatron_recycle.launch.processes import Processes, Say, WorkerProcess
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.launch.services import Services
from megatron_recycle.launch.shutdown import Ending
from megatron_recycle.launch.starting import Starting
from megatron_recycle.launch.worker_logs import Follower
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.protocol import Begun, Drop, Ordered, Out, Progress, Speaks, Start, Terminate


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

    def obey(self, command: Ordered) -> None:
        """Do it, if it is a command about this host."""
        if isinstance(command, Begun):
            self._restarts.of_host = command.max_failures_per_host
            self._restarts.begun(0 if self._ending.over else command.max_restarts, time.monotonic())
            self._ending.time_to_leave = command.leave_timeout
        elif isinstance(command, Start):
            if self._processes.mine(command.beside, command.pid) is not None and not self._ending.over:
                self._starting.begin_move(command.rank, command.beside, command.move)
        elif isinstance(command, Drop):
            self._starting.drop_move(command.rank, command.move)
        elif isinstance(command, Terminate):
            self._ending.terminate(command.seconds)
        elif isinstance(command, Progress):
            self._services.progress()
        elif (worker := self._processes.mine(command.rank, command.pid)) is None:
            return
        elif isinstance(command, Speaks):
            self._follower.speaks(worker.rank, command.offset)
        elif isinstance(command, Out):
            self._out(worker, command)
        elif worker.lives:  # it joined; told again after the coordinator's return, it may have died since
            self._starting.joined(worker)

    def _out(self, worker: WorkerProcess, command: Out) -> None:
        if worker.declared:
            return
        worker.declared, worker.out = True, command.kind
        if worker.out is FailureKind.UNREACHABLE and not self._ending.over:
            self._cut_off(worker)
        elif self._ending.end is None and worker.out is FailureKind.EXIT:  # it comes by itself, unless it hangs
            if worker.lives:
                why = f"{command.error}; see" if command.error else "see"
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
