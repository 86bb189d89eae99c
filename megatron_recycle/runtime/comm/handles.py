"""Communication handles of one generation: built together, aborted together, never reused.

Every collective and every transfer of a generation runs on handles that one :class:`Groups` object owns.
A new generation gets new handles under its own store prefix, so that nothing a worker of an older
generation still sends can reach anybody (promise P6). Training does not use torch's WORLD group, which the
framework creates before any failure; `default_group` keeps that one of use to scripts.

The handles are registered with torch.distributed under explicit names, so that they work as ``group=``
arguments with global ranks. torch's own ``new_group`` derives names from a per-process counter, which
differs between survivors and would hang them.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_any
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.errors import GenerationOver
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.waits import wait_unless
from megatron_recycle.runtime.place import Place

# A tag no transfer ever uses: posting a receive with it and letting it time out makes gloo close the pair.
_ABORT_TAG = 2**31 - 1
_POLL_SECONDS = 0.002
_LONGEST_ABSENCE = 60.0  # of torch's store, in seconds
_SAID_AGAIN = 0.5  # seconds after which a worker that waits for others at the store says again that it is there
RETIRING = "recycle-retire"
"""Name of the threads that tear handles down."""
CONNECTING = "recycle-connect"
"""Name of the threads that build handles."""

Connected = TypeVar("Connected")

_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # beside what torch keeps of each group


def new_group(name: str, ranks: Sequence[int], store: dist.Store, *, backend: str, timeout: float,
              connect_timeout: float) -> dist.ProcessGroup:
    """A process group of exactly ``ranks`` (global ranks, ascending), known to torch under ``name``.

    Only the members call this. ``connect_timeout`` (seconds) bounds the rendezvous, ``timeout`` every
    later operation. Raises whatever torch raises when a member does not show up.
    """
    group, _ = c10d._new_process_group_helper(
        len(ranks), list(ranks).index(dist.get_rank()), list(ranks), c10d.Backend(backend), store,
        group_name=c10d.GroupName(name), timeout=timedelta(seconds=connect_timeout))
    # What torch's own new_group() records after the helper returns: global rank -> rank in the group.
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    group.set_timeout(timedelta(seconds=timeout))
    return group


def wait_for(work: dist.Work, group: dist.ProcessGroup, read: bool = False) -> None:
    """Wait until ``work`` on ``group`` is done, as long as the group's limit says, or until `abort_group`. Raises
    RuntimeError when it fails.

    Left to itself gloo gives a transfer between two workers (not a collective) the time that connecting had. ``read``:
    it is the sending of what its receiver is known to have got. In its midst gloo cannot be any more, nor in that of a
    collective that is completed, so that nobody has to be able to leave them.
    """
    if group.name() == "nccl":
        work.wait()  # with a limit, NCCL would block the thread
        return
    limit = group._get_backend(torch.device("cpu")).options._timeout
    if read or work.is_completed():
        work.wait(limit)
    else:
        wait_unless(lambda: group in _aborted, lambda: work.wait(limit))


def abort_group(group: dist.ProcessGroup) -> None:
    """Make every pending and future operation on ``group`` fail, from any thread, within milliseconds.

    NCCL has a working abort. Gloo has none, but it closes a pair on which a receive times out and then
    fails all operations of the group's context: so one receive with a 1 ms limit is posted per peer. Only what it is
    in the midst of sending or receiving it forgets: `wait_for` leaves that, a second later.
    """
    if group.name() == "nccl":
        try:
            group.abort()
        except RuntimeError as error:  # the other groups are to be aborted all the same
            get_logger().warning("megatron-recycle: NCCL did not abort a group: %s", error)
        return
    _aborted.add(group)
    scratch = torch.zeros(1)
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([scratch], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # this is the purpose: the pair is closed now, or was already


@dataclass
class Groups:
    """The handles of one generation.

    Where workers have several parts (tensor parallelism), equal parts of all workers have a ``world`` of their own,
    and so on: a part meets its siblings in ``siblings`` and ``control`` only.

    Attributes:
        generation: membership epoch these handles belong to; 0 before the first one.
        members: live workers in ascending order; a worker's index is its rank in ``world``.
        world: all members; activations and gradients travel here.
        stage: the members of this worker's stage; gradients are reduced here.
        pipeline: the members of this worker's pipeline.
        siblings: all parts of this worker, in order; None if it has one part.
        control: all parts of all members, for small tensors in CPU memory: always gloo. A commit is under way there
            while the next iteration's activations travel.
        control_ranks: rank in ``control`` of each member's process that is the same part as this one.
        stage_control: the same members as ``stage``, in CPU memory.
        everybody: all ranks of the job, after a failure and once all positions are filled again, else None; for what
            is done over all ranks between iterations.
    """

    generation: int
    me: Worker
    members: tuple[Worker, ...]
    world: dist.ProcessGroup
    stage: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    siblings: dist.ProcessGroup | None
    control: dist.ProcessGroup
    control_ranks: Mapping[Worker, int]
    stage_control: dist.ProcessGroup
    everybody: dist.ProcessGroup | None = None
    part: int = 0
    parts: int = 1
    _aborted: bool = False
    _abort_lock: threading.Lock = field(default_factory=threading.Lock)

    def peers(self, stage: int) -> tuple[Worker, ...]:
        """Live workers of ``stage``, ascending; their index is their rank in that stage's group."""
        return tuple(worker for worker in self.members if worker.stage == stage)

    def rank(self, worker: Worker) -> int:
        """Rank of ``worker`` in ``world``."""
        return self.members.index(worker)

    def all(self) -> list[dist.ProcessGroup]:
        groups = [self.world, self.stage, self.control, self.pipeline]
        groups += [] if self.siblings is None else [self.siblings]
        groups += [] if self.everybody is None else [self.everybody]
        return groups if self.stage_control is self.stage else [*groups, self.stage_control]

    def abort(self) -> None:
        """Free whoever waits on these handles; returns when that is done, whichever thread began it."""
        with self._abort_lock:
            if not self._aborted:
                self._aborted = True
                for group in self.all():
                    abort_group(group)

    def abort_transfers(self) -> None:
        """Free whoever waits for an activation, a gradient, or a sibling that waits for one; nobody else."""
        abort_group(self.world)
        if self.siblings is not None:
            abort_group(self.siblings)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block this worker's parts compute together: that one of them is gone ends the generation, as a
        broken transfer does. Raises GenerationOver."""
        try:
            yield
        except RuntimeError as error:
            if self.siblings is None or not (self._aborted or is_broken(error)):
                raise
            raise GenerationOver(f"a collective of the parts of worker {self.me} failed: {error}") from error

    def retire(self) -> None:
        """Tear the handles down in the background: it takes gloo up to a second, and nobody needs it done."""
        retire(self.all())


def retire(groups: Sequence[dist.ProcessGroup]) -> None:
    """Tear ``groups`` down in the background."""
    threading.Thread(target=_destroy, args=(groups,), name=RETIRING, daemon=True).start()


def is_broken(error: RuntimeError) -> bool:
    """Whether this is of the communication library; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in ("gloo", "pair closure"))


