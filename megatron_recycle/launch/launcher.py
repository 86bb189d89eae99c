"""Starts a host's workers, reports their ends to the coordinator, and never ends one because another died.

One thread waits for everything: process ends (pidfd), messages of the coordinator, signals. What the
coordinator is to hear is queued and sent by the link's thread.
"""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_recycle import nccl_settings
from megatron_recycle.control.link import Link
from megatron_recycle.control.moves import Starts
from megatron_recycle.control.wire import Message
from megatron_recycle.environment import HOST, JOINING
from megatron_recycle.errors import RecycleError
from megatron_recycle.launch.child import Child
from megatron_recycle.launch.coordinator_process import Service
from megatron_recycle.launch.last_words import last_words
from megatron_recycle.launch.log_tail import Follower
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.launch.summary import Summary
from megatron_recycle.launch.torch_store import Store
from megatron_recycle.membership.failure_kinds import FailureKind, describe_status
from megatron_recycle.membership.messages import TO_LAUNCHER
from megatron_recycle.observe.text import printable

_GLANCE = 0.25
"""Seconds between looks at log files and deadlines."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SIGNAL = 2.0
"""Seconds in which another SIGTERM is the same one: Slurm sends it to every process, srun and scripts pass it on."""
_IDLE = 3.0
"""Seconds without a worker after which a host says so."""
_CUT_OFF = FailureKind.UNREACHABLE
"""How workers fail whose host was out of reach: nothing is wrong with them."""


@dataclass(frozen=True)
class Grace:
    """Seconds that workers have to end by themselves: after a good end, after a bad one, after SIGTERM, and after they
    have said that they end, as one does whose script has failed. For how long the coordinator may refuse: one that has
    died is back within a few. And for how long a host without workers waits for one that is out of reach."""

    well: float = 60.0
    failed: float = 10.0
    terminated: float = 5.0
    ending: float = 20.0
    refused: float = 60.0
    cut_off: float = 82.0


@dataclass
class Worker:
    """A rank's process, and what became of it."""

    rank: int
    child: Child
    status: int | None = None
    out: str | None = None
    """How it failed, once the coordinator has declared it out; of a process that is to join: why it is not in yet."""
    declared: bool = False
    """Whether the coordinator has declared it out."""
    joins: bool = False
    """Whether it is to join the running job and has not yet: to end then is to fail, whatever the status."""
    move: int = 0
    """The number of the move that it was started for."""
    kill_at: float | None = None
    """When it is killed, of one that has said that it ends."""


