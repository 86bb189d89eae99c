"""The wires between all processes of a job in memory: what meets what, and what a death or an abort does to it."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_recycle.runtime.comm.backend import BACKENDS
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.life import CancelToken
from megatron_recycle.runtime.comm.tags import CONTROL, Table
from tests.fakes.network.ends import IN_MEMORY, Board, End, Host, Operation
from tests.fakes.network.schedule import Schedule

_LOOK = 0.001
"""Seconds after which who waits for others to connect looks whether that is still wanted."""

_GARBAGE = 113
"""For whole numbers; others are nan."""

_Get = Callable[[], "Operation | None"]


class Fabric:
    """All communicators of a job.

    Args:
        seed: decides which messages are late, and what of a dead process' messages still arrives.
        ordered: NCCL's rules, but for what travels in CPU memory.
        limit: seconds without any event after which everybody who waits is told `Stuck`.
    """

    def __init__(self, seed: int = 0, *, ordered: bool = False, limit: float = 30.0) -> None:
        self.ordered = ordered
        self._time = Schedule(seed, limit, self._report)
        self._flights = self._time.flights
        self._boards: dict[tuple[str, str], Board] = {}
        self._said: dict[tuple[str, int], Sequence[str]] = {}
        self._meetings: dict[str, dict[int, Host]] = defaultdict(dict)
        self.run = self._time.run

    def comms(self, size: int, table: Table = CONTROL) -> list[Comm]:
        """The ends of one more communicator, of ``size`` new processes."""
        key = "", f"communicator {len(self._boards)}"
        return [self.end(Host(rank), key, rank, size, table) for rank in range(size)]

    def end(self, process: Host, key: tuple[str, str], rank: int, size: int, table: Table, *, host: bool = False,
            of: str = "in memory", names: Sequence[str] = ()) -> Comm:
        """``process``' end of the communicator ``key`` (generation and name), whose others come by themselves."""
        ordered = self.ordered and not host
        with self._time.lock:
            process.check()
            board = self._boards.setdefault(key, Board(key[1], size, ordered))
            end = board.ends[rank] = End(self, process, board, rank, table)
            if not ordered:
                end.closed.update(rank for rank, other in board.ends.items() if other.process.dead or other.aborted)
            process.ends.append(end)
            self._time.wake(board)
        return Comm(end, BACKENDS[IN_MEMORY[ordered]], table, of, names, "/".join(key) if key[0] else "")

    @property
    def communicators(self) -> list[tuple[str, str]]:
        """All that were ever made: generation and name."""
        return list(self._boards)

    def connected(self, comm: Comm) -> bool:
        """Whether all members have come to make ``comm``; waits a moment for them. With NCCL's rules none has it
        before, and one that has died meanwhile is waited for for ever."""
        end: End = comm._group
        with self._time.lock:
            end.process.check()
            there = not end.board.ordered or len(end.board.ends) == end.board.size
            if not there:
                self._time.block(f"rank {end.process.rank}", end.board, _LOOK)
            return there

    def meet(self, process: Host, prefix: str, everyone: Sequence[int], says: Sequence[str] = ()) -> bool:
        """Whether all are where ``prefix`` is built, and alive; waits a moment for them. Each ``says`` some words."""
        with self._time.lock:
            process.check()
            here = self._meetings[prefix]
            if here.get(process.rank) is not process:
                here[process.rank] = process
                self._said[prefix, process.rank] = tuple(says)
                self._time.wake()
            there = all(rank in here and here[rank].reachable for rank in everyone) and process.reachable
            if not there:
                self._time.block(f"rank {process.rank}", f"the others of {prefix}", _LOOK)
            return there

    def heard(self, prefix: str, ranks: Sequence[int]) -> list[Sequence[str]]:
        """What each of ``ranks``, who have met, has said."""
        with self._time.lock:
            return [self._said[prefix, rank] for rank in ranks]

    def die(self, process: Host) -> None:
        """``process`` is no more. Its messages under way arrive, or are lost; the ends of its connections notice by and
        by."""
        with self._time.lock:
            if process.dead:
                return
            for flight in self._flights:
                carried = [each for get in flight.of if (each := get()) is not None]
                if any(each.end.process is process and each.kind == "send" for each in carried):
                    self._flights.take(flight)
                    if self._flights.draw(process.rank, flight.number) % 2:
                        flight.arrive()
                    else:
                        _strand(*flight.of)
            process.dead = True
            for end in process.ends:
                if not end.aborted:
                    self._hang_up(end, "connection closed by peer")
            self._time.wake()

    # ---- operations: Rules

    def post(self, operation: Operation) -> None:
        end = operation.end
        with self._time.lock:
            end.process.check()
            if end.batch is None:
                self._enqueue([operation])
            else:
                end.batch.append(operation)

    def post_batch(self, batch: Sequence[Operation]) -> None:
        with self._time.lock:
            batch[0].end.process.check()
            self._enqueue(batch)

    def wait(self, operation: Operation, cancel_token: CancelToken) -> None:
        process = operation.end.process
        with self._time.lock:
            process.check()
            try:
                while not operation.over and not cancel_token.cancelled:
                    self._time.block(f"rank {process.rank}", operation)
                    process.check()
            finally:
                if self._flights:  # somebody else has to see to them from now on
                    self._time.wake_one()

    def wake(self, operation: Operation) -> None:
        with self._time.lock:
            self._time.wake(operation)

    def poll(self, operation: Operation) -> None:
        with self._time.lock:
            operation.end.process.check()
            self._time.tick()

    def abort(self, end: End) -> None:
        with self._time.lock:
            if end.aborted:
                return
            end.aborted = True
            for operation in self._pending(end):
                self._end(operation, None if end.board.ordered else "the communicator was aborted")
            if not end.process.dead:
                self._hang_up(end, "connection closed by peer: it has aborted")

    # ---- under the lock

    def _enqueue(self, batch: Sequence[Operation]) -> None:
        end = batch[0].end
        if end.aborted:
            raise RuntimeError("the communicator was aborted")
        if end.board.ordered:
            end.queue.append(batch)
        if not end.board.ordered or len(end.queue) == 1:
            self._begin(batch)
        self._time.tick()
        self._time.wake_one()

    def _begin(self, batch: Sequence[Operation]) -> None:
        for operation in batch:
            if operation.kind == "sum":
                self._add(operation)
            else:
                self._match(operation)

    def _match(self, operation: Operation) -> None:
        end, sends = operation.end, operation.kind == "send"
        if operation.peer in end.closed:
            self._end(operation, "connection closed by peer")
            return
        sender, receiver = (end.rank(), operation.peer) if sends else (operation.peer, end.rank())
        channel = sender, receiver, None if end.board.ordered else operation.tag
        # NCCL keeps what was posted; gloo drops what nobody has any more.
        own: _Get = partial(_itself, operation) if end.board.ordered else weakref.ref(operation)
        waiting = end.board.posted["receive" if sends else "send", channel]
        while waiting:
            other = waiting.popleft()
            partner = other()
            if partner is not None and not partner.over:
                send, receive = (own, other) if sends else (other, own)
                self._flights.fly((end.board.name, channel), partial(self._transfer, send, receive), send, receive)
                return
        end.board.posted[operation.kind, channel].append(own)

    def _transfer(self, send: _Get, receive: _Get) -> None:
        one, other = send(), receive()
        if one is None or other is None or one.over or other.over:
            _strand(send, receive)
            return
        if not (one.end.process.reachable and other.end.process.reachable):
            _strand(send, receive)
            return
        if (one.tensor.dtype, one.tensor.numel(), one.tag) != (other.tensor.dtype, other.tensor.numel(), other.tag):
            self._time.give_up(f"what meets does not fit:\n{one}: {_shape(one)}\n{other}: {_shape(other)}")
            return
        _fill(other.tensor, one.tensor)
        self._end(one)
        self._end(other)

    def _add(self, operation: Operation) -> None:
        end, board = operation.end, operation.end.board
        number, end.sums = end.sums, end.sums + 1
        row = board.sums[number]
        row[end.rank()] = operation
        if _neighbours(end.rank(), board.size) & end.closed:
            self._end(operation, "connection closed by peer")
        if len(row) < board.size or any(each.over or not each.end.process.reachable for each in row.values()):
            return
        del board.sums[number]
        shapes = {_shape(each) for each in row.values()}
        if len(shapes) > 1:
            self._time.give_up(f"what is added up does not fit: {board.name}, {', '.join(sorted(shapes))}")
            return
        total = row[0].tensor.detach().clone()
        for rank in range(1, board.size):
            total += row[rank].tensor.detach()
        for rank, each in row.items():
            self._flights.fly((board.name, rank, "sum"), partial(self._sum, each, total), partial(_itself, each))

    def _sum(self, operation: Operation, total: torch.Tensor) -> None:
        if not operation.over and operation.end.process.reachable:
            _fill(operation.tensor, total)
            self._end(operation)

    def _end(self, operation: Operation, error: str | None = None) -> None:
        if operation.over:
            return
        end = operation.end
        operation.over, operation.error = True, error
        if end.aborted and end.board.ordered and operation.kind != "send":
            operation.tensor.detach().fill_(math.nan if operation.tensor.is_floating_point() else _GARBAGE)
        while end.queue and all(each.over for each in end.queue[0]):
            end.queue.popleft()
            if end.queue and not end.aborted:
                self._begin(end.queue[0])
        self._time.wake(operation)

    def _hang_up(self, end: End, why: str) -> None:
        """The others notice, one after the other, that ``end`` has closed its connections; not with NCCL's rules."""
        for rank, other in [] if end.board.ordered else end.board.ends.items():
            if other is not end and not end.process.cut and not other.process.cut:
                self._flights.fly((end.board.name, end.rank(), rank), partial(self._notice, other, end.rank(), why))
        self._time.wake_one()

    def _notice(self, end: End, gone: int, why: str) -> None:
        end.closed.add(gone)
        beside = gone in _neighbours(end.rank(), end.board.size)
        for operation in self._pending(end):
            if beside if operation.kind == "sum" else operation.peer == gone:
                self._end(operation, why)

    def _pending(self, end: End) -> list[Operation]:
        """The operations that ``end`` has posted and that are not over."""
        found: list[Operation | None] = [each for batch in end.queue for each in batch]
        found += [get() for waiting in end.board.posted.values() for get in waiting]
        found += [get() for flight in self._flights for get in flight.of]
        found += [each for row in end.board.sums.values() for each in row.values()]
        return [each for each in dict.fromkeys(found) if each is not None and each.end is end and not each.over]

    def _report(self) -> str:
        """The operations in the queues of each communicator."""
        lines = []
        for board in self._boards.values():
            for end in board.ends.values():
                if waiting := self._pending(end):
                    state = "" if end.process.reachable else " (dead)" if end.process.dead else " (cut off)"
                    lines.append(f"rank {end.process.rank}{state} has {'; '.join(map(str, waiting))}")
        return "\n".join(lines)


def _strand(*gets: _Get) -> None:
    """What these were to meet is gone: they wait until their connection or their communicator is closed."""
    for get in gets:
        operation = get()
        if operation is not None and not operation.over:
            operation.end.board.posted["stranded", None].append(get)


def _itself(operation: Operation) -> Operation:
    return operation


def _neighbours(rank: int, size: int) -> set[int]:
    """The ranks that a ring connects ``rank`` with."""
    return {(rank - 1) % size, (rank + 1) % size}


def _shape(operation: Operation) -> str:
    tensor = operation.tensor
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, tag {operation.tag}"


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.detach().view(-1).copy_(values.detach().view(-1))


