"""Communicators with one queue each, over sockets of the loopback interface.

A queue's operations run one after the other; its thread is the stream. A transfer runs once both ends have it at the
head: the receiver says so, the sender then sends. A dead peer is silent: its operations stay pending for ever.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.runtime.comm.rendezvous import CONNECTING
from tests.nccl_rules.rules import Rules

_HEAD = struct.Struct("!cQ")
_READY, _DATA, _READ, _FIRST, _COLLECTIVE = b"R", b"D", b"A", b"F", b"C"
ABORTED = "NCCL communicator was aborted"


class Link:
    """The wire to one peer on one communicator; a reader thread takes in what it says."""

    def __init__(self, changed: threading.Condition, peer: int, wire: socket.socket) -> None:
        self.peer = peer
        self.ready = 0  # receives that have come to the head of the peer's queue
        self.sent = self.taken = self.unread = 0
        self.inbox: deque[bytes] = deque()
        self.collectives: deque[bytes] = deque()
        self.used: set[bytes] = set()  # directions that this worker has come to, as its peer names them
        self.peer_used: set[bytes] = set()
        self.numbers = {"send": count(), "receive": count()}
        self._changed = changed
        self._wire = wire
        self._sending = threading.Lock()
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._read, name="ordered-reader", daemon=True).start()

    def push(self, kind: bytes, payload: bytes = b"") -> None:
        with self._sending, contextlib.suppress(OSError):
            self._wire.sendall(_HEAD.pack(kind, len(payload)) + payload)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        self._wire.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                kind, size = _HEAD.unpack(self._exactly(_HEAD.size))
                payload = self._exactly(size)
                with self._changed:
                    self._take_in(kind, payload)
                    self._changed.notify_all()

    def _take_in(self, kind: bytes, payload: bytes) -> None:
        if kind == _READY:
            self.ready += 1
        elif kind == _DATA:
            self.inbox.append(payload)
        elif kind == _READ:
            self.unread -= int(payload)
        elif kind == _FIRST:
            self.peer_used.add(payload)
        elif kind == _COLLECTIVE:
            self.collectives.append(payload)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._wire.recv(min(1 << 20, size - len(data)))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


@dataclass
class Transfer:
    """One send or receive. There are no tags: the k-th send of a direction meets the k-th receive."""

    kind: str
    tensor: torch.Tensor
    link: Link
    number: int = -1

    def begin(self) -> None:
        self.number = next(self.link.numbers[self.kind])
        if self.kind == "receive":
            self.link.push(_READY)

    def go_on(self, buffer: int) -> bool:
        """Whether it is over. The tensor is read and written now, not when the transfer was asked for."""
        link = self.link
        if self.kind == "receive":
            if link.taken != self.number or not link.inbox:
                return False
            data = link.inbox.popleft()
            link.taken += 1
            fill(self.tensor, data, f"rank {link.peer}")
            link.push(_READ, str(len(data)).encode())
            return True
        size = self.tensor.nbytes
        if link.sent != self.number or not (link.ready > self.number or link.unread + size <= buffer):
            return False
        link.sent += 1
        link.unread += size
        link.push(_DATA, bytes_of(self.tensor))
        return True

    def __str__(self) -> str:
        way = "send to" if self.kind == "send" else "receive from"
        return f"{way} {self.link.peer} ({self.tensor.nbytes} B)"


class OrderedWork(dist._Work):  # type: ignore[misc, name-defined, unused-ignore]
    """A handle. After an abort it says what NCCL's says: that all is well, or an error if `Rules.garbage` is off.

    ``results`` are the tensors that it writes.
    """

    def __init__(self, what: str, transfers: Sequence[Transfer], collective: Callable[[Queue], bool] | None,
                 results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.transfers, self.collective, self.results = tuple(transfers), collective, tuple(results)
        self.begun = time.monotonic()
        self.over = threading.Event()
        self.failure = ""
        self._what = what

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set()

    def exception(self) -> None:
        return None

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not self.over.wait(limit):
            raise dist.DistBackendError(f"{self} timed out in blocking wait")
        if self.failure:
            raise dist.DistBackendError(self.failure)
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.wait()
        future.set_result(list(self.results))
        return future

    def __str__(self) -> str:
        return " + ".join(map(str, self.transfers)) or self._what


@dataclass(eq=False)
class Queue:
    """One communicator on one worker: its links, what is queued, and the thread that works it off."""

    key: str
    rank: int
    size: int
    rules: Rules
    links: dict[int, Link] = field(default_factory=dict)
    waiting: deque[OrderedWork] = field(default_factory=deque)
    now: OrderedWork | None = None
    aborted: bool = False
    closed: bool = False
    last: float = field(default_factory=time.monotonic)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        threading.Thread(target=self._work, name=f"ordered-stream-{self.key}", daemon=True).start()

    def add(self, work: OrderedWork) -> OrderedWork:
        with self.changed:
            if self.aborted:
                raise dist.DistBackendError(ABORTED)
            self.waiting.append(work)
            self.changed.notify_all()
        return work

    def connect(self, transfers: Sequence[Transfer]) -> None:
        """Meet the counterparts of first transfers, in the calling thread."""
        frees = self.rules.apart
        needed = []
        for transfer in transfers:
            own, other = (b"out", b"in") if transfer.kind == "send" else (b"in", b"out")
            if own not in transfer.link.used:
                if self.rules.apart and threading.current_thread().name != CONNECTING:
                    raise AssertionError(f"{transfer} is the first of its pair, and nobody can leave it")
                transfer.link.used.add(own)
                transfer.link.push(_FIRST, own)
                needed.append((transfer.link, other))
        with self.changed:
            self.changed.wait_for(lambda: self.closed or (frees and self.aborted)
                                  or all(way in link.peer_used for link, way in needed))
            if self.aborted:
                raise dist.DistBackendError(ABORTED)

    def abort(self) -> None:
        with self.changed:
            self.aborted = True
            for work in [*([self.now] if self.now else []), *self.waiting]:
                if not work.over.is_set():
                    self._spoil(work)
                    work.over.set()
            self.waiting.clear()
            self.now = None
            self.changed.notify_all()

    def _spoil(self, work: OrderedWork) -> None:
        if not self.rules.garbage:
            work.failure = ABORTED
        for tensor in work.results:
            with torch.no_grad():
                tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 113)

    def drain(self) -> None:
        """Wait for whatever is pending, as destroy_process_group() does."""
        with self.changed:
            self.changed.wait_for(lambda: self.aborted or (self.now is None and not self.waiting))

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for link in self.links.values():
            link.close()

    def exchange(self, signature: Any, mine: bytes, fold: Callable[[list[bytes]], list[bytes]]) -> bytes | None:
        """One collective: rank 0 gets everybody's bytes and deals out the results; None after an abort.

        Ranks that call different ones hang.
        """
        if self.rank:
            self.links[0].push(_COLLECTIVE, pickle.dumps((signature, mine)))
            return self._next_of(self.links[0])
        given = [mine]
        for peer in range(1, self.size):
            if (data := self._next_of(self.links[peer])) is None:
                return None
            other, theirs = pickle.loads(data)
            if other != signature:
                with self.changed:
                    self.changed.wait_for(lambda: self.aborted)
                return None
            given.append(theirs)
        results = fold(given)
        for peer in range(1, self.size):
            self.links[peer].push(_COLLECTIVE, results[peer])
        return results[0]

    def _next_of(self, link: Link) -> bytes | None:
        with self.changed:
            self.changed.wait_for(lambda: self.aborted or link.collectives)
            return None if self.aborted else link.collectives.popleft()

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.aborted or self.waiting)
                if self.aborted:
                    return
                work = self.now = self.waiting.popleft()
            if work.collective is not None:
                work.collective(self)
            else:
                self._transfer(work)
            with self.changed:
                if self.aborted:
                    return
                self.now, self.last = None, time.monotonic()
                work.over.set()
                self.changed.notify_all()

    def _transfer(self, work: OrderedWork) -> None:
        for transfer in work.transfers:
            transfer.begin()
        left = list(work.transfers)
        with self.changed:
            while left and not self.aborted:
                after = [transfer for transfer in left if not transfer.go_on(self.rules.buffer)]
                if len(after) == len(left):
                    self.changed.wait()
                left = after


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fill(tensor: torch.Tensor, data: bytes, source: str) -> None:
    if len(data) != tensor.nbytes:
        raise AssertionError(f"{len(data)} bytes from {source} for a tensor of {tensor.nbytes}: messages are mixed up")
    if data:
        with torch.no_grad():
            tensor.detach().view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