@dataclass(frozen=True)
class Job:
    """What the launcher runs. `command` is a worker's; `environ` its environment but for the ranks.

    `ranks` are the global ranks of this host's workers, `size` the number of workers of all hosts. With `joining` the
    job runs already, and these join it. The `leader` tells what happens in the whole job, the other hosts what happens
    to their own workers.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    run_dir: Path
    ranks: Sequence[int]
    size: int
    joining: bool = False
    show: str = "first"
    heartbeat_interval: float = 0.5
    grace: Grace = field(default_factory=Grace)
    leader: bool = True


class Launcher:
    """One host's part of a job. `run` returns the exit status.

    Args:
        control, token: of the coordinator.
        say: gets each line for the user.
        coordinator, store: their processes, if this launcher is to look after them.
    """

    def __init__(
        self,
        job: Job,
        control: str,
        token: str,
        say: Callable[[str], None],
        coordinator: Service | None = None,
        store: Store | None = None,
    ) -> None:
        self.job = job
        self.workers: dict[int, Worker] = {}
        """Each rank's process, the latest of several."""
        self.lives: list[Worker] = []
        """All processes, in the order in which they were started."""
        self.summary = Summary()
        self._say = lambda line: say(printable(line))
        self.restarts = Restarts(self._say, lambda rank: self._link.send(_stays_out(rank)))
        self._starts = Starts({rank: index for index, rank in enumerate(job.ranks)})
        self._coordinator = coordinator
        self._store = store
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._signals: deque[tuple[int, float]] = deque()
        self._interrupted = False
        self._refused = False
        self._asked = 0.0  # when
        self._idle_since: float | None = None
        self._time_to_leave: float | None = None
        self._end: Message | None = None
        self._kill_at: tuple[float, int] | None = None
        self._told: list[Message] = []
        self._follower = Follower(job.run_dir, job.show, say)
        self._link = Link(
            control,
            token,
            hello=self._hello,
            handle=self._heard,
            beat=lambda: {"type": "heartbeat", "progress": None},
            interval=job.heartbeat_interval,
            known=TO_LAUNCHER,
            name="recycle-launcher",
        )

    def run(self) -> int:
        """Start all workers and stay until all have ended; Ctrl-C and SIGTERM end them."""
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        descriptor = signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        try:
            self._link.start()
            if self._coordinator is not None:
                self._selector.register(self._coordinator.child.pidfd, selectors.EVENT_READ, self._coordinator)
            for rank in self.job.ranks:
                self._spawn(rank, "not joined" if self.job.joining else None)
            while any(worker.status is None for worker in self.workers.values()) or self._awaits_end():
                self._wait()
        finally:
            self._kill_all()
            self._follower.poll(self._shown())
            self._link.close()
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            for worker in self.workers.values():
                worker.child.release()
            if self._coordinator is not None:
                self._coordinator.end()
            if self._store is not None:
                self._store.end()
            self._selector.close()
        return self._status()

    @property
    def informed(self) -> bool:
        """Whether this host was told of the job to its end, or to its own."""
        return (self._end is not None and not self._refused) or self.job.joining

    @property
    def message(self) -> str:
        """How the job ended, in words."""
        if self._end is not None:
            return self._end["message"]
        if self.job.joining:
            return "this host has left the job"
        if not self.job.leader and self._link.lost_since is not None:
            return (f"the coordinator at {self._link.address} is out of reach and did not say how the job ended; if it "
                    f"goes on, {self._how_to_join()}")
        return "the coordinator did not say how the job ended"

    # Workers

    def _spawn(self, rank: int, out: str | None = None, move: int = 0) -> None:
        """Start a process for `rank`; one that is `out` is to join."""
        environ = {
            **self.job.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(self._starts.devices[rank]),
            "WORLD_SIZE": str(self.job.size),
            "LOCAL_WORLD_SIZE": str(len(self.job.ranks)),
            HOST: self._host(),
        }
        if out is not None:
            environ[JOINING] = "1"
        child = Child(self.job.command, environ, self.job.run_dir / f"worker-{rank}.log")
        if rank in self.workers:
            self.workers[rank].child.release()
        if child.unlogged is not None:
            self._say(f"rank {rank}: {child.unlogged}: what it prints is lost")
        self.workers[rank] = Worker(rank, child, out=out, joins=out is not None, move=move)
        self.lives.append(self.workers[rank])
        self._selector.register(child.pidfd, selectors.EVENT_READ, self.workers[rank])

    def _ended(self, worker: Worker) -> None:
        moment = time.time()
        self._selector.unregister(worker.child.pidfd)
        worker.status = worker.child.collect()
        told = (worker.rank, worker.child.pid) in self.summary.errors
        words = last_words(worker.child.log) if worker.status and not told else ""
        self._tell({
            "type": "exit",
            "rank": worker.rank,
            "pid": worker.child.pid,
            "status": worker.status,
            "t": moment,
            "log": f"{worker.child.log}" + (f" ({words})" if words else ""),
            "move": worker.move,
        })
        if (worker.status or worker.joins) and self._end is None and not self._interrupted:
            why = f": {words}" if words else ""
            early = f" before it had joined: see {worker.child.log}" if worker.joins else ""
            ended = f"ended with {describe_status(worker.status)}"
            self._say(f"rank {worker.rank} (pid {worker.child.pid}) {ended}{early}{why}")
            self._failed(worker)

    def _tell(self, message: Message) -> None:
        """Tell the coordinator, and again after every reconnect."""
        self._told.append(message)
        self._link.send(message)

    def _failed(self, worker: Worker) -> None:
        """Whether it is to be started again; not beside another process on its device."""
        if self._starts.awaited(worker.rank):
            return
        self._starts.end(worker.rank)
        others = [self.workers[rank] for rank in self._starts.others(worker.rank) if rank in self.workers]
        alone = all(other.status is not None for other in others)
        if alone and worker.out == _CUT_OFF:
            self.restarts.cut_off(worker.rank, time.monotonic(), str(worker.child.log))
        elif alone:
            self.restarts.ended(worker.rank, time.monotonic(), str(worker.child.log))
        elif not (worker.move and worker.out == "not joined"):  # the worker that was to move trains where it was
            self.restarts.replaced(worker.rank)

    # The loop

    def _wait(self) -> None:
        for key, _ in self._selector.select(_GLANCE):
            if key.data is None:
                self._drain()
            elif isinstance(key.data, Service):
                self._coordinator_died(key.data)
            else:
                self._ended(key.data)
        while not self._inbox.empty():
            self._receive(self._inbox.get())
        while self._signals:
            self._interrupt(*self._signals.popleft())
        self._start_again()
        self._start_moves()
        self._tend_store()
        self._check_coordinator()
        self._follower.poll(self._shown())
        self._check_ending()
        self._check_deadline()
        self._check_idle()

    def _start_again(self) -> None:
        """Start the processes whose time it is; not while nobody would let them in."""
        ending = any(worker.out == _CUT_OFF and worker.kill_at is not None and worker.status is None
                     for worker in self.workers.values())
        if self._link.lost_since is not None or ending:
            return
        due = sorted(self.restarts.due(time.monotonic()))
        if back := [rank for rank in due if self.workers[rank].out == _CUT_OFF]:
            places = "place is" if len(back) == 1 else f"{len(back)} places are"
            self._say(f"this host's {places} free again: rejoining (rank {', '.join(map(str, back))})")
        for rank in due:
            self._try_spawn(rank, self.workers[rank].out or FailureKind.EXIT)

    def _try_spawn(self, rank: int, out: str, move: int = 0) -> None:
        """Start one more process in a job that runs: that it cannot be started costs nobody else anything."""
        try:
            self._spawn(rank, out, move)
        except (RecycleError, OSError) as error:
            self._say(f"rank {rank} cannot be started: {error}")
            log = str(self.job.run_dir / f"worker-{rank}.log")
            if move:
                self._starts.end(rank)
                self._tell({"type": "exit", "rank": rank, "pid": 0, "status": 1, "t": time.time(), "log": log,
                            "move": move})
            elif out == _CUT_OFF:
                self.restarts.cut_off(rank, time.monotonic(), log)
            else:
                self.restarts.ended(rank, time.monotonic(), log)

    def _start_moves(self) -> None:
        """Start the processes of other stages that workers of this host move to."""
        for rank in self._starts.due():
            before = self.workers.get(rank)
            if before is None or before.status is not None:
                self._try_spawn(rank, "not joined", self._starts.number(rank))
            else:
                before.child.signal(signal.SIGKILL)  # declared out: its successor needs its name
                self._starts.later(rank)

    def _end_move(self, rank: int, well: bool) -> None:
        worker = self.workers.get(rank)
        if not well and self._starts.moves(rank) and worker is not None and worker.out is not None:
            worker.child.signal(signal.SIGKILL)
        self._starts.end(rank)

    def _coordinator_died(self, service: Service) -> None:
        """Training goes on meanwhile; the new one reads the journal and finds the workers where they are."""
        self._selector.unregister(service.child.pidfd)
        saves = self._interrupted and not self.job.joining and self._time_to_leave is not None
        if self._end is not None or (self._interrupted and not saves):
            return
        self._say(f"the coordinator (pid {service.child.pid}) has died; starting it again")
        self._coordinator = None
        try:
            self._coordinator = service.restart()
        except RecycleError as error:
            self._give_up(f"no coordinator any more: {error}")
            return
        self._selector.register(self._coordinator.child.pidfd, selectors.EVENT_READ, self._coordinator)

    def _tend_store(self) -> None:
        if self._store is None or self._over():
            return
        try:
            if self._store.tend():
                self._say("the process of torch's store has died; starting it again")
        except RecycleError as error:
            self._give_up(str(error))

    def _check_coordinator(self) -> None:
        """On a host of its own, a launcher does not see the first one's end."""
        refused = self._link.refused_since
        if refused is None or self._coordinator is not None or self._over():
            return
        if time.monotonic() - refused > self.job.grace.refused:
            self._refused = True
            self._give_up(f"the coordinator at {self._link.address} has refused connections for "
                          f"{self.job.grace.refused:.0f} s ({self._link.error}): the first host's launcher has ended, "
                          "or its port is another job's by now. Restart the job from its last checkpoint")

    def _progress(self) -> None:
        """An iteration was committed: services that have died before may die again."""
        for service in (self._coordinator, self._store):
            if service is not None:
                service.deaths.progress()

    def _give_up(self, message: str) -> None:
        self._finish({"type": "end", "status": 1, "message": message})
        self._deadline(0.0, signal.SIGTERM)  # nobody else tells the workers

    def _drain(self) -> None:
        try:
            self._wake_in.recv(4096)
        except BlockingIOError:
            return

    def _over(self) -> bool:
        return self._end is not None or self._interrupted

    def _awaits_end(self) -> bool:
        """All workers have ended: the coordinator still has to say what that means, unless it is gone."""
        if self._end is not None:
            return False
        if self.restarts.pending() and self._link.lost_since is None:
            return True
        if self.job.joining and (self._interrupted or all(worker.out is not None for worker in self.workers.values())):
            return False  # the job goes on without this host
        lost = self._link.lost_since
        return lost is None or time.monotonic() - lost < self._longest_cut()

    def _longest_cut(self) -> float:
        """Seconds after which nobody waits for the network any more. The first host's coordinator is at home."""
        return self.job.grace.failed if self.job.leader else max(self.job.grace.failed, self.job.grace.cut_off)

    def _how_to_join(self) -> str:
        return (f"`recycle run --join {self._link.address} --nproc {len(self.job.ranks)}` with the job's token, script "
                "and arguments brings it in again")

    def _shown(self) -> list[int]:
        """Ranks in the order in which one would be shown as the first."""
        live = [rank for rank, worker in self.workers.items() if worker.status is None and worker.out is None]
        return live or list(self.workers)

    def _receive(self, message: Message) -> None:
        if message["type"] == "end":
            self._finish(message)
        elif message["type"] == "event":
            self._show(message["event"])
        elif message["type"] in _COMMANDS:
            _COMMANDS[message["type"]](self, message)

    def _show(self, event: Mapping[str, Any]) -> None:
        """Tell the user of it; nothing follows from an event."""
        line = self.summary.add(event)
        if line is not None and (self.job.leader or self.summary.rank_of(event) in self.job.ranks):
            self._say(line)

    # Commands of the coordinator; see `membership.commands`

    def _mine(self, rank: int, pid: int) -> Worker | None:
        """The worker of this rank, if it is this process."""
        worker = self.workers.get(rank)
        return worker if worker is not None and worker.child.pid == pid else None

    def _begun(self, command: Message) -> None:
        self.restarts.most = 0 if self._over() else command["max_restarts"]
        self._time_to_leave = command["leave_timeout"]

    def _start(self, command: Message) -> None:
        if self._mine(command["beside"], command["pid"]) is not None and not self._over():
            self._starts.begin(command["rank"], command["beside"], command["move"])

    def _drop(self, command: Message) -> None:
        if command["move"] == self._starts.number(command["rank"]):
            self._end_move(command["rank"], well=False)

    def _joined(self, command: Message) -> None:
        if (worker := self._mine(command["rank"], command["pid"])) is not None:
            self._end_move(worker.rank, well=True)
            worker.out, worker.joins = None, False
            self.restarts.joined(worker.rank)

    def _speaks(self, command: Message) -> None:
        if (worker := self._mine(command["rank"], command["pid"])) is not None:
            self._follower.speaks(worker.rank, command["offset"])

    def _out(self, command: Message) -> None:
        if (worker := self._mine(command["rank"], command["pid"])) is None or worker.declared:
            return
        worker.declared, worker.out = True, FailureKind(command["kind"])
        if worker.out is _CUT_OFF and not self._over():
            self._was_cut_off(worker)
        elif self._end is None and worker.out is FailureKind.EXIT:  # it comes by itself, unless it hangs
            if worker.status is None:
                why = f"{command['error']}; see" if command["error"] else "see"
                self._say(f"rank {worker.rank} (pid {worker.child.pid}) has failed: {why} {worker.child.log}")
            worker.kill_at = worker.kill_at or time.monotonic() + self.job.grace.ending
        elif self._end is not None or self.restarts.most:
            worker.child.signal(signal.SIGKILL)  # stopped for good, or to make room for the next one

    def _was_cut_off(self, worker: Worker) -> None:
        """The others go on without it; it ends by itself, or has already, and its place is free for another life."""
        if worker.status is None:
            worker.kill_at = time.monotonic() + self.job.grace.terminated
        else:
            self._failed(worker)

    def _finish(self, message: Message) -> None:
        if self._end is not None:
            return
        self._end = message
        self.restarts.cancel()
        grace = self.job.grace.failed if message["status"] else self.job.grace.well
        self._deadline(grace, signal.SIGTERM)
        soon = time.monotonic() + self.job.grace.terminated
        for worker in self.workers.values():
            if worker.kill_at is not None and not message["status"]:  # it is about to end, with a status of its own
                worker.kill_at = min(worker.kill_at, soon)
            elif worker.out is not None:  # it may be stopped for good; nobody waits for it
                worker.child.signal(signal.SIGKILL)

    def _interrupt(self, number: int, moment: float | None = None) -> None:
        """The first signal asks the workers to end, and with them the job, unless these have only joined it; the second
        does not ask."""
        name, moment = signal.Signals(number).name, time.monotonic() if moment is None else moment
        if self._interrupted and number == signal.SIGTERM and moment - self._asked < _SAME_SIGNAL:
            return
        if not self._interrupted:
            self._asked = moment
        if not self._interrupted and self.job.joining:
            self._interrupted = True
            self.restarts.cancel()
            self._say(f"{name}: the workers of this host leave the job; a second one ends them at once")
            self._signal_all(signal.SIGTERM)
            self._deadline(self.job.grace.well, signal.SIGKILL)
        elif not self._interrupted and number == signal.SIGTERM and self._time_to_leave is not None:
            self._interrupted = True
            self.restarts.cancel()
            self._say(f"{name}: the job saves what is committed (on_leave) and ends, within "
                      f"{self._time_to_leave:.0f} s (leave_timeout); a second one ends it at once")
            self._tell(_interrupt_of(number))
            self._deadline(self._time_to_leave + self.job.grace.terminated, signal.SIGTERM)
        elif not self._interrupted:
            self._interrupted = True
            self.restarts.cancel()
            self._say(f"{name}: ending all workers")
            self._tell(_interrupt_of(number))
            self._signal_all(signal.SIGTERM)
            self._deadline(self.job.grace.terminated, signal.SIGKILL)
        else:
            self._signal_all(signal.SIGKILL)

    def _deadline(self, seconds: float, number: int) -> None:
        moment = time.monotonic() + seconds
        if self._kill_at is None or moment < self._kill_at[0] or number == signal.SIGKILL:
            self._kill_at = (moment, number)

    def _check_ending(self) -> None:
        """No process that has failed keeps its rank and device for longer than it may take to end."""
        for worker in self.workers.values():
            if worker.kill_at is not None and time.monotonic() >= worker.kill_at:
                worker.kill_at = None
                if worker.status is None:
                    self._say(f"rank {worker.rank} (pid {worker.child.pid}) has failed and does not end: SIGKILL")
                    worker.child.signal(signal.SIGKILL)

    def _check_idle(self) -> None:
        """A host without workers says what becomes of it."""
        waits = self._over() or self.job.joining or self.restarts.pending() or not any(
            worker.status for worker in self.workers.values())
        if waits or any(worker.status is None for worker in self.workers.values()):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since > _IDLE and self._link.lost_since is None:
            self._idle_since = float("inf")  # said
            self._say("this host has no worker any more and starts none by itself (max_restarts); it stays until the "
                      f"job ends. {self._how_to_join()}")

    def _check_deadline(self) -> None:
        if self._kill_at is None or time.monotonic() < self._kill_at[0]:
            return
        number, self._kill_at = self._kill_at[1], None
        live = [str(worker.rank) for worker in self.workers.values() if worker.status is None]
        if live:
            name = signal.Signals(number).name
            self._say(f"rank {', '.join(live)} still running after the end of the job: {name}")
            self._signal_all(number)
            self._deadline(self.job.grace.terminated, signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for worker in self.workers.values():
            if worker.status is None:
                worker.child.signal(number)

    def _kill_all(self) -> None:
        """Whatever happened: nothing stays behind."""
        self._signal_all(signal.SIGKILL)
        for worker in self.workers.values():
            if worker.status is None:
                worker.status = worker.child.wait(10.0)

    def _status(self) -> int:
        """The job's status; a worker that failed after the end of the training fails the job too."""
        if self._end is None and self.job.joining:
            return 1 if any(worker.status for worker in self.workers.values()) else 0
        if self._end is None:
            return 1
        failed = [worker for worker in self.workers.values() if worker.status and worker.out is None]
        return int(self._end["status"]) or (1 if failed else 0)

    # Called by others: the link's thread, the signal handler

    def _hello(self) -> list[Message]:
        hello = {"type": "hello", "role": "launcher", "host": self._host()}
        staying = [_stays_out(rank) for rank in sorted(self.restarts.given_up)]
        return [{**hello, "ranks": list(self.job.ranks)}, *self._told, *staying]

    def _host(self) -> str:
        """Tells hosts apart, also several of one name (containers, network namespaces)."""
        return f"{socket.gethostname()}/{self.job.environ.get('GROUP_RANK', '0')}"

    def _heard(self, message: Message) -> None:
        self._inbox.put(message)
        self._wake_out.send(b"m")

    def _signalled(self, number: int, frame: object) -> None:
        self._signals.append((number, time.monotonic()))


_COMMANDS: Mapping[str, Callable[[Launcher, Message], None]] = {
    "begun": Launcher._begun,
    "start": Launcher._start,
    "drop": Launcher._drop,
    "joined": Launcher._joined,
    "out": Launcher._out,
    "speaks": Launcher._speaks,
    "progress": lambda launcher, command: launcher._progress(),
}


def _interrupt_of(number: int) -> Message:
    return {"type": "interrupt", "status": 128 + number, "message": f"interrupted by {signal.Signals(number).name}"}


def _stays_out(rank: int) -> Message:
    return {"type": "stays_out", "rank": rank}


def torchrun_environment(
    environ: Mapping[str, str], host: str, store_port: int, nodes: int, node: int
) -> dict[str, str]:
    """What torchrun would set for a group of `nodes` hosts; RANK and its like come with each worker."""
    return {
        "OMP_NUM_THREADS": "1",
        **nccl_settings.defaults(environ),
        **environ,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store_port),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "recycle",
        "PYTHONUNBUFFERED": "1",
    }


def default_nproc(environ: Mapping[str, str]) -> int:
    """Visible CUDA devices, or 1 without any."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    found = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return max(1, len(found))


def say_to(stream: Any) -> Callable[[str], None]:
    """A `say` that writes lines at once."""

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    return say


def python_command(script: str, arguments: Sequence[str]) -> list[str]:
    """A worker's command: the script with the plugin on."""
    return [sys.executable, "-m", "megatron_recycle", script, *arguments]
