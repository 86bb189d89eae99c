"""Shards of an optimizer's state on their way to other workers, after a failure.

They are copied to those that are to hold them from now on (`adopt`): in the recovery, or before the next iteration
where the recovery meets some peers in their scripts, or where the stage is closed for an iteration that is not
committed: its step may have to be made again, by those that have its slices. A copy counts when it is whole. Whoever
has given one away keeps it until the next gradient is held, of which it gets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_recycle.errors import TransferError
from megatron_recycle.membership import Resume, Standing
from megatron_recycle.membership.names import Process
from megatron_recycle.membership.report import ShardsReport
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.comm import Comm, Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.comm.tags import SHARD_STATE
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.scripts import some_are_between
from megatron_recycle.runtime.shards import cuts, gather, kept, table
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.state_copy import Shape, Told, bytes_of, checksum, read, written
from megatron_recycle.runtime.stepper import Stepper
from megatron_recycle.runtime.worker_extension import Meeting, WorkerExtension

_MIB = 2**20


class ShardMoves(WorkerExtension):
    """Each shard of the optimizer's state has its holders, whoever is lost."""

    def reports(self, site: Site, standing: Standing) -> Mapping[str, Any]:
        """The shards that this worker has whole; nothing where it has all of the state."""
        shards = site.stage.shards
        return {} if shards is None else {"shards": ShardsReport(
            shards.count, max(site.config.state_copies or site.place.grid.pipelines, shards.least),
            dict.fromkeys(shards.held, standing.holds))}

    def level(self, meeting: Meeting) -> None:
        """Some have stepped, and told nobody: their parameters go to the others."""
        site, groups, todo, stepped = meeting.site, meeting.groups, meeting.todo, meeting.standing.stepped
        before = cuts(site.stage, groups, meeting.resume, begun=True)
        if before is None or meeting.resume.restored or meeting.go.generation == 1:
            return
        with site.phases.copying():
            # If all have their parameters, scripts may have changed them since, those of some and not yet of others.
            (lacking,) = count(groups.stage_control, not todo.enter and site.trainable.gathered != stepped)
            if lacking and not todo.enter:
                with site.phases.writing():
                    gather(site.stage, groups, before, [
                        peer for peer in groups.peers(groups.me.stage) if peer not in meeting.joined])
                site.trainable.gathered = stepped

    def settle(self, meeting: Meeting) -> None:
        """Copy what is owed, or note that it is."""
        site, groups, go = meeting.site, meeting.groups, meeting.go
        owed = owe(site, groups, go.resume)
        if owed and site.place.me.stage not in go.resume.closed and (
                go.generation == 1 or go.closing is not None
                or not some_are_between(groups, meeting.standing, meeting.todo.enter)):
            adopt(site, groups)
        if meeting.todo.enter:
            with site.phases.copying():
                site.trainable.shards = kept(site.stage)

    def catch_up(self, site: Site, stepper: Stepper, generation: Generation) -> None:
        if site.current.owed:
            stepper.wait()
        adopt(site, generation.groups)


def owe(site: Site, groups: Groups, resume: Resume) -> bool:
    """Note which shards are to be copied to those that are to hold them; returns whether any are."""
    own = table(groups, resume)
    site.current.owed = () if site.stage.shards is None or own is None else tuple(
        (shard, Process.parse(giver).worker, Process.parse(taker).worker) for shard, giver, taker in own.moves)
    site.current.had = cuts(site.stage, groups, resume, begun=True) if site.current.owed else None
    return bool(site.current.owed)


def adopt(site: Site, groups: Groups) -> None:
    """Copy the shards that are owed, where all peers are at the same place of their scripts. Raises GenerationOver, and
    TransferError if one arrives damaged."""
    if site.current.owed and site.stage.shards is not None:
        with site.phases.copying():
            _tell(site, copy(site, groups, site.current.owed), site.stage.shards)
    site.current.owed, site.current.had = (), None


