"""Process groups between threads, with the interface that the runtime uses of torch's.

A message may be under way for a while, drawn from a seed: those of one sender to one receiver arrive in their order,
as in a connection, those of others before or after them. A worker that dies closes its connections: what of its
messages is still under way is lost, or not, and whoever waits for it gets an error, as with gloo.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.backend import Backend
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.tags import CONTROL, STAGE, WORLD, Table
from megatron_recycle.runtime.place import Place

LIMIT = 20.0
"""Seconds after which a wait counts as a hang."""


class Broken(dist.DistBackendError):
    """A connection was closed."""


class Delays:
    """Runs functions a little later, in a thread of its own."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._over = False
        threading.Thread(target=self._run, name="memory-delays", daemon=True).start()

    def at(self, moment: float, function: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._numbers), function))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._over and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._over:
                    return
                _, _, function = heapq.heappop(self._due)
            function()


class _Memory(Backend):
    ordered, host, quick = False, True, True

    def wait(self, work: Any, limit: Any, closed: Any, read: bool) -> None:
        work.wait()

    def abort(self, group: Any) -> None:
        group.abort()


class Network:
    """What all workers of a job share.

    Args:
        seed: of the delays.
        slow: the share of messages that take a while.
        longest: seconds that they take at most.
    """

    def __init__(self, seed: int = 0, slow: float = 0.0, longest: float = 0.004) -> None:
        self._draw, self._slow, self._longest = random.Random(seed), slow, longest
        self._lock = threading.Lock()
        self._met: dict[str, set[int]] = defaultdict(set)
        self._contexts: dict[str, Context] = {}
        self._dead: set[int] = set()
        self._delays = Delays() if slow else None
        self.sent = 0

    def delay(self) -> float:
        with self._lock:
            self.sent += 1
            return self._draw.uniform(0, self._longest) if self._draw.random() < self._slow else 0.0

    def later(self, moment: float, function: Callable[[], None]) -> None:
        assert self._delays is not None
        self._delays.at(moment, function)

    def context(self, name: str, ranks: Sequence[int]) -> Context:
        with self._lock:
            if name not in self._contexts:
                self._contexts[name] = Context(self, ranks)
                for rank in self._dead & set(ranks):
                    self._contexts[name].close(rank)
            return self._contexts[name]

    def die(self, rank: int) -> None:
        """The process of this rank is no more."""
        with self._lock:
            self._dead.add(rank)
            contexts = list(self._contexts.values())
        for context in contexts:
            context.close(rank)

    def rise(self, rank: int) -> None:
        """Another process has this rank from now on."""
        with self._lock:
            self._dead.discard(rank)

    def meet(self, prefix: str, me: int, everyone: Sequence[int], interrupted: Callable[[], bool],
             limit: float) -> None:
        end = time.monotonic() + limit
        with self._lock:
            self._met[prefix].add(me)
        while True:
            with self._lock:
                if self._met[prefix] >= set(everyone):
                    return
            if interrupted():
                raise GenerationOver("a newer generation was announced while this one was being built")
            if time.monotonic() > end:
                raise GenerationOver("some did not come")
            time.sleep(0.0005)

    def become(self, everybody: Comm | None) -> None:
        """There is no default group."""

    def renumbered(self, comm: Comm) -> AbstractContextManager[None]:
        return nullcontext()

    def abort_default(self) -> None:
        """There is no default group."""

    def close(self) -> None:
        if self._delays is not None:
            self._delays.close()

    def connect(self, *, generation: int, prefix: str, place: Place, members: Sequence[Worker], limits: Limits,
                interrupted: Callable[[], bool]) -> Groups:
        """As `TorchNetwork.connect`."""
        rank_of = {worker: place.ranks[worker][0] for worker in place.ranks}
        ordered = tuple(sorted(members, key=rank_of.__getitem__))
        everyone, me = [rank_of[worker] for worker in ordered], rank_of[place.me]
        self.meet(prefix, me, everyone, interrupted, min(limits.meet, LIMIT))

        def group(name: str, ranks: list[int], table: Table) -> Comm:
            return Comm(Group(self.context(f"{prefix}/{name}", ranks), ranks.index(me)), _Memory(), table)

        peers = [rank_of[one] for one in ordered if one.stage == place.me.stage]
        stage = group(f"stage{place.me.stage}", peers, STAGE)
        return MemoryGroups(
            generation=generation, me=place.me, members=ordered, world=group("world", everyone, WORLD), stage=stage,
            pipeline=stage, siblings=None, control=group("control", everyone, CONTROL),
            control_ranks={worker: index for index, worker in enumerate(ordered)}, stage_control=stage)


class MemoryGroups(Groups):
    """Groups that nobody need tear down."""

    def all(self) -> list[Any]:
        return [self.world, self.stage, self.control]

    def retire(self) -> None:
        pass


