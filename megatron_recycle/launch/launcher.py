"""One host's part of a job: starts its workers and reports their ends; no worker ends because another died.

One thread waits for everything: process ends (pidfd), messages of the coordinator, signals. Messages to the coordinator
are queued, and the link's thread sends them. The parts: `processes`, `starting` (again, and for moves), `shutdown`
(signals, time limits), `coordinator_process` (the coordinator, on the host that has one).
"""

from __future__ import annotations

import contextlib
import math
import queue
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable

from megatron_recycle.control.link import Link
from megatron_recycle.errors import RecycleError
from megatron_recycle.launch import attribution, devices
from megatron_recycle.launch.attribution import Attribution
from megatron_recycle.launch.coordinator_process import Service, Silence
from megatron_recycle.launch.life import Life
from megatron_recycle.launch.processes import NOT_JOINED, Job, Processes, WorkerProcess
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.launch.shutdown import Ending
from megatron_recycle.launch.starting import Starting
from megatron_recycle.launch.summary import Summary
from megatron_recycle.launch.surroundings import heeded
from megatron_recycle.launch.worker_logs import Follower, last_words
from megatron_recycle.membership.failure_kinds import FailureKind, describe_status
from megatron_recycle.membership.inputs import Exited, StaysOut
from megatron_recycle.membership.protocol import (
    TO_LAUNCHER,
    Begun,
    Drop,
    End,
    EventTold,
    Explains,
    Heartbeat,
    Interrupt,
    LauncherHello,
    Lives,
    LoggingRank,
    Message,
    Ordered,
    Out,
    Places,
    Progress,
    Start,
    Terminate,
    ToLauncher,
)
from megatron_recycle.observe.text import printable

_GLANCE = 0.25
"""Seconds between looks at log files and deadlines."""
_PAUSE = 5.0
"""Seconds between two tries to start the coordinator where the host has no room for its process."""
_IDLE = 3.0
"""Seconds without a worker after which a host reports that."""