def copy(site: Site, groups: Groups, moves: Sequence[tuple[int, Worker, Worker]]) -> list[int]:
    """Copy shards; ``moves``: (shard, giver, taker), the same on all peers of a stage. Returns those that this worker
    has taken. Raises as `adopt`."""
    shards, peers, me = site.stage.shards, groups.peers(groups.me.stage), groups.me
    assert shards is not None
    sending: list[Pending] = []
    for number, (shard, giver, taker) in enumerate(moves):
        if giver == me:
            sending += _describe(groups.stage_control, peers.index(taker), number, shards, shard)
    told = {number: _told(groups.stage_control, peers.index(giver), number)
            for number, (_, giver, taker) in enumerate(moves) if taker == me}
    arriving: dict[int, dict[str, tuple[torch.Tensor, Pending]]] = {}
    with groups.stage.batch():
        for number, (shard, giver, taker) in enumerate(moves):
            if giver == me:
                sending += _send(groups, peers.index(taker), number, shards.tensors(shard))
            elif taker == me:
                arriving[number] = _receive(groups, peers.index(giver), number, told[number].tensors,
                                            site.stage.device)
    for number, coming in arriving.items():
        for _, pending in coming.values():
            pending.wait()
        tensors = {name: tensor for name, (tensor, _) in coming.items()}
        if [checksum(bytes_of(tensor)) for tensor in tensors.values()] != told[number].sums:
            raise TransferError(f"shard {moves[number][0]} of stage {me.stage} arrived damaged: its checksums differ "
                                "from the sender's. Check the network and this host's memory")
        shards.take(moves[number][0], tensors, read(told[number].facts, {}))
    for each in sending:
        each.wait()
    return [moves[number][0] for number in arriving]


def _tell(site: Site, adopted: Sequence[int], shards: ShardedOptimizer) -> None:
    if adopted:
        size = sum(tensor.nbytes for shard in adopted for tensor in shards.tensors(shard).values())
        get_logger().info("megatron-recycle: worker %s holds shards %s of its stage's optimizer state; %s came from "
                          "peers (%.1f MiB)", site.place.name, ", ".join(map(str, shards.held)),
                          ", ".join(map(str, adopted)), size / _MIB)


# How a shard travels: a move takes as many tags as a shard has tensors, and three.

_TAGS = 2**14


class _Told(Told, frozen=True):
    """What goes ahead of a shard's tensors: its numbers, which tensors there are, and their checksums."""

    sums: Sequence[int]


def _describe(comm: Comm, to: int, number: int, shards: ShardedOptimizer, shard: int) -> list[Pending]:
    tensors = shards.tensors(shard)
    told = _Told(written(shards.numbers(shard), {}), [Shape.of(name, tensor) for name, tensor in tensors.items()],
                 [checksum(bytes_of(tensor)) for tensor in tensors.values()])
    data = torch.frombuffer(bytearray(told.text.encode()), dtype=torch.uint8)
    return [comm.send(torch.tensor([data.numel()]), to, SHARD_STATE[_TAGS * number]),
            comm.send(data, to, SHARD_STATE[_TAGS * number + 1])]


def _told(comm: Comm, source: int, number: int) -> _Told:
    size = torch.zeros(1, dtype=torch.int64)
    comm.receive(size, source, SHARD_STATE[_TAGS * number]).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    comm.receive(data, source, SHARD_STATE[_TAGS * number + 1]).wait()
    return _Told.parse(data.numpy().tobytes())


def _send(groups: Groups, to: int, number: int, tensors: Mapping[str, torch.Tensor]) -> list[Pending]:
    return [_comm(groups, tensor).send(bytes_of(tensor), to, SHARD_STATE[_TAGS * number + 2 + place])
            for place, tensor in enumerate(tensors.values())]


def _receive(groups: Groups, source: int, number: int, told: Sequence[Shape],
             device: torch.device) -> dict[str, tuple[torch.Tensor, Pending]]:
    found = {}
    for place, shape in enumerate(told):
        tensor = shape.empty(device)
        found[shape.name] = tensor, _comm(groups, tensor).receive(bytes_of(tensor), source,
                                                                  SHARD_STATE[_TAGS * number + 2 + place])
    return found


def _comm(groups: Groups, tensor: torch.Tensor) -> Comm:
    return groups.stage_control if tensor.device.type == "cpu" else groups.stage
