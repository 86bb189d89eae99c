"""Communicators of one generation: the one place that calls a communication library.

Libraries raise arbitrary errors when a peer is gone, a connection is closed or a timeout is over, and none names the
culprit. Here every such error becomes `GenerationOver`, with a sentence of what was being done. After an abort no
pending operation counts, even if the library reports success: NCCL does, and leaves anything in the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.backend import Backend, Work
from megatron_recycle.runtime.comm.cancellation import Wait
from megatron_recycle.runtime.comm.ledger import Ledger
from megatron_recycle.runtime.comm.life import CommState, Life
from megatron_recycle.runtime.comm.tags import Table

_ABORT_WAITS = 1.0
"""Seconds that an abort waits for a thread that is posting an operation."""


class failing_ends:
    """A block in which an error of the communication library is the end of the generation: raises GenerationOver.

    Args:
        what: what is being done, for the message; its text is made only if that fails.
        aborted: whether an abort has come meanwhile; the block then fails even if the library raises nothing.
        means: whether an error in the block is the library's; None if nothing else can raise there.
    """

    __slots__ = ("_aborted", "_means", "_what")

    def __init__(self, what: object, aborted: Callable[[], bool] | None = None,
                 means: Callable[[Exception], bool] | None = None) -> None:
        self._what, self._aborted, self._means = what, aborted, means

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is None:
            if self._aborted is not None and self._aborted():
                raise GenerationOver(f"{self._what} was given up: the generation has been ended")
        elif isinstance(error, (RuntimeError, OSError)) and (self._means is None or self._means(error)):
            raise GenerationOver(f"{self._what} failed: {error}") from error


def is_broken(error: Exception) -> bool:
    """Whether the communication library has raised ``error``; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in ("gloo", "pair closure"))