def _destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError) as error:
            # What cannot be torn down, or was by a script that destroys all in the end, must not keep the others.
            get_logger().debug("megatron-recycle: a group of an old generation stays: %s", error)


def unless_interrupted(interrupted: Callable[[], bool], connect: Callable[[Callable[[], bool]], Connected],
                       discard: Callable[[Connected], None]) -> Connected:
    """What ``connect`` returns, or GenerationOver as soon as ``interrupted()`` becomes true.

    gloo cannot be interrupted while it connects, and waits up to five times its limit for a peer that has died, or is
    frozen, just after it had said where it listens. So ``connect`` runs in a thread of its own, which is left behind
    then; what it still brings about goes to ``discard``. It is given what tells whether that has happened, which stays
    true when ``interrupted()`` is about the next generation already.
    """
    outcome: Future[Connected] = Future()
    left_behind = threading.Event()

    def run() -> None:
        try:
            outcome.set_result(connect(lambda: left_behind.is_set() or interrupted()))
        except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
            outcome.set_exception(error)

    def throw_away(late: Future[Connected]) -> None:
        if late.exception() is None:
            discard(late.result())

    threading.Thread(target=run, name=CONNECTING, daemon=True).start()
    while not wait_for_any([outcome], _POLL_SECONDS).done:
        if interrupted():
            left_behind.set()
            outcome.add_done_callback(throw_away)
            raise GenerationOver("a newer generation was announced while this one was being built")
    return outcome.result()


@dataclass(frozen=True)
class Limits:
    """Seconds: of every operation on the handles, of each handle's connecting, and until all members have come to the
    store."""

    operation: float
    connect: float
    meet: float


def build_groups(*, generation: int, prefix: str, place: Place, members: Sequence[Worker], limits: Limits,
                 interrupted: Callable[[], bool]) -> Groups:
    """Build the handles of ``generation`` together with all parts of all ``members``.

    ``prefix`` is unique per generation and membership.

    Raises:
        GenerationOver: ``interrupted()`` became true, or a member vanished or was too slow.
    """
    return unless_interrupted(interrupted, lambda over: _build_groups(
        generation, prefix, place, members, limits, over), Groups.retire)


