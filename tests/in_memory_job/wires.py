"""The network of a job in memory that tells of everything before it is asked of it, so that somebody may die there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.rendezvous import CONNECTING
from megatron_recycle.runtime.comm.tags import CONTROL, Table
from tests.fakes.network import Fabric, MemoryNetwork
from tests.fakes.network.ends import Board, End, Host, Operation

FirstPairs = Literal["refused", "block", "free"]
_Way = tuple[Board, int, str, int]
"""A communicator, one of its ranks, "send" or "receive", and the rank that it does so to or from."""


@dataclass(frozen=True)
class Asked:
    """The ``nth`` (from 0) time that ``worker`` asks this of the network: to "connect" a communicator, or a send, a
    receive, a sum or a batch on one."""

    worker: str
    what: str
    nth: int

    def __str__(self) -> str:
        return f"{self.worker} at {self.what} {self.nth}"


class Wires(Fabric):
    """Calls ``at(process, what)`` in the thread that asks; ``what`` has the communicator's name and the kind.

    Further rules of NCCL, where a communicator is ordered:

    Args:
        at: see above; may kill.
        busy_aborts: an abort waits for the device, and so for the process' other communicators with something pending,
            until they are being aborted, too. So does the making of one.
        first_uses: a communicator is not made when it is asked for but at its first operation, which waits for all
            members' and can be freed by nobody.
        first_pairs: two members are connected at their first transfer in each direction, inside of which the thread
            waits until the other one comes to its own. "refused": only a thread that can be left behind may come to it,
            and an abort frees that; "block": anybody may, and nothing frees who does; "free": there is no such rule.
    """

    def __init__(self, seed: int, at: Callable[[Host, str], None], *, busy_aborts: bool = True,
                 first_uses: bool = False, first_pairs: FirstPairs = "refused",
                 **options: Any) -> None:
        super().__init__(seed, **options)
        self._at = at
        self._busy_aborts, self._first_uses = busy_aborts, first_uses
        self._first_pairs = first_pairs
        self._used: set[End] = set()
        self._met: set[_Way] = set()
        self._aborting: set[End] = set()

    def end(self, process: Host, key: tuple[str, str], rank: int, size: int, table: Table = CONTROL,
            **options: Any) -> Comm:
        self._at(process, f"connect {key[1]}")
        return super().end(process, key, rank, size, table, **options)

    def connected(self, comm: Comm) -> bool:
        end: End = comm._group
        with self._time.lock:
            if end.board.ordered and self._busy_aborts and (busy := [
                    other for other in end.process.ends if other.board.ordered and self._pending(other)]):
                self._wait(end, f"making {end.board.name}, that {busy[0].board.name} keeps waiting")
                return False
        return self._first_uses or super().connected(comm)

    def post(self, operation: Operation) -> None:
        self._at(operation.end.process, f"{operation.kind} {operation.end.board.name}")
        self._use(operation.end)
        if operation.end.batch is None:
            self._meet([operation])
        super().post(operation)

    def post_batch(self, batch: Sequence[Operation]) -> None:
        self._at(batch[0].end.process, f"batch {batch[0].end.board.name}")
        self._meet(batch)
        super().post_batch(batch)

    def abort(self, end: End) -> None:
        if self._busy_aborts and end.board.ordered:
            with self._time.lock:
                self._aborting.add(end)
                while busy := [other for other in end.process.ends if other.board.ordered and not other.aborted
                               and other not in self._aborting and self._pending(other)]:
                    self._wait(end, f"an abort that {busy[0].board.name} keeps waiting")
        super().abort(end)

    def _use(self, end: End) -> None:
        if self._first_uses and end.board.ordered:
            with self._time.lock:
                self._used.add(end)
                while not all(end.board.ends.get(rank) in self._used for rank in range(end.board.size)):
                    self._wait(end, f"the others' first use of {end.board.name}")

    def _meet(self, operations: Sequence[Operation]) -> None:
        end, transfers = operations[0].end, [each for each in operations if each.kind != "sum"]
        if not end.board.ordered or not transfers or self._first_pairs == "free":
            return
        mine = {(end.board, end.rank(), each.kind, each.peer) for each in transfers}
        with self._time.lock:
            if mine <= self._met:
                return
            if self._first_pairs == "refused" and threading.current_thread().name != CONNECTING:
                raise AssertionError(f"{transfers[0]}: it is the first of its pair, and nobody can leave it")
            self._met |= mine
            self._time.wake()
            theirs = {(board, peer, "send" if kind == "receive" else "receive", rank)
                      for board, rank, kind, peer in mine}
            while not theirs <= self._met:
                if end.aborted and self._first_pairs == "refused":
                    raise RuntimeError("the communicator was aborted")
                self._wait(end, f"its partners' first transfer on {end.board.name}")

    def _wait(self, end: End, what: str) -> None:
        end.process.check()
        self._time.block(f"rank {end.process.rank}", what, 0.001)

    def standing(self) -> str:
        """Who waits for what."""
        with self._time.lock:
            return self._time.standing()

    def stuck(self, threads: Collection[threading.Thread]) -> str:
        """Where everybody stands and what is in the queues, if all ``threads`` wait here and nothing is under way; else
        nothing."""
        with self._time.lock:
            idle = not self._time.flights and self._time.waits(threads)
            return f"{self._time.standing()}\n{self._report()}" if idle else ""


class Deaths:
    """Who dies where, by what is asked of the network; and what is asked at all.

    Args:
        kills: who dies where.
        name_of: the worker that a process is.
    """

    def __init__(self, kills: Sequence[Asked], name_of: Callable[[MemoryNetwork], str]) -> None:
        self.kills = set(kills)
        self.seen = Counter[tuple[str, str]]()
        self._name_of = name_of

    def at(self, process: Host, what: str) -> None:
        """Raises `Killed`, in the network, if ``process`` dies here."""
        assert isinstance(process, MemoryNetwork)
        key = self._name_of(process), what
        number = self.seen[key]
        self.seen[key] += 1
        if Asked(*key, number) in self.kills:
            self.kills.discard(Asked(*key, number))
            process.die()

    def all(self) -> list[Asked]:
        """Every place at which somebody may die in a job that goes as this one did."""
        return [Asked(worker, what, nth) for (worker, what), count in sorted(self.seen.items()) for nth in range(count)]