class Pending:
    """An operation under way.

    Keep it and its tensor until it has ended: gloo silently drops a send whose handle is garbage-collected before it
    has been read, and reports completion only to waiters.
    """

    __slots__ = ("__weakref__", "_comm", "_kind", "_open", "_peer", "_tag", "_wait", "_work", "tensor")

    def __init__(self, comm: Comm, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self._comm, self._kind, self._peer, self._tag = comm, kind, peer, tag
        self._work: Work | None = None
        self._wait: Wait | None = None
        self._open = False
        self.tensor = tensor

    def wait(self, read: bool = False, stays: bool = False) -> None:
        """Block until it has ended; the tensor is whole then. Raises GenerationOver when it failed, when the
        communicator has been aborted, whatever the outcome, or when its waits have been cancelled; after a cancellation
        it may be waited for again. ``read``: this is a send that the receiver is known to have got, so no wait is
        needed. ``stays``: this wait is never cancelled."""
        comm = self._comm
        with failing_ends(self, comm.is_aborted):
            with comm.ledger.asking():
                if self._wait is not None and self._wait.begun:
                    self._wait.again()
                elif self._work is not None:
                    self._wait = Wait(comm.life, stays=read or stays)
                    comm.backend.wait(self._work, comm.limit, self._wait, read)
                elif self._open:
                    raise AssertionError("what is started in a batch is waited for after it")
            if self._open:
                self._open = False
                comm.ledger.over()

    def begun(self, work: Work) -> None:
        """The library has begun it; no other operation begins on this communicator meanwhile."""
        self._work, self._open = work, self._kind != "sum"
        self._comm.ledger.begin(self._kind, self._peer)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once. Never blocks."""
        return not self._open if self._work is None else self._work.is_completed()

    def __str__(self) -> str:
        comm = self._comm
        if self._kind == "sum":
            return f"{comm.of}: adding up over {comm.size} workers"
        way = "sending {} to {}" if self._kind == "send" else "receiving {} from {}"
        return f"{comm.of}: {way.format(comm.table.what(self._tag), comm.names[self._peer])}"


def wait_all(pending: Iterable[Pending]) -> None:
    """Block until all have ended, as `Pending.wait`. Raises GenerationOver."""
    for each in pending:
        each.wait()


class Comm:
    """A communicator: some workers that talk to each other in one generation.

    Every method may be called from any thread; only `Pending.wait` blocks, and for a second `abort`, with NCCL for
    longer. All raise GenerationOver.

    Args:
        group: the library's communicator.
        backend: the adapter of that library.
        table: the tags that are used here.
        of: the generation, for messages.
        names: of the members, by rank, for messages.
        identity: a path, unique in the job, that ends with the communicator's name in the generation; empty for a
            communicator that is not this runtime's.
        ledger: operations begun on ``group`` before; None: none.

    Attributes:
        life: its state, and the token that cancels all waits here.
    """

    def __init__(self, group: Any, backend: Backend, table: Table, of: str = "between generations",
                 names: Sequence[str] = (), identity: str = "", ledger: Ledger | None = None) -> None:
        self._group = group
        self.backend = backend
        self.table = table
        self.of = of
        self.identity = identity
        self.names = tuple(names) or tuple(f"rank {rank}" for rank in range(group.size()))
        self.life = Life()
        self.ledger = ledger or Ledger()
        self._batch: list[tuple[Pending, Work]] | None = None

    @property
    def group(self) -> Any:
        """torch's own process group. A caller may do anything with it, so it does not outlive a failure."""
        self.ledger.lent = True
        return self._group

    @cached_property
    def rank(self) -> int:
        """This worker's rank here."""
        rank: int = self._group.rank()
        return rank

    @property
    def name(self) -> str:
        """The communicator's name in its generation."""
        return self.identity.rpartition("/")[2]

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.names)

    @cached_property
    def limit(self) -> timedelta | None:
        """Timeout of an operation; None: the library needs none."""
        return self.backend.limit(self._group)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        """Start sending ``tensor``, contiguous, to member ``to``. Do not write to it before the send has ended."""
        return self._start(Pending(self, "send", tensor, to, tag), lambda: self._group.send([tensor], to, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Start receiving what member ``source`` sends with ``tag`` into ``tensor``, contiguous and of the same size.

        Among several receives with the same tag the first posted gets the tensor that was sent first.
        """
        return self._start(Pending(self, "receive", tensor, source, tag),
                           lambda: self._group.recv([tensor], source, tag))

    def sum(self, tensor: torch.Tensor) -> Pending:
        """Start an all-reduce of ``tensor``, in place, with the same bits on all members. All members issue their sums
        here in the same order."""
        pending = Pending(self, "sum", tensor, self.rank, 0)
        return pending if self.size == 1 else self._start(pending, lambda: self._group.allreduce([tensor]))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """A block whose operations start together when it ends, and may end in any order, also where the library runs
        one after the other. Do not wait inside."""
        what = f"{self.of}: a batch of transfers"
        with self.ledger.lock:
            started: list[tuple[Pending, Work]] = []
            with failing_ends(what, self.is_aborted):
                pass
            with failing_ends(what), self._asking():
                self.backend.begin_batch(self._group)
            self._batch = started
            try:
                yield
            finally:
                # An abort meanwhile changes nothing: operations of another generation must not get into this batch.
                self._batch = None
                with failing_ends(what), self._asking():
                    together = self.backend.end_batch(self._group)
                for pending, own in started:
                    pending._work = own if together is None else together
                if self.backend.ordered and together is not None:
                    self.ledger.watch(self.backend.probe(together), [pending.tensor for pending, _ in started])
            with failing_ends(what, self.is_aborted):
                pass

    @property
    def can_stay(self) -> bool:
        """Whether another generation may go on with it, as far as is known here."""
        return bool(self.identity) and not self.ledger.lent and not self.ledger.gone

    def again(self, of: str) -> Comm:
        """The same communicator for another generation, ``of``: nothing that was done here counts there."""
        return Comm(self._group, self.backend, self.table, of, self.names, self.identity, self.ledger)

    @property
    def aborted(self) -> bool:
        """Whether nothing counts here any more."""
        return not self.life.open

    def is_aborted(self) -> bool:
        return not self.life.open

    def void(self) -> None:
        """Let nothing here count any more, from any thread. Waits go on."""
        self.life.reach(CommState.VOID)

    def leave(self) -> None:
        """Void everything here and free all waiting threads, from any thread. The library's communicator stays, and
        `again` may go on with it."""
        self.life.reach(CommState.LEFT)
        self.life.token.cancel()

    def abort(self) -> None:
        """Make every pending and future operation here fail, from any thread.

        The flag is set first, so that a thread freed by the abort sees it. gloo takes a millisecond for each other
        member; NCCL may take seconds, or never return, if something else on the device is stuck.
        """
        self.void()
        self.ledger.gone = True
        # NCCL must not be inside an operation of this communicator when it is aborted.
        held = self.ledger.lock.acquire(timeout=_ABORT_WAITS)
        try:
            self.backend.abort(self._group)
        finally:
            self.life.reach(CommState.ABORTED)
            if held:
                self.ledger.lock.release()

    def destroy(self) -> None:
        """Free its resources, some time after its abort. Raises nothing."""
        self.backend.destroy(self._group)
        self.life.reach(CommState.DESTROYED)

    def _start(self, pending: Pending, start: Callable[[], Work]) -> Pending:
        with self.ledger.lock, failing_ends(pending, self.is_aborted):
            if self.life.open:
                with self._asking():
                    pending.begun(work := start())
                if self._batch is not None:
                    self._batch.append((pending, work))
                    pending._work = None
                elif self.backend.ordered:
                    self.ledger.watch(self.backend.probe(work), [pending.tensor])
        return pending

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A block in which the library begins an operation; under the lock, so that no abort has come yet."""
        with self.ledger.asking():
            try:
                yield
            except BaseException:
                self.backend.unwind()
                raise
