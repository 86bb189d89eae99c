"""The job to be hurt: its progress, and which processes are really its own.

A pid from a file may belong to another process by now. A process counts as a worker only if the job's events name its
pid, it was there at the time of the event, and its environment names no other job. The signal goes through a descriptor
that was opened before these checks.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_recycle.environment import COORDINATORS_MODULE, Launched
from megatron_recycle.errors import RecycleError
from megatron_recycle.membership.names import in_order
from megatron_recycle.observe.events import EventReader
from megatron_recycle.observe.holds import started_ticks

_PROC = Path("/proc")
_CLOCK_SLACK = 1.0
"""Seconds by which the clock may have been set since the process started."""


class ChaosError(RecycleError):
    """A refusal; the message is the one line that the user sees."""


@dataclass(frozen=True)
class TargetProcess:
    """A worker's process as the job's events name it; `t` is the time of the event (Unix seconds)."""

    worker: str
    rank: int
    pid: int
    t: float
    host: str | None = None


@dataclass
class TargetJob:
    """A job by its run directory, followed through its events.

    Attributes:
        workers: for each position of the grid, its current or last process.
        out: positions that were declared out, or whose worker has left.
        committed: the last committed iteration; -1 before the first.
        grid: (stages, micro-batches of each pipeline) of the plan file, once training has begun.
    """

    run_dir: Path
    workers: dict[str, TargetProcess] = field(default_factory=dict)
    out: set[str] = field(default_factory=set)
    committed: int = -1
    ended: bool = False
    grid: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events = EventReader(self.run_dir / "events.jsonl")

    def follow(self) -> None:
        """Take in the events since the last call."""
        for event in self._events.new():
            self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        if name == "started":
            self.grid = event["grid"]
            hosts = event.get("hosts", {})
            for worker, pid in event["pids"].items():
                self.workers[worker] = TargetProcess(worker, event["ranks"][worker], pid, event["t"], hosts.get(worker))
        elif name == "joined" and "pid" in event:
            worker = event["worker"]
            self.workers[worker] = TargetProcess(worker, event["rank"], event["pid"], event["t"], event.get("host"))
            self.out.discard(worker)
        elif name == "left" or (name == "suspected" and event.get("removed", True)):
            self.out.add(event["worker"])
        elif name == "committed":
            self.committed = max(self.committed, event["iteration"])
        elif name == "finished":
            self.ended = True

    def processes(self, worker: str) -> tuple[str, ...]:
        """Names of `worker`'s processes: all its parts where workers have parts, unless it is one itself."""
        return tuple(in_order(name for name in self.workers if name.startswith(f"{worker}."))) or (worker,)

    def process(self, worker: str) -> TargetProcess:
        """The process of `worker`. Raises ChaosError: there is none, or the job has ended."""
        if self.ended:
            raise ChaosError(f"the job in {self.run_dir} has ended")
        if not self.workers:
            raise ChaosError(f"the job in {self.run_dir} has not begun to train: its events.jsonl names no workers yet")
        if worker not in self.workers:
            raise ChaosError(f"the job in {self.run_dir} has no worker {worker}; it has "
                             f"{', '.join(in_order(self.workers))}")
        return self.workers[worker]

    @contextmanager
    def held(self, worker: str) -> Iterator[int]:
        """A pidfd of `worker`'s process, checked. Raises ChaosError if it is not a live worker of this job."""
        process = self.process(worker)
        if process.host not in (None, socket.gethostname(), _host_of(process.pid)):
            raise ChaosError(f"worker {worker} runs on host {process.host}: run `recycle chaos` there")
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError as error:
            raise ChaosError(f"worker {worker} (pid {process.pid}) has ended") from error
        try:
            if (reason := self._stranger(process)) is not None:
                raise ChaosError(f"pid {process.pid} is not worker {worker} of the job in {self.run_dir}: {reason}")
            yield descriptor
        finally:
            os.close(descriptor)

    def _stranger(self, process: TargetProcess) -> str | None:
        """Why `process.pid` is not that worker any more; None if it is."""
        try:
            started, launched = started_at(process.pid), launched_as(process.pid)
        except PermissionError:
            return "it belongs to another user"
        except OSError:
            return "it has ended"
        if started > process.t + _CLOCK_SLACK:
            return f"it started {started - process.t:.0f} s after the job's worker had been there"
        if launched.run_dir is not None and not self._is_ours(process.pid, launched.run_dir):
            return f"it belongs to the job in {launched.run_dir}"
        rank = launched.rank
        return None if rank in (None, process.rank) else f"it is rank {rank}, not {process.rank}"

    def _is_ours(self, pid: int, named: str) -> bool:
        folder = Path(os.readlink(_PROC / str(pid) / "cwd")) / named
        return folder.resolve() == self.run_dir.resolve()

    def coordinator(self) -> int:
        """Pid of this job's coordinator. Raises ChaosError if there is none on this host."""
        for entry in _PROC.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                place = words.index("--run-dir") if COORDINATORS_MODULE in words else -1
                if place > 0 and self._is_ours(int(entry.name), words[place + 1]):
                    return int(entry.name)
            except (OSError, IndexError, ValueError):
                continue  # it has ended meanwhile, or is another user's
        raise ChaosError(f"the job in {self.run_dir} has no coordinator on this host")

    def signal(self, workers: Iterable[str], number: signal.Signals) -> list[TargetProcess]:
        """Send a signal to the processes of `workers`, all together, and to no other. Raises ChaosError."""
        with ExitStack() as stack:
            descriptors = {worker: stack.enter_context(self.held(worker)) for worker in workers}
            for worker, descriptor in descriptors.items():
                try:
                    signal.pidfd_send_signal(descriptor, number)
                except OSError as error:
                    raise ChaosError(f"worker {worker} (pid {self.workers[worker].pid}): {error.strerror}") from error
        return [self.workers[worker] for worker in descriptors]


def _host_of(pid: int) -> str | None:
    """The host's name in the process's environment."""
    try:
        return launched_as(pid).host
    except OSError:
        return None


def started_at(pid: int) -> float:
    """Start time of a process (Unix seconds). Raises OSError if there is none."""
    if (ticks := started_ticks(pid)) is None:
        raise ProcessLookupError(pid)
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def launched_as(pid: int) -> Launched:
    """The start of another process, from its environment. Raises OSError."""
    text = (_PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    return Launched.read(dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry))
