"""The network of a job in memory that tells of everything before it is asked of it, so that somebody may die there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.memory import Fabric, MemoryNetwork
from megatron_recycle.runtime.comm.memory.ends import Host, Operation
from megatron_recycle.runtime.comm.tags import CONTROL, Table


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
    """Calls ``at(process, what)`` in the thread that asks; ``what`` has the communicator's name and the kind."""

    def __init__(self, seed: int, at: Callable[[Host, str], None], **options: Any) -> None:
        super().__init__(seed, **options)
        self._at = at

    def end(self, process: Host, key: tuple[str, str], rank: int, size: int, table: Table = CONTROL,
            **options: Any) -> Comm:
        self._at(process, f"connect {key[1]}")
        return super().end(process, key, rank, size, table, **options)

    def post(self, operation: Operation) -> None:
        self._at(operation.end.process, f"{operation.kind} {operation.end.board.name}")
        super().post(operation)

    def post_batch(self, batch: Sequence[Operation]) -> None:
        self._at(batch[0].end.process, f"batch {batch[0].end.board.name}")
        super().post_batch(batch)


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
