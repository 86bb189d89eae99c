"""A torch.distributed backend for CPU tensors that keeps to NCCL's rules of order.

It shows on a machine without a GPU what would hang, or go on with garbage, on one with GPUs: operations of a
communicator run in the order in which they were asked for, there are no tags, nobody hears of a dead peer, and what an
abort ends looks like a success. Modelled after ProcessGroupNCCL.cpp of torch 2.11 and 2.13 and NCCL 2.28 (group.cc,
transport.cc, init.cc). Hidden: hosts that run ahead of their stream, streams themselves, the allocator, kernels for
want of multiprocessors, aborts while another thread is inside NCCL, and times.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.fakes.network.schedule import frames
from tests.nccl_rules.queues import Link, OrderedWork, Queue, Transfer, bytes_of, fill
from tests.nccl_rules.rules import Rules

NAME = "ordered"
_groups: weakref.WeakSet[OrderedGroup] = weakref.WeakSet()


def register(rules: Rules) -> None:
    """Make the backend known to torch under `NAME`, once per process."""
    if NAME.upper() in dist.Backend._plugins:
        return

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> OrderedGroup:
        return OrderedGroup(store, rank, size, timeout, rules)

    dist.Backend.register_backend(NAME, create, devices=["cpu"])
    if rules.stuck:
        threading.Thread(target=_tell_when_stuck, args=(rules.stuck,), name="ordered-monitor", daemon=True).start()


class OrderedGroup(dist.ProcessGroup):
    """The workers of one process group; see the module's text and `Rules`."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, rules: Rules) -> None:
        super().__init__(rank, size)
        self.rules, self.queues, self.aborted = rules, dict[str, Queue](), False
        self.blocked: list[str] = []
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._batch: list[tuple[str, torch.Tensor, int]] | None = None
        self._lock = threading.Lock()
        self._label = ""
        self._collectives = 0
        _groups.add(self)
        if rules.watchdog:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="ordered-watchdog", daemon=True).start()

    # ---- for torch

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives

    @property
    def group_name(self) -> str:
        self._label = self._label or str(dist.distributed_c10d._world.pg_names.get(self, ""))
        return self._label

    pg_name = group_name

    # ---- transfers

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> OrderedWork | None:
        return self._transfer("send", tensors, peer)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> OrderedWork | None:
        return self._transfer("receive", tensors, peer)

    def _transfer(self, kind: str, tensors: Sequence[torch.Tensor], peer: int) -> OrderedWork | None:
        tensor, = tensors
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if self._batch is not None:
            self._batch.append((kind, tensor, peer))
            return None
        return self._start(self._whole() if self.rules.eager else self._pair(peer), [(kind, tensor, peer)])

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> OrderedWork | None:
        asked, self._batch = self._batch or [], None
        return self._start(self._whole(), asked) if asked else None

    def _start(self, queue: Queue, asked: Sequence[tuple[str, torch.Tensor, int]]) -> OrderedWork:
        transfers = [Transfer(kind, tensor, queue.links[peer]) for kind, tensor, peer in asked]
        if self.rules.connecting:
            with self._blocking(f"connects {' + '.join(map(str, transfers))}, until the peer comes to its counterpart"):
                queue.connect(transfers)
        return queue.add(OrderedWork("batch", transfers, None, [each.tensor for each in transfers
                                                                if each.kind == "receive"]))

    # ---- collectives

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None, *rest: Any) -> OrderedWork:
        operation = getattr(opts, "reduceOp", opts) or dist.ReduceOp.SUM

        def fold(given: list[bytes]) -> list[bytes]:
            return [bytes_of(_reduce([_like(tensors[0], data) for data in given], operation))] * len(given)

        return self._collective("allreduce", tensors[0], tensors[0], fold)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> OrderedWork:
        return [self.allreduce([tensor], opts) for tensor in tensors][-1]

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> OrderedWork:
        root = 0 if opts is None else opts.rootRank
        return self._collective(f"broadcast from {root}", tensors[0], tensors[0],
                                lambda given: [given[root]] * len(given))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> OrderedWork:
        def fold(given: list[bytes]) -> list[bytes]:
            total = bytes_of(_reduce([_like(tensors[0], data) for data in given], opts.reduceOp))
            return [total if rank == opts.rootRank else data for rank, data in enumerate(given)]

        return self._collective("reduce", tensors[0], tensors[0], fold)

    def barrier(self, opts: Any = None) -> OrderedWork:
        return self.allreduce([torch.zeros(1)])

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor],
                  opts: Any = None) -> OrderedWork:
        whole = torch.empty((self._size, *inputs[0].shape), dtype=inputs[0].dtype)

        def spread() -> None:
            for target, source in zip(outputs[0], whole, strict=True):
                target.copy_(source)

        return self._collective("allgather", inputs[0], whole, lambda given: [b"".join(given)] * len(given), spread)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> OrderedWork:
        return self._collective("allgather", given, output, lambda every: [b"".join(every)] * len(every))

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> OrderedWork:
        operation = getattr(opts, "reduceOp", None) or dist.ReduceOp.SUM

        def fold(every: list[bytes]) -> list[bytes]:
            total = _reduce([_like(given, data) for data in every], operation).flatten()
            return [bytes_of(piece.contiguous()) for piece in total.chunk(len(every))]

        return self._collective("reduce_scatter", given, output, fold)

    reduce_scatter_single = _reduce_scatter_base

    def _collective(self, what: str, given: torch.Tensor, into: torch.Tensor,
                    fold: Callable[[list[bytes]], list[bytes]],
                    after: Callable[[], None] = lambda: None) -> OrderedWork:
        signature = (what, given.numel(), str(given.dtype))
        self._collectives += 1

        def run(queue: Queue) -> bool:
            result = queue.exchange(signature, bytes_of(given), fold)
            if result is None:
                return False
            fill(into, result, what)
            after()
            return True

        return self._whole().add(OrderedWork(f"{what} {given.nbytes} B", (), run, [into]))

    # ---- communicators

    def connect(self) -> None:
        """Make what is made at a first use, if that is one communicator for everything; all members come here."""
        if self.rules.eager and self._size > 1:
            self._whole()

    def _pair(self, peer: int) -> Queue:
        low, high = sorted((self._rank, peer))
        key = f"{low}:{high}"
        if key not in self.queues:
            with self._blocking(f"makes the communicator of ranks {key}, until {peer} comes"):
                queue = Queue(key, self._rank, self._size, self.rules)
                wire = self._accept(key) if self._rank == low else self._dial(key)
                queue.links[peer] = Link(queue.changed, peer, wire)
                self.queues[key] = queue
        return self.queues[key]

    def _whole(self) -> Queue:
        if "all" not in self.queues:
            with self._blocking("makes the group's communicator, until all members come"):
                queue = Queue("all", self._rank, self._size, self.rules)
                for low in range(self._rank):
                    queue.links[low] = Link(queue.changed, low, self._dial(f"all {low}-{self._rank}"))
                for high in range(self._rank + 1, self._size):
                    queue.links[high] = Link(queue.changed, high, self._accept(f"all {self._rank}-{high}"))
                self.queues["all"] = queue
        return self.queues["all"]

    def _accept(self, key: str) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._store.set(key, str(server.getsockname()[1]))
            wire, _ = server.accept()  # for ever: NCCL cannot be aborted here
            return wire

    def _dial(self, key: str) -> socket.socket:
        try:
            port = int(self._store.get(key))
        except RuntimeError as error:
            raise dist.DistBackendError(f"[{self._rank}] is setting up NCCL communicator and retrieving ncclUniqueId "
                                        f"via c10d key-value store by key '{key}', but got error: {error}") from error
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:  # the peer died in between
                time.sleep(0.1)

    @contextlib.contextmanager
    def _blocking(self, text: str) -> Iterator[None]:
        self.blocked.append(text)
        try:
            yield
        finally:
            self.blocked.remove(text)

    # ---- the end

    def abort(self) -> None:
        with self._lock:
            if self.aborted:
                return
            assert self.group_name is not None  # torch forgets it
            self.aborted = True
        for queue in list(self.queues.values()):
            queue.abort()

    def shutdown(self) -> None:
        if not self.aborted:
            for queue in list(self.queues.values()):
                with self._blocking(f"waits at destroy_process_group() for what is pending on {queue.key}"):
                    queue.drain()
            self.abort()
        for queue in list(self.queues.values()):
            queue.close()


