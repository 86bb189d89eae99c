"""Communication handles of one generation: built together, aborted together, never reused.

Every collective and every transfer of a generation runs on handles that one :class:`Groups` object owns.
A new generation gets new handles under its own store prefix, so that nothing a worker of an older
generation still sends can reach anybody (promise P6). torch's WORLD group is left alone: it is created
by the framework before any failure and is not used for training.

The handles are registered with torch.distributed under explicit names, so that they work as ``group=``
arguments with global ranks. torch's own ``new_group`` derives names from a per-process counter, which
differs between survivors and would hang them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.errors import TransportAborted
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker

# A tag no transfer ever uses: posting a receive with it and letting it time out makes gloo close the pair.
_ABORT_TAG = 2**31 - 1
_POLL_SECONDS = 0.002
RETIRING = "recycle-retire"
"""Name of the threads that tear handles down."""


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


def abort_group(group: dist.ProcessGroup) -> None:
    """Make every pending and future operation on ``group`` fail, from any thread, within milliseconds.

    NCCL has a working abort. Gloo has none, but it closes a pair on which a receive times out and then
    fails all operations of the group's context: so one receive with a 1 ms limit is posted per peer.
    """
    if group.name() == "nccl":
        group.abort()
        return
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

    Attributes:
        generation: membership epoch these handles belong to; 0 before the first one.
        members: live workers in ascending order; a worker's index is its rank in ``world``.
        world: all members; activations and gradients travel here.
        stage: the members of this worker's stage; gradients are reduced here.
        control, stage_control: the same members as ``world`` and ``stage``, for small tensors in CPU memory: always
            gloo. A commit is under way there while the next iteration's activations travel.
        lines: further groups that a framework wants to hold, by name.
    """

    generation: int
    me: Worker
    members: tuple[Worker, ...]
    world: dist.ProcessGroup
    stage: dist.ProcessGroup
    control: dist.ProcessGroup
    stage_control: dist.ProcessGroup
    lines: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    _aborted: bool = False
    _abort_lock: threading.Lock = field(default_factory=threading.Lock)

    def peers(self, stage: int) -> tuple[Worker, ...]:
        """Live workers of ``stage``, ascending; their index is their rank in that stage's group."""
        return tuple(worker for worker in self.members if worker.stage == stage)

    def rank(self, worker: Worker) -> int:
        """Rank of ``worker`` in ``world``."""
        return self.members.index(worker)

    def all(self) -> list[dist.ProcessGroup]:
        groups = [self.world, self.stage, self.control, *self.lines.values()]
        return groups if self.stage_control is self.stage else [*groups, self.stage_control]

    def abort(self) -> None:
        """Free whoever waits on these handles; returns when that is done, whichever thread began it."""
        with self._abort_lock:
            if not self._aborted:
                self._aborted = True
                for group in self.all():
                    abort_group(group)

    def abort_transfers(self) -> None:
        """Free whoever waits for an activation or a gradient, and nobody else."""
        abort_group(self.world)

    def retire(self) -> None:
        """Tear the handles down in the background: it takes gloo up to a second, and nobody needs it done."""
        _retire(self.all())


def _retire(groups: Sequence[dist.ProcessGroup]) -> None:
    threading.Thread(target=_destroy, args=(groups,), name=RETIRING, daemon=True).start()


def _destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        try:
            dist.destroy_process_group(group)
        except RuntimeError as error:  # what cannot be torn down must not keep the others
            get_logger().debug("megatron-recycle: a group of an old generation stays: %s", error)


def build_groups(*, generation: int, prefix: str, me: Worker, members: Sequence[Worker],
                 rank_of: Mapping[Worker, int], lines: Mapping[str, Sequence[Worker]],
                 backend: str, timeout: float, connect_timeout: float,
                 interrupted: Callable[[], bool]) -> Groups:
    """Build the handles of ``generation`` together with all ``members``.

    ``rank_of`` gives global ranks, ``prefix`` is unique per generation and membership. First all members
    meet at the store, which can be interrupted; only then do they connect, so that a member that dies
    while another is still busy does not block the rest inside the connection.

    Raises:
        TransportAborted: ``interrupted()`` became true, or a member vanished while connecting.
    """
    ordered = tuple(sorted(members, key=rank_of.__getitem__))
    try:
        store = dist.PrefixStore(f"recycle/{prefix}", _rendezvous(connect_timeout))
        meet(store, me, ordered, interrupted)
    except (RuntimeError, OSError) as error:
        raise TransportAborted(f"generation {generation}: the rendezvous store failed: {error}") from error

    built: list[dist.ProcessGroup] = []

    def group(name: str, workers: Sequence[Worker], backend: str = backend) -> dist.ProcessGroup:
        ranks = sorted(rank_of[worker] for worker in workers)
        built.append(new_group(f"recycle/{prefix}/{name}", ranks, store, backend=backend, timeout=timeout,
                               connect_timeout=connect_timeout))
        return built[-1]

    peers = [worker for worker in ordered if worker.stage == me.stage]

    try:
        stage = group(f"stage{me.stage}", peers)
        return Groups(
            generation=generation, me=me, members=ordered, world=group("world", ordered), stage=stage,
            control=group("control", ordered, "gloo"),
            stage_control=stage if backend == "gloo" else group(f"stage{me.stage}-control", peers, "gloo"),
            lines={name: group(name, workers) for name, workers in lines.items()})
    except RuntimeError as error:
        _retire(built)  # those that stood before one failed
        raise TransportAborted(f"generation {generation}: connecting failed: {error}") from error


def _rendezvous(timeout: float) -> dist.Store:
    """A new connection to the job's store: the one that torch opened at the start is dead if the coordinator, which
    hosts the store, was started again meanwhile."""
    if "MASTER_ADDR" not in os.environ:  # a job that met some other way, without a coordinator that comes back
        return c10d._get_default_store()
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                         timeout=timedelta(seconds=timeout), wait_for_workers=False)


def meet(store: dist.Store, me: Worker, members: Sequence[Worker], interrupted: Callable[[], bool]) -> None:
    """Wait at ``store`` until all ``members`` have arrived; raises TransportAborted when interrupted."""
    store.set(f"met/{me}", "1")
    keys = [f"met/{worker}" for worker in members]
    while not store.check(keys):
        if interrupted():
            raise TransportAborted("a newer generation was announced while this one was being built")
        time.sleep(_POLL_SECONDS)
