"""A process of a job in memory, and the network as it has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.network import assemble, clear
from megatron_recycle.runtime.comm.reuse import BuildAttempt, ReusableGroups
from megatron_recycle.runtime.comm.tags import FRAMEWORK, Table
from megatron_recycle.runtime.comm.threads import Threads
from megatron_recycle.runtime.place import Place
from tests.fakes.network.ends import Host
from tests.fakes.network.fabric import Fabric


class MemoryNetwork(Host):
    """`network.Network` of one process on ``fabric``. A process that takes a dead one's place has another."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        super().__init__(rank)
        self.threads = Threads()
        self._fabric = fabric

    def die(self) -> None:
        """This process is no more, from any thread: its own threads get `Killed`, and its partners notice by and by,
        unless it has been cut off."""
        self._fabric.die(self)

    def cut_off(self) -> None:
        """Nothing comes through any more, in either direction, and nobody notices."""
        self.cut = True

    def connect(self, *, generation: int, prefix: str, place: Place, members: Sequence[Worker], limits: Limits,
                interrupted: Callable[[], bool], before: ReusableGroups | None = None) -> Groups:
        """As in `network.Network`."""
        reusable = before or ReusableGroups((), self.threads)
        turn = reusable.turn()
        try:
            groups = self._build(generation, prefix, place, members, limits, interrupted, reusable, turn)
        except BaseException:
            reusable.missed(turn)
            raise
        reusable.used(turn)
        return groups

    def _build(self, generation: int, prefix: str, place: Place, members: Sequence[Worker], limits: Limits,
               interrupted: Callable[[], bool], reusable: ReusableGroups, turn: BuildAttempt) -> Groups:
        everyone = sorted(rank for worker in members for rank in place.ranks[worker])
        begun = time.monotonic()
        while not self._fabric.meet(self, prefix, everyone, tuple(reusable.said())):
            if interrupted():
                raise GenerationOver("a newer generation was announced while this one was being built")
            if time.monotonic() > begun + limits.meet:
                raise GenerationOver(f"some of generation {generation} did not come within {limits.meet:.0f} s")
        names = place.names

        def make(name: str, ranks: Sequence[int], table: Table = FRAMEWORK, *, host: bool = False) -> Comm:
            of, own = f"generation {generation}", [names[rank] for rank in ranks]
            made = reusable.take(turn, name, of, own, lambda: self._fabric.heard(prefix, ranks))
            if name in turn.kept:
                assert made is not None
                return made
            if made is None:
                made = self._fabric.end(self, (prefix, name), list(ranks).index(self.rank), len(ranks), table,
                                        host=host, of=of, names=own)
            while not self._fabric.connected(made):
                if interrupted():
                    raise GenerationOver("a newer generation was announced while this one was being connected")
            return made

        clear(reusable, turn, generation, place, members, lambda ranks: self._fabric.heard(prefix, ranks))
        return assemble(generation, place, members, make, self.threads)

    def renumbered(self, comm: Comm) -> AbstractContextManager[None]:
        """There is no default group in memory."""
        return nullcontext()

    def abort_default(self) -> None:
        """There is no default group in memory."""

    def close(self) -> None:
        """As in `network.Network`."""
        self.threads.close()
