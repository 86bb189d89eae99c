"""Processes of a host's workers: started, counted, ended."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_recycle.control.host_memory import HostMemory
from megatron_recycle.environment import HOST, JOINING, MEMORY
from megatron_recycle.launch.child import Child

NOT_JOINED = "not joined"
"""Why a joining process is not in yet."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Grace:
    """Seconds that workers have to end by themselves: after a good end, after a bad one, after SIGTERM, and after they
    have announced their end, as after a failed script. Seconds that the coordinator may refuse: a dead one is back
    within a few. Seconds that a host without workers waits for an unreachable one. Seconds that the coordinator's
    process may give no sign before it is killed, and started again."""

    well: float = 60.0
    failed: float = 10.0
    terminated: float = 5.0
    ending: float = 20.0
    refused: float = 60.0
    cut_off: float = 82.0
    silent: float = 60.0


@dataclass
class WorkerProcess:
    """A rank's process and its fate."""

    rank: int
    child: Child
    status: int | None = None
    out: str | None = None
    """The kind of its failure, once it was declared out; for a joining process, why it is not in yet."""
    declared: bool = False
    """Whether the coordinator has declared it out."""
    joins: bool = False
    """Whether it is to join the running job and has not yet: to end then is to fail, with any status."""
    move: int = 0
    """Number of the move that it was started for."""
    kill_at: float | None = None
    """Time at which it is killed, after it has announced its end."""

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def lives(self) -> bool:
        return self.status is None


@dataclass(frozen=True)
class Job:
    """The work of a launcher. `command` is a worker's; `environ` its environment but for the ranks.

    `ranks` are the global ranks of this host's workers, `size` the number of workers of all hosts. With `joining` the
    job runs already, and these join it. The `leader` shows the events of the whole job, the other hosts those of their
    own workers.
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
    first_local: int = 0
    local_size: int | None = None
    places: int = 0
    """Processes that this host can start in the job's next life."""
    folder: Path = Path()
    """The working directory of all processes."""


class Processes:
    """The processes of this host.

    Args:
        say: gets each line for the user.

    Attributes:
        workers: each rank's latest process.
        lives: all processes, in the order in which they were started.
        devices: local rank of every rank that is started here, or is to be.
    """

    def __init__(self, job: Job, say: Say) -> None:
        self.job = job
        self.workers: dict[int, WorkerProcess] = {}
        self.lives: list[WorkerProcess] = []
        self.devices = {rank: index for index, rank in enumerate(job.ranks, job.first_local)}
        self._say = say
        self._memory = HostMemory.create()

    @property
    def host(self) -> str:
        """Name that tells hosts apart, also several of one host name (containers, network namespaces)."""
        return f"{socket.gethostname()}/{self.job.environ.get('GROUP_RANK', '0')}"

    def spawn(self, rank: int, out: str | None = None, move: int = 0) -> WorkerProcess:
        """Start a process for `rank`; if `out`, the process is to join. Raises OSError."""
        environ = {
            **self.job.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(self.devices[rank]),
            "WORLD_SIZE": str(self.job.size),
            "LOCAL_WORLD_SIZE": str(self.job.local_size or len(self.job.ranks)),
            HOST: self.host,
        }
        if out is not None:
            environ[JOINING] = "1"
        if self._memory is not None:
            environ[MEMORY] = self._memory.address
        child = Child(self.job.command, environ, self.log(rank),
                      keep=() if self._memory is None else (self._memory.descriptor,))
        if rank in self.workers:
            self.workers[rank].child.release()
        if child.unlogged is not None:
            self._say(f"rank {rank}: {child.unlogged}: what it prints is lost")
        self.workers[rank] = WorkerProcess(rank, child, out=out, joins=out is not None, move=move)
        self.lives.append(self.workers[rank])
        return self.workers[rank]

    def log(self, rank: int) -> Path:
        """Log file of this rank's processes."""
        return self.job.run_dir / f"worker-{rank}.log"

    def mine(self, rank: int, pid: int) -> WorkerProcess | None:
        """The worker of this rank, if its process is `pid`."""
        worker = self.workers.get(rank)
        return worker if worker is not None and worker.pid == pid else None

    def live(self) -> list[WorkerProcess]:
        """The workers whose process has not ended."""
        return [worker for worker in self.workers.values() if worker.lives]

    def shown(self) -> list[int]:
        """Ranks in the order of preference for being shown as the first."""
        return [worker.rank for worker in self.live() if worker.out is None] or list(self.workers)

    def signal_all(self, number: int) -> None:
        for worker in self.live():
            worker.child.signal(number)

    def kill_late(self) -> None:
        """Kill failed processes that take too long to end, to free their rank and device."""
        for worker in self.workers.values():
            if worker.kill_at is not None and time.monotonic() >= worker.kill_at:
                worker.kill_at = None
                if worker.lives:
                    self._say(f"rank {worker.rank} (pid {worker.pid}) has failed and does not end: SIGKILL")
                    worker.child.signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill all live processes: none stays behind."""
        self.signal_all(signal.SIGKILL)
        for worker in self.live():
            worker.status = worker.child.wait(10.0)

    def release(self) -> None:
        """Close the descriptors of ended processes."""
        for worker in self.workers.values():
            worker.child.release()
        if self._memory is not None:
            self._memory.close()
