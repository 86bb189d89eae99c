"""Processes that a launcher starts while the job runs: in place of failed ones, and for workers that move."""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_recycle.launch.processes import NOT_JOINED, Processes, Say, WorkerProcess
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Exited
from megatron_recycle.membership.protocol import Message

_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of a host that has no room for another process at present."""
_CUT_OFF = FailureKind.UNREACHABLE
"""The failure of workers whose host was out of reach: nothing is wrong with them."""


@dataclass
class _Move:
    """The latest move to a rank that this launcher starts beside its own, on the device of another."""

    number: int
    due: bool = True
    """Whether its process is still to be started: the process that ends on the device makes room for it."""
    under_way: bool = True


class Starting:
    """Starts processes while the job runs.

    Args:
        spawn: starts a process for a rank that is out for this reason, for the move of this number (0: none). Raises
            OSError.
        tell: gets messages for the coordinator; they are repeated after a reconnect.
    """

    def __init__(self, processes: Processes, restarts: Restarts, say: Say, spawn: Callable[[int, str, int], None],
                 tell: Callable[[Message], None]) -> None:
        self._processes = processes
        self._restarts = restarts
        self._moves: dict[int, _Move] = {}
        self._say = say
        self._spawn = spawn
        self._tell = tell

    def failed(self, worker: WorkerProcess) -> None:
        """Decide whether to start a failed worker again; not beside another process on its device."""
        move = self._moves.get(worker.rank)
        if move is not None and move.due:
            return
        self._end_move(worker.rank)
        devices = self._processes.devices
        alone = not any(other.lives and devices[other.rank] == devices[worker.rank]
                        for other in self._processes.workers.values() if other.rank != worker.rank)
        if alone:
            self._ended(worker.rank, worker.out)
        elif not (worker.move and worker.out == NOT_JOINED):  # the worker that was to move trains where it was
            self._restarts.replaced(worker.rank)

    def again(self) -> None:
        """Start the processes that are due. Call it only while the coordinator could let them in."""
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
        for rank, move in self._moves.items():
            before = self._processes.workers.get(rank)
            if move.due and (before is None or not before.lives):
                move.due = False
                self._try(rank, NOT_JOINED, move.number)
            elif move.due and before is not None:
                before.child.signal(signal.SIGKILL)  # declared out: its successor needs its name

    def begin_move(self, rank: int, beside: int, number: int) -> None:
        """The worker of rank ``beside`` moves to the place of ``rank``: its successor is to be started. Idempotent."""
        if rank not in self._moves or self._moves[rank].number != number:
            self._moves[rank] = _Move(number)
            self._processes.devices[rank] = self._processes.devices[beside]

    def drop_move(self, rank: int, number: int) -> None:
        """Cancel this move: its process ends."""
        move, worker = self._moves.get(rank), self._processes.workers.get(rank)
        if move is None or move.number != number:
            return
        if move.under_way and worker is not None and worker.out is not None:
            worker.child.signal(signal.SIGKILL)
        self._end_move(rank)

    def _end_move(self, rank: int) -> None:
        """Forget a move that is over, well or not."""
        if (move := self._moves.get(rank)) is not None:
            move.due = move.under_way = False

    def joined(self, worker: WorkerProcess) -> None:
        """The process takes part in the training."""
        self._end_move(worker.rank)
        worker.out, worker.joins = None, False
        self._restarts.joined(worker.rank)

    def _try(self, rank: int, out: str, move: int = 0) -> None:
        """Start one more process in a running job: if it cannot be started, no other worker is affected."""
        try:
            self._spawn(rank, out, move)
        except OSError as error:
            self._say(f"rank {rank} cannot be started: {error}")
            if move:
                self._end_move(rank)
                self._tell(Exited(rank, 0, 1, time.time(), str(self._processes.log(rank)), move))
            elif error.errno in _SHORTAGES:
                self._restarts.later(rank, time.monotonic())
            else:
                self._ended(rank, out)

    def _ended(self, rank: int, out: str | None) -> None:
        ended = self._restarts.cut_off if out == _CUT_OFF else self._restarts.ended
        ended(rank, time.monotonic(), str(self._processes.log(rank)))
