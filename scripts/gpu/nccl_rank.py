"""What a check's program works with: one rank, its library and its way to tell facts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.runtime.comm.backend import BACKENDS, Backend
from megatron_recycle.runtime.comm.cancellation import Wait
from megatron_recycle.runtime.comm.life import Life
from megatron_recycle.runtime.comm.rendezvous import new_group

SMALL = 1 << 10
"""Bytes of a message that fits the library's buffers."""
_MEETING = timedelta(seconds=90)
_OPERATION = timedelta(seconds=600)  # beyond every check's limit: torch's watchdog is not to end what hangs


class Library(Protocol):
    """NCCL, or what stands in for it.

    Attributes:
        backend: how the runtime speaks to it.
        large: bytes of a message that goes far beyond its buffers.
    """

    backend: Backend
    device: torch.device
    large: int

    def group(self, name: str, rank: int, ranks: Sequence[int], store: dist.Store) -> Any:
        """A group as the runtime makes them, not connected."""

    def bare_group(self, name: str, rank: int, ranks: Sequence[int], store: dist.Store, options: Any) -> Any:
        """A group as torch makes them, with the library's ``options``."""

    def synchronize(self) -> None:
        """Wait for everything that was started on the device."""


class Nccl:
    """torch's NCCL on the first device. The default group is gloo's, unless it is to be bound to the device."""

    backend, large = BACKENDS["nccl"], 32 << 20

    def __init__(self, rank: int, size: int, store: dist.Store, *, bound: bool) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        torch.cuda.init()
        dist.init_process_group("nccl" if bound else "gloo", store=dist.PrefixStore("default", store), rank=rank,
                                world_size=size, timeout=timedelta(seconds=120),
                                **({"device_id": self.device} if bound else {}))

    def group(self, name: str, rank: int, ranks: Sequence[int], store: dist.Store) -> Any:
        return new_group(name, ranks, store, backend="nccl", timeout=_OPERATION.total_seconds(),
                         connect_timeout=_OPERATION.total_seconds())

    def bare_group(self, name: str, rank: int, ranks: Sequence[int], store: dist.Store, options: Any) -> Any:
        group, _ = c10d._new_process_group_helper(
            len(ranks), list(ranks).index(rank), list(ranks), c10d.Backend("nccl"), store,
            group_name=c10d.GroupName(name), timeout=_OPERATION, backend_options=options)
        c10d._world.pg_group_ranks[group] = {each: index for index, each in enumerate(ranks)}
        return group

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class OnCpu:
    """The tests' backend that keeps to NCCL's rules of order."""

    large = 2 << 20

    def __init__(self) -> None:
        from tests.nccl_rules import backend, group, rules

        class Ordered(backend.Ordered):
            """Groups that torch does not know, with a communicator per pair until they are connected."""

            def connect(self, group: Any) -> None:
                group.rules = replace(group.rules, eager=True)
                group._whole()

            def destroy(self, group: Any) -> None:
                group.shutdown()

        self.backend, self.device, self._make = Ordered(), torch.device("cpu"), group.OrderedGroup
        self._rules = rules.Rules(eager=False, buffer=1 << 20, stuck=0)

    def group(self, name: str, rank: int, ranks: Sequence[int], store: dist.Store) -> Any:
        return self._make(store, list(ranks).index(rank), len(ranks), _OPERATION, self._rules)

    def bare_group(self, name: str, rank: int, ranks: Sequence[int], store: dist.Store, options: Any) -> Any:
        return self.group(name, rank, ranks, store)

    def synchronize(self) -> None:
        """Nothing runs ahead."""


@dataclass
class Rank:
    """One rank of a check.

    Attributes:
        rank, size: its number, and how many there are.
        library: what is looked at.
        store: connects to the check's store anew, with a limit in seconds.
        tell: hands facts to whoever runs the check; what a rank told before it hung counts.
        groups: all that were made.
    """

    rank: int
    size: int
    library: Library
    store: Callable[[float], dist.Store]
    tell: Callable[..., None]
    groups: list[Any] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.library.device.type == "cuda"

    def meet(self, name: str) -> None:
        """Wait for all ranks, without the library."""
        store = self.store(_MEETING.total_seconds())
        store.set(f"meet/{name}/{self.rank}", "1")
        store.wait([f"meet/{name}/{rank}" for rank in range(self.size)], _MEETING)

    def group(self, ranks: Sequence[int] = (), *, limit: float = 60.0, bare: bool = False, options: Any = None) -> Any:
        """A group of ``ranks`` (all), the runtime's or a ``bare`` one of torch's, with ``options``; ``limit`` (seconds)
        bounds what it asks of the store."""
        ranks = list(ranks or range(self.size))
        name = f"check/{len(self.groups)}/{'-'.join(map(str, ranks))}"
        where = name, self.rank, ranks, dist.PrefixStore(name, self.store(limit))
        self.groups.append(self.library.bare_group(*where, options) if bare else self.library.group(*where))
        return self.groups[-1]

    def tensor(self, nbytes: int, value: float = 0.0) -> torch.Tensor:
        return torch.full((nbytes // 4,), float(value), dtype=torch.float32, device=self.library.device)

    def sync(self) -> None:
        self.library.synchronize()

    def wait(self, work: Any) -> None:
        """Until ``work`` is over, as the runtime waits."""
        self.library.backend.wait(work, None, Wait(Life()), False)

    def transfer(self, group: Any, tensor: torch.Tensor, sender: int = 0) -> None:
        """One message between ranks 0 and 1, from ``sender``, waited for."""
        if self.rank < 2:
            (group.send if self.rank == sender else group.recv)([tensor], 1 - self.rank, 0).wait()
            self.sync()

    def both_ways(self, *groups: Any) -> None:
        """First messages between ranks 0 and 1 in both directions, in an order that cannot block."""
        for group in groups:
            for sender in (0, 1):
                self.transfer(group, self.tensor(SMALL), sender)

    def total(self, group: Any) -> float:
        """The sum of ones over all members."""
        total = self.tensor(SMALL, 1.0)
        group.allreduce([total]).wait()
        self.sync()
        return float(total[0])

    def abort_in(self, pause: float, *groups: Any) -> threading.Thread:
        """Abort ``groups`` one after the other, from another thread, after ``pause`` seconds."""
        in_thread = self.library.backend.in_thread()

        def run() -> None:
            in_thread()
            time.sleep(pause)
            for number, group in enumerate(groups):
                begun = time.monotonic()
                try:
                    group.abort()
                    self.tell(**{f"abort_{number}_s": since(begun)})
                except RuntimeError as error:
                    self.tell(**{f"abort_{number}_error": text(error)})

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def since(begun: float) -> float:
    """Seconds since ``begun``, in milliseconds' precision."""
    return round(time.monotonic() - begun, 3)


def text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:160]}"