def _build_groups(generation: int, prefix: str, place: Place, members: Sequence[Worker], limits: Limits,
                  interrupted: Callable[[], bool]) -> Groups:
    # First all members meet at the store, which takes as long as the slowest of them.
    me, part, ranks_of = place.me, place.part, place.ranks
    ordered = tuple(sorted(members, key=lambda worker: ranks_of[worker][part]))
    everyone = sorted(rank for worker in members for rank in ranks_of[worker])
    try:
        store = dist.PrefixStore(f"recycle/{prefix}", rendezvous(limits.connect, interrupted))
        meet(store, ranks_of[me][part], everyone, interrupted, limits.meet)
    except (RuntimeError, OSError) as error:
        raise GenerationOver(f"generation {generation}: the rendezvous store failed: {error}") from error

    built: list[dist.ProcessGroup] = []

    def group(name: str, ranks: Sequence[int], backend: str = place.backend) -> dist.ProcessGroup:
        built.append(new_group(f"recycle/{prefix}/{name}", ranks, store, backend=backend,
                               timeout=limits.operation, connect_timeout=limits.connect))
        return built[-1]

    world = [ranks_of[worker][part] for worker in ordered]
    peers = [ranks_of[worker][part] for worker in ordered if worker.stage == me.stage]
    line = [ranks_of[worker][part] for worker in ordered if worker.pipeline == me.pipeline]

    try:
        stage = group(f"stage{me.stage}.{part}", peers)
        again_whole = generation > 1 and len(members) == len(ranks_of)
        return Groups(
            generation=generation, me=me, part=part, parts=place.parts, members=ordered,
            world=group(f"world.{part}", world), stage=stage, pipeline=group(f"pipeline{me.pipeline}.{part}", line),
            siblings=group(f"worker{me}", ranks_of[me]) if place.parts > 1 else None,
            control=group("control", everyone, "gloo"),
            everybody=group("everybody", everyone) if again_whole else None,
            control_ranks={worker: everyone.index(rank) for worker, rank in zip(ordered, world)},
            stage_control=stage if place.backend == "gloo" else group(f"stage{me.stage}.{part}-control", peers, "gloo"))
    except RuntimeError as error:
        retire(built)  # those that stood before one failed
        raise GenerationOver(f"generation {generation}: connecting failed: {error}") from error


def rendezvous(timeout: float, interrupted: Callable[[], bool]) -> dist.Store:
    """A new connection to the job's store: the one that torch opened at the start is dead if the store was started
    again meanwhile. One that is being started again, which takes as long as torch does to load, is waited for.

    Raises GenerationOver when interrupted, and RuntimeError.
    """
    if "MASTER_ADDR" not in os.environ:  # a job that met some other way, without a coordinator that comes back
        return c10d._get_default_store()
    limit = time.monotonic() + _LONGEST_ABSENCE
    while True:
        try:
            return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                                 timeout=timedelta(seconds=timeout), wait_for_workers=False)
        except RuntimeError:
            if interrupted():
                raise GenerationOver("a newer generation was announced while the store was sought") from None
            if time.monotonic() > limit:
                raise
        time.sleep(_POLL_SECONDS)


def meet(store: dist.Store, me: int, members: Sequence[int], interrupted: Callable[[], bool],
         limit: float = math.inf) -> None:
    """Wait at ``store`` until all ``members`` (ranks) have arrived.

    Anybody who reaches the store can delete what is in it. So each says that it is here again and again while it waits,
    and once more when it has seen all others, each of which has to be seen once only.

    Raises GenerationOver when interrupted, or when some have not come within ``limit`` seconds: in a new generation
    everybody tries again.
    """
    here, missing = f"met/{me}", list(members)
    begun = again = time.monotonic()
    while missing and not store.check([f"met/{rank}" for rank in missing]):
        if interrupted():
            raise GenerationOver("a newer generation was announced while this one was being built")
        now = time.monotonic()
        if now - begun > limit:
            raise GenerationOver(f"rank {', '.join(map(str, missing))} did not come to torch's store within "
                                   f"{limit:.0f} s, or what they wrote there is gone")
        if now >= again:
            store.set(here, "1")
            missing = [rank for rank in missing if not store.check([f"met/{rank}"])]
            again = now + _SAID_AGAIN
        time.sleep(_POLL_SECONDS)
    store.set(here, "1")
