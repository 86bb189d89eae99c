"""The ends of a communicator in memory, with their posted operations, and the processes that own them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from megatron_recycle.runtime.comm.backend import BACKENDS, Backend, Work
from megatron_recycle.runtime.comm.cancellation import Cancelled, Wait
from megatron_recycle.runtime.comm.life import CancelToken
from megatron_recycle.runtime.comm.tags import Table


class Killed(BaseException):
    """This process is dead: raised in its threads by whatever they ask of the network."""


class Host:
    """A process.

    Attributes:
        rank: its global rank.
        dead: whether it has died: whatever its threads ask of the network raises `Killed`.
        cut: whether nothing reaches it, or anybody from it, without anybody noticing.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.dead = self.cut = False
        self.ends: list[End] = []

    @property
    def reachable(self) -> bool:
        return not (self.dead or self.cut)

    def check(self) -> None:
        """Raises Killed."""
        if self.dead:
            raise Killed(f"the process of rank {self.rank} is dead")


class Rules(Protocol):
    """Rules that decide the fate of operations."""

    def post(self, operation: Operation) -> None: ...

    def post_batch(self, batch: Sequence[Operation]) -> None: ...

    def wait(self, operation: Operation, cancel_token: CancelToken) -> None: ...

    def wake(self, operation: Operation) -> None: ...

    def poll(self, operation: Operation) -> None: ...

    def abort(self, end: End) -> None: ...


class Operation:
    """One send, receive or sum of one end, as a library's work."""

    def __init__(self, end: End, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.end, self.kind, self.tensor, self.peer, self.tag = end, kind, tensor, peer, tag
        self.over = False
        self.error: str | None = None

    def is_completed(self) -> bool:
        self.end.rules.poll(self)
        return self.over or self.end.broken

    def wait(self, limit: timedelta | None = None) -> None:
        self.leave_by(CancelToken())

    def leave_by(self, cancel_token: CancelToken) -> None:
        """Wait until it is over, or ``cancel_token`` is cancelled. Raises Cancelled, RuntimeError."""
        with cancel_token.beside(lambda: self.end.rules.wake(self)):
            self.end.rules.wait(self, cancel_token)
        if not self.over:
            raise Cancelled
        if self.error is not None:
            raise RuntimeError(self.error)

    def __str__(self) -> str:
        if self.kind == "sum":
            return f"{self.end.board.name}: a sum of {self.tensor.numel()}"
        return (f"{self.end.board.name}: a {self.kind} {'to' if self.kind == 'send' else 'from'} its rank {self.peer}, "
                f"{self.end.table.what(self.tag)}, tag {self.tag}")


class Together:
    """The work of a batch."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations

    def is_completed(self) -> bool:
        return all(operation.is_completed() for operation in self._operations)

    def wait(self, limit: timedelta | None = None) -> None:
        self.leave_by(CancelToken())

    def leave_by(self, cancel_token: CancelToken) -> None:
        """As an operation's."""
        for operation in self._operations:
            operation.leave_by(cancel_token)


class Board:
    """The state that the members of a communicator share; ``ordered``: it is one with NCCL's rules."""

    def __init__(self, name: str, size: int, ordered: bool) -> None:
        self.name, self.size, self.ordered = name, size, ordered
        self.ends: dict[int, End] = {}
        self.posted: dict[Any, deque[Callable[[], Operation | None]]] = defaultdict(deque)
        """By kind, sender, receiver and tag: what has no counterpart yet."""
        self.sums: dict[int, dict[int, Operation]] = defaultdict(dict)
        """By their number, and by rank: those that not all have come to."""


class End:
    """One process' end of a communicator, as torch shows it.

    Attributes:
        aborted: whether this end has been.
        closed: ranks to whom the connection is closed.
        queue: batches that are not over, of those that run in the order of posting.
        batch: what has been posted in the batch that is open.
        sums: how many sums have been begun.
    """

    def __init__(self, rules: Rules, process: Host, board: Board, rank: int, table: Table) -> None:
        self.rules, self.process, self.board, self.table = rules, process, board, table
        self._rank = rank
        self.aborted = False
        self.closed: set[int] = set()
        self.queue: deque[Sequence[Operation]] = deque()
        self.batch: list[Operation] | None = None
        self.sums = 0

    @property
    def broken(self) -> bool:
        """Whether NCCL has heard of a member's death: it then calls all completed that is under way."""
        return self.board.ordered and any(end.process.dead for end in self.board.ends.values())

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.board.size

    def name(self) -> str:
        return "memory"

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        return self._post(Operation(self, "send", tensors[0], to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        return self._post(Operation(self, "receive", tensors[0], source, tag))

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        return self._post(Operation(self, "sum", tensors[0], self._rank, -1))

    def _post(self, operation: Operation) -> Operation:
        if operation.kind != "sum" and not any(operation.tag in tags for tags in self.table):
            raise AssertionError(f"{operation}: take the tag from the table")
        if not operation.tensor.is_contiguous():
            raise AssertionError(f"{operation}: the tensor is not contiguous")
        self.rules.post(operation)
        return operation


class InMemory(Backend):
    """How these ends are spoken to."""

    def __init__(self, ordered: bool) -> None:
        self.ordered, self.host, self.quick, self.lazy = ordered, not ordered, not ordered, ordered

    def wait(self, work: Work, limit: timedelta | None, wait: Wait, read: bool) -> None:
        assert isinstance(work, (Operation, Together))
        work.leave_by(wait.cancel_token)

    def abort(self, group: End) -> None:
        group.rules.abort(group)

    def destroy(self, group: End) -> None:
        pass

    def begin_batch(self, group: End) -> None:
        if self.ordered:
            group.batch = []

    def end_batch(self, group: End) -> Work | None:
        batch, group.batch = group.batch, None
        if not batch:
            return None
        group.rules.post_batch(batch)
        return Together(batch)


IN_MEMORY = {False: "memory", True: "memory in order"}
"""The names of both backends, by whether they keep NCCL's rules of order."""
BACKENDS.update({name: InMemory(ordered) for ordered, name in IN_MEMORY.items()})