class Launcher:
    """One host's part of a job. `run` returns the exit status.

    Args:
        control, token: of the coordinator.
        say: gets each line for the user.
        coordinator: its process, if this launcher is to look after it.
        stamp: prefix of each of its own lines.
    """

    def __init__(
        self,
        job: Job,
        control: str,
        token: str,
        say: Callable[[str], None],
        coordinator: Service | None = None,
        stamp: Callable[[], str] = str,
    ) -> None:
        self.summary = Summary()
        self._say = lambda line: say(stamp() + printable(line))
        self._link = Link(
            control,
            token,
            hello=self._hello,
            handle=self._enqueue,
            beat=Heartbeat,
            interval=job.heartbeat_interval,
            known=TO_LAUNCHER,
            name="recycle-launcher",
        )
        self.restarts = Restarts(self._say, lambda rank: self._link.send(StaysOut(rank)))
        self.processes = Processes(job, self._say)
        self.ending = Ending(self.processes, self.restarts, self._say, self._link.send)
        self.starting = Starting(self.processes, self.restarts, self._say, self.spawn, self._tell)
        self._coordinator = coordinator
        """Its process; None: another launcher looks after it, or it cannot be started again."""
        self._follower = Follower(job.run_dir, job.show, say)
        self._inbox: queue.SimpleQueue[ToLauncher | Explains] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._signals: deque[tuple[int, float]] = deque()
        self._silence = Silence()
        self._revives = math.inf
        """When the coordinator is to be started again."""
        self._refused = False
        self._idle_since: float | None = None
        self._reports: list[Message] = []
        self._machine, self._gpus = attribution.Host(job.environ, (job.run_dir, job.folder)), dict[int, str]()
        self._attribution = Attribution(
            self._machine, lambda rank, pid, found: self._inbox.put(
                Explains(rank, pid, tuple(found.causes), found.gpu, found.repair)))

    @property
    def job(self) -> Job:
        return self.processes.job

    def run(self) -> int:
        """Start all workers and stay until all have ended; Ctrl-C, SIGTERM and SIGHUP end them."""
        before = {number: signal.signal(number, self._signalled) for number in heeded()}
        descriptor = signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        try:
            self._link.start()
            self._watch_coordinator()
            self._start_all()
            while self.processes.live() or self._awaits_end():
                self._wait()
        finally:
            self.processes.kill_all()
            self._follower.poll(self.processes.shown(), last=True)
            self._link.close()
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            self.processes.release()
            if self._coordinator is not None:
                self._coordinator.end()
            self._selector.close()
        return self._status()

    def next_life(self, life: Life) -> Life | None:
        """The life after ``life``, which this launcher has led its host through; None if the job is over, here or
        everywhere."""
        return None if self.ending.interrupted else life.after(self.ending.end, self.processes.host)

    @property
    def informed(self) -> bool:
        """Whether this host has followed the job to its end, or has only joined it."""
        return (self.ending.end is not None and not self._refused) or self.job.joining

    @property
    def message(self) -> str:
        """The end of the job, in words."""
        if self.ending.end is not None:
            return self.ending.end.message
        if self.job.joining:
            return "this host has left the job"
        if not self._leads_here and self._link.lost_since is not None:
            return (f"the coordinator at {self._link.address} is out of reach and did not say how the job ended; if it "
                    f"goes on, {self._how_to_join()}")
        return "the coordinator did not say how the job ended"

    # Workers

    def _start_all(self) -> None:
        """Start the first processes of all ranks. If the host has no room for one of them, the job ends: none can begin
        without it."""
        try:
            for rank in self.job.ranks:
                self.spawn(rank, NOT_JOINED if self.job.joining else None)
        except OSError as error:
            why = f"{self.processes.host} cannot start rank {rank}: {error}"
            if not self.job.joining:
                self._link.send(Interrupt(1, why))
            self.ending.give_up(why)

    def spawn(self, rank: int, out: str | None = None, move: int = 0) -> None:
        """Start a process for `rank`; if `out`, the process is to join."""
        worker = self.processes.spawn(rank, out, move)
        if (gpu := self._machine.gpu(self.processes.devices[rank])) is not None and self._gpus.get(rank) != str(gpu):
            self._gpus[rank] = str(gpu)
            devices.write(self.job.run_dir, self.processes.host.rpartition("/")[2], self._gpus)
        self._selector.register(worker.child.pidfd, selectors.EVENT_READ, worker)

    def _ended(self, worker: WorkerProcess) -> None:
        moment = time.time()
        self._selector.unregister(worker.child.pidfd)
        worker.status = worker.child.collect()
        reported = (worker.rank, worker.pid) in self.summary.errors
        words = last_words(worker.child.log) if worker.status and not reported else ""
        lost = self._link.lost_since
        alone = 0.0 if lost is None else time.monotonic() - lost
        cut = (worker.status or 0) > 0 and alone > self.job.grace.failed
        self._tell(Exited(
            worker.rank,
            worker.pid,
            worker.status,
            moment,
            log=f"{worker.child.log}" + (f" ({words})" if words else ""),
            move=worker.move,
            said=f"its host was without a coordinator for {alone:.0f} s" if cut else "",
        ))
        if (worker.status or worker.joins) and not self.ending.over:
            why = f": {words}" if words else ""
            early = f" before it had joined: see {worker.child.log}" if worker.joins else ""
            ended = f"ended with {describe_status(worker.status)}"
            name = self.summary.names.get(worker.rank)
            known = "" if name is None else f"{name}, "
            known += f"{self.processes.host}, "
            known += f"{self._gpus[worker.rank]}, " if worker.rank in self._gpus else ""
            self._say(f"rank {worker.rank} ({known}pid {worker.pid}) {ended}{early}{why}")
            if worker.status:
                self._attribution.failed(worker.rank, self.processes.devices[worker.rank], worker.pid,
                                         worker.status == -signal.SIGKILL)
            self.starting.failed(worker)

    def _tell(self, message: Message) -> None:
        """Report to the coordinator, and again after every reconnect."""
        self._reports.append(message)
        self._link.send(message)

    # The loop

    def _wait(self) -> None:
        for key, _ in self._selector.select(_GLANCE):
            if key.data is None:
                self._drain()
            elif isinstance(key.data, Service):
                self._selector.unregister(key.fileobj)
                self._coordinator_died(key.data)
            else:
                self._ended(key.data)
        while not self._inbox.empty():
            self._receive(self._inbox.get())
        while self._signals:
            self.ending.interrupt(*self._signals.popleft())
        if self._link.lost_since is None:  # only the coordinator could let them in
            self.starting.again()
        self.starting.moves()
        self._revive()
        self._check_silence()
        self._check_coordinator()
        self._follower.poll(self.processes.shown())
        self.processes.kill_late()
        self.ending.check_deadline()
        self._check_idle()

    def _watch_coordinator(self) -> None:
        if self._coordinator is not None:
            if self._coordinator.child.unlogged is not None:
                self._say(f"{self._coordinator.child.unlogged}: what the coordinator prints is lost")
            self._selector.register(self._coordinator.child.pidfd, selectors.EVENT_READ, self._coordinator)

    def _coordinator_died(self, died: Service) -> None:
        """Start the coordinator again, unless it is no longer needed; where that does not help, the job ends. Training
        goes on meanwhile: the new coordinator reads the journal and finds the workers where they are."""
        if not self._is_led():
            return
        self._say(died.end_told())
        try:
            died.bury()
        except RecycleError as error:
            self._coordinator = None
            self.ending.give_up(f"no coordinator any more: {error}")
        else:
            self._revives = time.monotonic()

    def _is_led(self) -> bool:
        """Whether the job still needs its coordinator."""
        return self.ending.end is None and (not self.ending.interrupted or self.ending.saves)

    def _revive(self) -> None:
        """Start the next coordinator, as soon as the host has room for its process."""
        if self._coordinator is None or time.monotonic() < self._revives or not self._is_led():
            return
        try:
            self._coordinator.revive()
        except OSError as error:
            self._say(f"the coordinator cannot be started yet: {error}")
            self._revives = time.monotonic() + _PAUSE
        else:
            self._revives = math.inf
            self._watch_coordinator()

    def _check_silence(self) -> None:
        """Kill a coordinator of this host that gives no sign: the next failure would wait for it for ever, stopped or
        stuck as it is. Its successor knows all that it has decided."""
        silent = self._silence.since(self._link.heard)
        if self._coordinator is not None and self._leads_here and self._is_led() and self._link.lost_since is None and (
                silent > self.job.grace.silent):
            self._say(f"the coordinator (pid {self._coordinator.child.pid}) has given no sign for {silent:.0f} s: "
                      "SIGKILL")
            self._coordinator.child.signal(signal.SIGKILL)
            self._silence = Silence()

    def _drain(self) -> None:
        try:
            self._wake_in.recv(4096)
        except BlockingIOError:
            return

    def _receive(self, message: ToLauncher | Explains) -> None:
        """Handle the end, a command, or an event of the coordinator; events are only shown to the user. From this host
        itself: why a worker has failed."""
        if isinstance(message, Explains):
            self._tell(message)
        elif isinstance(message, End):
            self.ending.finish(message)
        elif isinstance(message, EventTold):
            line = self.summary.add(message.event)
            if line is not None and (self.job.leader or self.summary.rank_of(message.event) in self.job.ranks):
                self._say(line)
        elif not isinstance(message, (Lives, Places)):
            self._obey(message)

    def _obey(self, command: Ordered) -> None:
        """Carry out a command of the coordinator's that is about this host; see `membership.commands`. Each may come
        twice."""
        if isinstance(command, Begun):
            self.restarts.of_host = command.max_failures_per_host
            self.restarts.begun(0 if self.ending.over else command.max_restarts, time.monotonic())
            self.ending.begun, self.ending.time_to_leave = True, command.leave_timeout
        elif isinstance(command, Start):
            if self.processes.mine(command.beside, command.pid) is not None and not self.ending.over:
                self.starting.begin_move(command.rank, command.beside, command.move)
        elif isinstance(command, Drop):
            self.starting.drop_move(command.rank, command.move)
        elif isinstance(command, Terminate):
            self.ending.terminate(command.seconds)
        elif isinstance(command, Progress):
            if self._coordinator is not None:
                self._coordinator.progress()
        elif (worker := self.processes.mine(command.rank, command.pid)) is None:
            return
        elif isinstance(command, LoggingRank):
            self._follower.logs_from(worker.rank, command.offset)
        elif isinstance(command, Out):
            self._declared_out(worker, command)
        elif worker.lives:  # it joined; repeated after the coordinator's return, it may have died since
            self.starting.joined(worker)

    def _declared_out(self, worker: WorkerProcess, command: Out) -> None:
        if worker.declared:
            return
        worker.declared, worker.out = True, command.kind
        if worker.out is FailureKind.UNREACHABLE and not self.ending.over:
            # The others go on without it; it ends by itself, or has already, and its place is free for another life.
            if worker.lives:
                worker.kill_at = time.monotonic() + self.job.grace.terminated
            else:
                self.starting.failed(worker)
        elif self.ending.end is None and worker.out is FailureKind.EXIT:  # it ends by itself, unless it hangs
            if worker.lives:
                why = f"{command.error}; see" if command.error else "see"
                self._say(f"rank {worker.rank} (pid {worker.pid}) has failed: {why} {worker.child.log}")
            worker.kill_at = worker.kill_at or time.monotonic() + self.job.grace.ending
        elif self.ending.end is not None or self.restarts.most:
            worker.child.signal(signal.SIGKILL)  # stopped for good, or to make room for the next one

    def _check_coordinator(self) -> None:
        """Give up on a coordinator of another host that refuses connections too long: its end is not seen here."""
        refused = self._link.refused_since
        if refused is None or self._coordinator is not None or self.ending.over:
            return
        if time.monotonic() - refused > self.job.grace.refused:
            self._refused = True
            self.ending.give_up(
                f"the coordinator at {self._link.address} has refused connections for {self.job.grace.refused:.0f} s "
                f"({self._link.error}): the launcher or service that keeps it has ended, or its port is another job's "
                "by now. Restart the job from its last checkpoint")

    def _check_idle(self) -> None:
        """Report that a host without workers stays idle, and how to use it again."""
        failed = any(worker.status for worker in self.processes.workers.values())
        waits = self.ending.over or self.job.joining or self.restarts.pending() or not failed
        if waits or self.processes.live():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since > _IDLE and self._link.lost_since is None:
            self._idle_since = float("inf")  # said
            self._say("this host has no worker any more and starts none by itself (max_restarts); it stays until the "
                      f"job ends. {self._how_to_join()}")

    def _awaits_end(self) -> bool:
        """Whether all workers have ended and the coordinator still has to say what follows; False if it is gone."""
        if self.ending.end is not None:
            return False
        if self.restarts.pending() and self._link.lost_since is None:
            return True
        out = all(worker.out is not None for worker in self.processes.workers.values())
        if self.job.joining and (self.ending.interrupted or out):
            return False  # the job goes on without this host
        lost = self._link.lost_since
        return lost is None or time.monotonic() - lost < self._longest_cut()

    def _longest_cut(self) -> float:
        """Seconds after which to give up on a lost coordinator connection. A local coordinator needs no network."""
        grace = self.job.grace
        return grace.failed if self._leads_here else max(grace.failed, grace.cut_off)

    @property
    def _leads_here(self) -> bool:
        """Whether the coordinator that leads is this host's."""
        return self._coordinator is not None and not self._coordinator.standby

    def _how_to_join(self) -> str:
        return (f"`recycle run --join {self._link.address} --nproc {len(self.job.ranks)}` with the job's token, script "
                "and arguments brings it in again")

    def _status(self) -> int:
        """The job's status; a worker that failed after the end of the training fails the job too."""
        workers = self.processes.workers.values()
        if self.ending.end is None:
            return 0 if self.job.joining and not any(worker.status for worker in workers) else 1
        failed = any(worker.status and worker.out is None for worker in workers)
        return int(self.ending.end.status) or int(failed)

    # Called by others: the link's thread, the signal handler

    def _hello(self) -> list[Message]:
        staying = [StaysOut(rank) for rank in sorted(self.restarts.given_up)]
        places = 0 if self.job.joining else self.job.places
        hello = LauncherHello(self.processes.host, tuple(self.job.ranks), places, self.job.size, "launcher")
        return [hello, *self._reports, *self.ending.told, *staying]

    def _enqueue(self, message: ToLauncher) -> None:
        self._inbox.put(message)
        with contextlib.suppress(BlockingIOError):  # it will wake anyway
            self._wake_out.send(b"m")

    def _signalled(self, number: int, frame: object) -> None:
        self._signals.append((number, time.monotonic()))
