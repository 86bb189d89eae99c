"""The network of one process of the job: it builds a generation's communicators.

A worker is given one, and uses no other: torch's in a job (`TorchNetwork`), one in memory in tests
(`tests/fakes/network`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.abort import Teardown, abort, retire
from megatron_recycle.runtime.comm.backend import BACKENDS
from megatron_recycle.runtime.comm.comm import Comm, failing_ends
from megatron_recycle.runtime.comm.default_group import World
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.rendezvous import OWN, heard, job_store, meet, new_group, unless_interrupted
from megatron_recycle.runtime.comm.reuse import BuildAttempt, ReusableGroups, Words
from megatron_recycle.runtime.comm.tags import CONTROL, FRAMEWORK, STAGE, WORLD, Table
from megatron_recycle.runtime.comm.threads import Threads
from megatron_recycle.runtime.place import Place


class Network(Protocol):
    """The network's interface to a worker."""

    def connect(self, *, generation: int, prefix: str, place: Place, members: Sequence[Worker], limits: Limits,
                interrupted: Callable[[], bool], before: ReusableGroups | None = None) -> Groups:
        """Build the handles of ``generation`` together with all parts of all ``members``.

        ``prefix`` is unique per generation and membership. ``before``: communicators of older generations; they are
        reused where all members can, and the others are torn down. Raises GenerationOver: ``interrupted()`` became
        true, or a member vanished or was too slow; ``before`` is for the next generation then.
        """

    def renumbered(self, comm: Comm) -> AbstractContextManager[None]:
        """Inside the block a script's libraries see only the members of ``comm``, and a rank is a position in it."""

    def abort_default(self) -> None:
        """A rank of the job is gone: free all threads that wait for it in a script's operations, from any thread."""

    def close(self) -> None:
        """End of use: wait for the threads that are in the communication library."""


class TorchNetwork:
    """torch.distributed's network, on the job's store."""

    def __init__(self) -> None:
        self.threads = Threads()
        self._world = World(self.threads)

    def connect(self, *, generation: int, prefix: str, place: Place, members: Sequence[Worker], limits: Limits,
                interrupted: Callable[[], bool], before: ReusableGroups | None = None) -> Groups:
        """As in `Network`."""
        reusable = before or ReusableGroups((), self.threads)
        turn = reusable.turn()
        in_thread = BACKENDS[place.backend].in_thread()

        def build(over: Callable[[], bool]) -> Groups:
            in_thread()
            return _build(generation, prefix, place, members, limits, over, self.threads, reusable, turn)

        self._world.put_back()
        try:
            groups = unless_interrupted(interrupted, build, lambda late: late.retire(turn.kept), self.threads)
        except BaseException:
            reusable.missed(turn)
            raise
        reusable.used(turn)
        return groups

    def renumbered(self, comm: Comm) -> AbstractContextManager[None]:
        """As in `Network`: torch's default group."""
        return self._world.renumbered(comm)

    def abort_default(self) -> None:
        """As in `Network`: torch's default group."""
        self._world.abort()

    def close(self) -> None:
        """As in `Network`."""
        self.threads.close()


class Make(Protocol):
    """Makes one communicator, together with its other members."""

    def __call__(self, name: str, ranks: Sequence[int], table: Table = FRAMEWORK, *, host: bool = False) -> Comm:
        """A communicator of global ``ranks``, ascending; ``host``: for tensors in CPU memory."""


def computing(place: Place, members: Sequence[Worker]) -> dict[str, list[int]]:
    """A generation's communicators for tensors on this process's device: global ranks by name, in the order of
    creation."""
    me, part, ranks = place.me, place.part, place.ranks
    own = {ranks[worker][part]: worker for worker in members}
    return {f"world.{part}": sorted(own),  # the first one: see `Groups._spared`
            f"stage{me.stage}.{part}": [rank for rank in sorted(own) if own[rank].stage == me.stage],
            **({f"worker{me}": list(ranks[me])} if place.parts > 1 else {})}


def assemble(generation: int, place: Place, members: Sequence[Worker], make: Make, threads: Threads) -> Groups:
    """The handles of a generation. ``make`` is called for one after the other, in the same order by all members."""
    me, part, ranks = place.me, place.part, place.ranks
    ordered = tuple(sorted(members, key=lambda worker: ranks[worker][part]))
    live_ranks = sorted(rank for worker in members for rank in ranks[worker])
    peers = [ranks[worker][part] for worker in ordered if worker.stage == me.stage]
    world, stage, *siblings = [make(name, numbers, table) for (name, numbers), table in zip(
        computing(place, members).items(), (WORLD, STAGE, FRAMEWORK), strict=False)]
    return Groups(
        members=ordered, world=world, stage=stage,
        siblings=siblings[0] if siblings else None,
        control=make("control", live_ranks, CONTROL, host=True),
        control_ranks={worker: live_ranks.index(ranks[worker][part]) for worker in ordered},
        stage_control=stage if stage.backend.host else make(
            f"stage{me.stage}.{part}-control", peers, STAGE, host=True),
        teardown=Teardown(threads), control_siblings=[live_ranks.index(rank) for rank in ranks[me]])


def clear(reusable: ReusableGroups, turn: BuildAttempt, generation: int, place: Place, members: Sequence[Worker],
          announced: Callable[[Sequence[int]], Words]) -> None:
    """As `ReusableGroups.clear`, for `assemble`."""
    wanted, names = computing(place, members), place.names
    reusable.clear(turn, f"generation {generation}", {name: [names[rank] for rank in ranks]
                                                    for name, ranks in wanted.items()},
                 lambda name: announced(wanted[name]))


def _build(generation: int, prefix: str, place: Place, members: Sequence[Worker], limits: Limits,
           interrupted: Callable[[], bool], threads: Threads, reusable: ReusableGroups, turn: BuildAttempt) -> Groups:
    # First all members meet at the store, which takes as long as the slowest of them.
    with failing_ends(f"generation {generation}: meeting at torch's store"):
        store = job_store(f"recycle/{prefix}", limits.connect, interrupted)
        live_ranks = sorted(rank for worker in members for rank in place.ranks[worker])
        meet(store, place.ranks[place.me][place.part], live_ranks, interrupted, limits.meet, list(reusable.said()))
    names = place.names
    built: list[Comm] = []

    def make(name: str, ranks: Sequence[int], table: Table = FRAMEWORK, *, host: bool = False) -> Comm:
        of, own, identity = f"generation {generation}", [names[rank] for rank in ranks], f"{OWN}{prefix}/{name}"
        had = reusable.take(turn, name, of, own, lambda: heard(store, ranks))
        if had is not None:
            if name not in turn.kept:
                built.append(had)
            return had
        backend = "gloo" if host else place.backend
        options = BACKENDS[backend].options(table is WORLD, timedelta(seconds=limits.connect))
        group = new_group(identity, ranks, store, backend=backend, timeout=limits.operation,
                          connect_timeout=limits.connect, options=options)
        built.append(Comm(group, BACKENDS[backend], table, of, own, identity))
        BACKENDS[backend].connect(group)
        return built[-1]

    try:
        with failing_ends(f"generation {generation}: connecting"):
            clear(reusable, turn, generation, place, members, lambda ranks: heard(store, ranks))
            return assemble(generation, place, members, make, threads)
    except GenerationOver:
        retire(built, threads, abort(built, threads))  # those made before the failure
        raise
