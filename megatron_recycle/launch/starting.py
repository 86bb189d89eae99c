"""The processes that a launcher starts while the job runs: in place of failed ones, and for workers that move."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping

from megatron_recycle.errors import RecycleError
from megatron_recycle.launch.processes import NOT_JOINED, Processes, Say, WorkerProcess
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Exited
from megatron_recycle.membership.protocol import Message

_CUT_OFF = FailureKind.UNREACHABLE
"""The failure of workers whose host was out of reach: nothing is wrong with them."""


class Starts:
    """The launcher's memory of the ranks that it starts beside its own, each on the device of another.

    Args:
        devices: local rank of each rank of this host.
    """

    def __init__(self, devices: Mapping[int, int]) -> None:
        self.devices = dict(devices)
        """Local rank of every rank that this launcher has started or is to start."""
        self._due: list[int] = []
        self._moving: set[int] = set()
        self._numbers: dict[int, int] = {}

    def begin(self, rank: int, beside: int, number: int) -> None:
        """The worker of rank ``beside`` moves: its successor is to be started, once, however often that is told."""
        if self._numbers.get(rank) != number:
            self._numbers[rank] = number
            self.devices[rank] = self.devices[beside]
            self._due.append(rank)
            self._moving.add(rank)

    def number(self, rank: int) -> int:
        """Which move it is that this rank's process is started for; 0 for none."""
        return self._numbers.get(rank, 0)

    def due(self) -> list[int]:
        """The ranks to be started now, each named once."""
        found, self._due = self._due, []
        return found

    def later(self, rank: int) -> None:
        """Its earlier process still ends."""
        self._due.append(rank)

    def awaited(self, rank: int) -> bool:
        """Whether this rank's process of a move is still to be started: what ends now made room for it."""
        return rank in self._due

    def moves(self, rank: int) -> bool:
        """Whether this rank's process belongs to a move that is under way."""
        return rank in self._moving

    def end(self, rank: int) -> None:
        """The move is over, well or not."""
        self._moving.discard(rank)
        self._due = [other for other in self._due if other != rank]

    def others(self, rank: int) -> list[int]:
        """Ranks that share this one's device."""
        return [other for other, device in self.devices.items() if device == self.devices[rank] and other != rank]


class Starting:
    """Starts processes while the job runs.

    Args:
        spawn: starts a process for a rank that is out for this reason, for the move of this number (0: none). Raises
            RecycleError or OSError.
        tell: gets what the coordinator is to hear, also after a reconnect.
    """

    def __init__(self, processes: Processes, restarts: Restarts, starts: Starts, say: Say,
                 spawn: Callable[[int, str, int], None], tell: Callable[[Message], None]) -> None:
        self._processes = processes
        self._restarts = restarts
        self._starts = starts
        self._say = say
        self._spawn = spawn
        self._tell = tell

    def failed(self, worker: WorkerProcess) -> None:
        """Decide whether it is to be started again; not beside another process on its device."""
        if self._starts.awaited(worker.rank):
            return
        self._starts.end(worker.rank)
        workers = self._processes.workers
        alone = not any(workers[rank].lives for rank in self._starts.others(worker.rank) if rank in workers)
        if alone and worker.out == _CUT_OFF:
            self._restarts.cut_off(worker.rank, time.monotonic(), str(worker.child.log))
        elif alone:
            self._restarts.ended(worker.rank, time.monotonic(), str(worker.child.log))
        elif not (worker.move and worker.out == NOT_JOINED):  # the worker that was to move trains where it was
            self._restarts.replaced(worker.rank)

    def again(self) -> None:
        """Start the processes whose time it is. Call it only while the coordinator could let them in."""
        workers = self._processes.workers
        if any(worker.out == _CUT_OFF and worker.kill_at is not None for worker in self._processes.live()):
            return
        due = sorted(self._restarts.due(time.monotonic()))
        if back := [rank for rank in due if workers[rank].out == _CUT_OFF]:
            places = "place is" if len(back) == 1 else f"{len(back)} places are"
            self._say(f"this host's {places} free again: rejoining (rank {', '.join(map(str, back))})")
        for rank in due:
            self._try(rank, workers[rank].out or FailureKind.EXIT)

    def moves(self) -> None:
        """Start the processes of other stages that workers of this host move to."""
        for rank in self._starts.due():
            before = self._processes.workers.get(rank)
            if before is None or not before.lives:
                self._try(rank, NOT_JOINED, self._starts.number(rank))
            else:
                before.child.signal(signal.SIGKILL)  # declared out: its successor needs its name
                self._starts.later(rank)

    def begin_move(self, rank: int, beside: int, number: int) -> None:
        """The worker of rank ``beside`` moves to the place of ``rank``."""
        self._starts.begin(rank, beside, number)

    def drop_move(self, rank: int, number: int) -> None:
        """Nothing comes of this move: its process ends."""
        if number != self._starts.number(rank):
            return
        worker = self._processes.workers.get(rank)
        if self._starts.moves(rank) and worker is not None and worker.out is not None:
            worker.child.signal(signal.SIGKILL)
        self._starts.end(rank)

    def joined(self, worker: WorkerProcess) -> None:
        """It takes part in the training."""
        self._starts.end(worker.rank)
        worker.out, worker.joins = None, False
        self._restarts.joined(worker.rank)

    def _try(self, rank: int, out: str, move: int = 0) -> None:
        """Start one more process in a job that runs: that it cannot be started costs nobody else anything."""
        try:
            self._spawn(rank, out, move)
        except (RecycleError, OSError) as error:
            self._say(f"rank {rank} cannot be started: {error}")
            log = str(self._processes.log(rank))
            if move:
                self._starts.end(rank)
                self._tell(Exited(rank, 0, 1, time.time(), log, move))
            elif out == _CUT_OFF:
                self._restarts.cut_off(rank, time.monotonic(), log)
            else:
                self._restarts.ended(rank, time.monotonic(), log)