def pending() -> list[str]:
    """What is pending in this process, one line per queue, its head first."""
    lines = []
    for group in list(_groups):
        label = f"{group.group_name or 'group'} rank {group.rank()}/{group.size()}"
        lines += [f"{label}: a thread {text}" for text in list(group.blocked)]
        for queue in list(group.queues.values()):
            works = [str(work) for work in [queue.now, *list(queue.waiting)] if work is not None]
            if works:
                lines.append(f"{label}, queue {queue.key}: {' < '.join(works)}")
    return lines


def _last_progress() -> float:
    queues = [queue for group in list(_groups) for queue in list(group.queues.values())]
    return max((queue.last for queue in queues), default=time.monotonic())


def _tell_when_stuck(seconds: float) -> None:
    told = 0.0
    while True:
        time.sleep(min(1.0, seconds / 4))
        lines, last = pending(), _last_progress()
        if not lines or time.monotonic() - last < seconds or told == last:
            continue
        told = last
        found = frames()
        stacks = "".join(f"--- {thread.name}\n" + "".join(traceback.format_stack(found[thread.ident])[-9:])
                         for thread in threading.enumerate()
                         if thread.ident in found and not thread.name.startswith("ordered"))
        text = "\n".join(lines)
        print(f"==== ordered: pid {os.getpid()}: no operation has ended for {seconds} s\n{text}\n{stacks}====",
              file=sys.stderr, flush=True)


def _watch(reference: weakref.ref[OrderedGroup]) -> None:
    while (group := reference()) is not None:
        limit = group._timeout.total_seconds()
        for queue in list(group.queues.values()):
            for work in [queue.now, *list(queue.waiting)]:
                if work is not None and not work.over.is_set() and time.monotonic() - work.begun > limit:
                    print(f"ordered: watchdog: {work} was pending for more than {limit} s", file=sys.stderr, flush=True)
                    os._exit(134)
        del group
        time.sleep(0.1)


def _like(tensor: torch.Tensor, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape) if data else tensor.clone()


def _reduce(tensors: Sequence[torch.Tensor], operation: Any) -> torch.Tensor:
    ways: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.SUM: torch.add, dist.ReduceOp.AVG: torch.add, dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.PRODUCT: torch.mul}
    way = next(function for kind, function in ways.items() if operation == kind)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = way(total, tensor)
    return total / len(tensors) if operation == dist.ReduceOp.AVG else total