class Context:
    """The connections of one group."""

    def __init__(self, network: Network, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._network = network
        self._lock = threading.Lock()
        self.changed = [threading.Condition(self._lock) for _ in ranks]
        self._boxes: dict[tuple[int, int, int], deque[list[torch.Tensor]]] = defaultdict(deque)
        self._under_way: dict[tuple[int, int], deque[tuple[int, list[torch.Tensor]]]] = defaultdict(deque)
        self._sums: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self._closed: set[int] = set()

    def close(self, rank: int) -> None:
        """All connections of this global rank."""
        if rank not in self.ranks:
            return
        with self._lock:
            self._closed.add(self.ranks.index(rank))
            for changed in self.changed:
                changed.notify_all()

    def broken(self, *indices: int) -> bool:
        return not self._closed.isdisjoint(indices)

    def post(self, source: int, target: int, tag: int, tensors: Sequence[torch.Tensor]) -> None:
        payload = [tensor.detach().clone() for tensor in tensors]
        delay = self._network.delay()
        with self._lock:
            if self.broken(source, target):
                raise Broken("Connection closed by peer")
            under_way = self._under_way[source, target]
            if not delay and not under_way:
                self._arrive(source, target, tag, payload)
                return
            under_way.append((tag, payload))

        def arrive() -> None:
            with self._lock:
                # Whichever of them is due first, the oldest one arrives.
                if under_way and not self.broken(source, target):
                    self._arrive(source, target, *under_way.popleft())

        self._network.later(time.monotonic() + delay, arrive)

    def _arrive(self, source: int, target: int, tag: int, payload: list[torch.Tensor]) -> None:
        self._boxes[source, target, tag].append(payload)
        self.changed[target].notify_all()

    def take(self, source: int, target: int, tag: int, into: Sequence[torch.Tensor], wait: bool) -> bool:
        """Whether a message has come; it is in ``into`` then. Raises Broken."""
        box = self._boxes[source, target, tag]
        end = time.monotonic() + LIMIT
        with self._lock:
            while not box:
                if self.broken(source, target):
                    raise Broken("Connection closed by peer")
                if not wait:
                    return False
                if not self.changed[target].wait(end - time.monotonic()):
                    raise AssertionError(f"rank {self.ranks[target]} waits in vain for {self.ranks[source]}")
            if target in self._closed:
                raise Broken("Connection closed")
            payload = box.popleft()
        for tensor, arrived in zip(into, payload, strict=True):
            tensor.detach().copy_(arrived.view_as(tensor))
        return True

    def contribute(self, number: int, index: int, tensor: torch.Tensor) -> None:
        with self._lock:
            if self._closed:
                raise Broken("Connection closed by peer")
            self._sums[number][index] = tensor.detach().clone()
            if len(self._sums[number]) == len(self.ranks):
                for changed in self.changed:
                    changed.notify_all()

    def total(self, number: int, index: int, into: torch.Tensor, wait: bool) -> bool:
        end = time.monotonic() + LIMIT
        with self._lock:
            while len(self._sums[number]) < len(self.ranks):
                if self._closed:
                    raise Broken("Connection closed by peer")
                if not wait:
                    return False
                if not self.changed[index].wait(end - time.monotonic()):
                    raise AssertionError(f"rank {self.ranks[index]} waits in vain for a sum")
            if index in self._closed:
                raise Broken("Connection closed")
            parts = [self._sums[number][rank] for rank in range(len(self.ranks))]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        into.copy_(total)
        return True


class Work:
    """What `wait` waits for is done once; ``run(wait)`` says whether it is."""

    def __init__(self, run: Callable[[bool], bool]) -> None:
        self._run, self._done = run, False

    def wait(self, *limit: Any) -> bool:
        if not self._done:
            self._done = self._run(True)
        return True

    def is_completed(self) -> bool:
        if not self._done:
            try:
                self._done = self._run(False)
            except Broken:
                return True  # as torch's: done, and `wait` raises
        return self._done


class Group:
    """One worker's end of a context."""

    def __init__(self, context: Context, index: int) -> None:
        self._context, self._index, self._sums = context, index, itertools.count()

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return len(self._context.ranks)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Work:
        self._context.post(self._index, peer, tag, tensors)
        return Work(lambda wait: True)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Work:
        if self._context.broken(self._index):
            raise Broken("Connection closed")
        return Work(lambda wait: self._context.take(peer, self._index, tag, tensors, wait))

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Work:
        number, (tensor,) = next(self._sums), tensors
        self._context.contribute(number, self._index, tensor)
        return Work(lambda wait: self._context.total(number, self._index, tensor, wait))

    def abort(self) -> None:
        self._context.close(self._context.ranks[self._index])
