"""What workers do with the shards of their stage's optimizer state: gather parameters, adopt what the dead have held.

A step changes on each worker the part of the model that belongs to its own shards; the others' parts come from those
that hold them (`gather`). In a recovery shards are copied to those that are to hold them from now on (`adopt`). That
happens before the next iteration instead where it meets some peers in their scripts, or where the stage is closed for
an iteration that is not committed: its step may have to be made again, by those that have its slices. A copy counts
when it is whole. Whoever has given one away keeps it until the next gradient is held, of which it gets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import ConfigError, TransferError
from megatron_recycle.membership import Resume, Standing
from megatron_recycle.membership.names import Process
from megatron_recycle.membership.report import ShardsReport
from megatron_recycle.membership.shards import ShardTable
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.comm import Comm, Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.sharded_reduction import Cuts, exchange
from megatron_recycle.runtime.comm.tags import SHARD_PARAMETERS, SHARD_STATE
from megatron_recycle.runtime.compute.accumulate import Layout
from megatron_recycle.runtime.compute.data import digest
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stage import Stage
from megatron_recycle.runtime.state_copy import Shape, Told, bytes_of, checksum, read, written

_MIB = 2**20

Kept = Mapping[int, tuple[Mapping[str, torch.Tensor], Sequence[Mapping[str, Any]]]]
"""By shard, its tensors and numbers."""


def check(stage: Stage, place: Place, config: RecycleConfig) -> None:
    """Raises ConfigError for what cannot be had where the optimizer's state is cut into shards."""
    if stage.shards is None:
        return
    if config.guard == "memory":
        raise ConfigError("guard memory keeps copies of whole stages, and the optimizer is cut into shards: leave "
                          "guard out (a lost stage or shard comes back from the newest checkpoint), or give a larger "
                          "state_copies")
    if config.state_copies > place.grid.pipelines > 1 and place.me.pipeline == 0:  # as after a restart on fewer hosts
        get_logger().warning("megatron-recycle: state_copies %d: a stage has %d workers, each of which holds all of "
                             "the optimizer's state", config.state_copies, place.grid.pipelines)
    if config.state_copies == stage.shards.least == 1 < place.grid.pipelines and place.me.pipeline == 0:
        get_logger().warning("megatron-recycle: state_copies 1: with any worker that fails a shard of the optimizer's "
                             "state is lost: all go back to the last checkpoint of this job, or it ends if there is "
                             "none; with 2 they go on")


def report(stage: Stage, copies: int, standing: Standing) -> ShardsReport | None:
    """For the coordinator: the shards that this worker has whole; nothing where it has all of the state."""
    shards = stage.shards
    return None if shards is None else ShardsReport(
        shards.count, max(copies, shards.least), dict.fromkeys(shards.held, standing.holds))


def cuts(stage: Stage, groups: Groups, resume: Resume, begun: bool) -> Cuts | None:
    """Who holds which shard of this stage: when the generation had ``begun``, or from the end of the recovery on; None
    if its state is not cut."""
    shards, table = stage.shards, _table(groups, resume)
    if shards is None or table is None:
        return None
    return Cuts(tuple(tuple(Process.parse(name).worker for name in names)
                      for names in (table.had if begun else table.holders)),
                lambda shard, layout: shards.spans(shard, layout.starts), shards.wire)


def _table(groups: Groups, resume: Resume) -> ShardTable | None:
    mine = groups.me.stage, groups.part
    return next((table for table in resume.shards if (table.stage, table.part) == mine), None)


def norms(stage: Stage, cut: Cuts | None, groups: Groups, layout: Layout,
          gradient: torch.Tensor) -> tuple[tuple[float, ...], float]:
    """The stage's squared norm, or that of each shard, and how many zeros its reduced ``gradient`` has, the same bits
    on all peers; all of them take part. Raises GenerationOver."""
    shards = stage.shards
    if cut is None or shards is None:
        whole = layout.views(gradient)
        return (stage.norm_square(whole),), stage.zeros(whole)
    found = torch.zeros(len(cut.holders) + 1, dtype=torch.float64)
    own, spoken_for = cut.of(groups.me), cut.spoken_for(groups.me)
    for shard, values in zip(own, gradient.split([shards.length(shard) for shard in own]) if own else ()):
        if shard in spoken_for:
            parts = _parts(stage, shard, values)
            found[shard] = stage.norm_square(parts)
            found[-1] += stage.zeros(parts)
    groups.stage_control.sum(found).wait()  # each number comes from one worker, or is whole
    return tuple(found[:-1].tolist()), float(found[-1])


def views(stage: Stage, layout: Layout, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
    """What `Stage.step` takes of a reduced gradient."""
    return layout.views(gradient) if stage.shards is None else stage.shards.split(gradient)


def _parts(stage: Stage, shard: int, values: torch.Tensor) -> list[torch.Tensor]:
    """What lies in a shard of each parameter's gradient."""
    assert stage.shards is not None
    of: dict[int, torch.Tensor] = {}
    for piece, part in zip(stage.shards.pieces(shard), stage.shards.parts(shard, values)):
        key = id(piece.parameter)
        of[key] = part if key not in of else torch.cat([of[key], part])
    return [of.get(id(parameter), values[:0]) for parameter in stage.parameters]


def keep_only(stage: Stage, cut: Cuts | None, me: Worker) -> None:
    """Drop what this worker has given away."""
    if cut is not None and stage.shards is not None:
        for shard in set(stage.shards.held) - set(cut.of(me)):
            stage.shards.drop(shard)


def begin_anew(stage: Stage, groups: Groups, resume: Resume) -> None:
    """Have the shards that are this worker's after ``resume``, and no others, with anything in them: a checkpoint is
    loaded into them."""
    shards, cut = stage.shards, cuts(stage, groups, resume, begun=False)
    if shards is None or cut is None:
        return
    own = cut.of(groups.me)
    for shard in set(shards.held) - set(own):
        shards.drop(shard)
    shards.add(shard for shard in own if shard not in shards.held)


def forget(stage: Stage) -> None:
    """Drop all shards: they are of another life."""
    shards = stage.shards
    for shard in () if shards is None else shards.held:
        assert shards is not None
        shards.drop(shard)


def gather(stage: Stage, groups: Groups, cut: Cuts, peers: Sequence[Worker]) -> None:
    """Those of ``peers`` that do not hold a shard get its part of the model from one that does; all of them take part.
    Raises GenerationOver."""
    shards = stage.shards
    assert shards is not None
    ranks = groups.peers(groups.me.stage)
    moves = [(shard, holders[0], peer, shards.length(shard)) for shard, holders in enumerate(cut.holders)
             for peer in peers if peer not in holders and shards.length(shard)]
    like = shards.parameters[0].data if shards.parameters else torch.empty(0)
    with torch.no_grad():
        own = {shard: shards.values(shard) for shard in {shard for shard, giver, *_ in moves if giver == groups.me}}
        exchange(groups.stage, ranks, groups.me, SHARD_PARAMETERS, moves, read=lambda shard, _: own[shard],
                 write=shards.set_values, like=like)


def owe(site: Site, groups: Groups, resume: Resume) -> bool:
    """Note which shards are to be copied to those that are to hold them; returns whether any are."""
    table = _table(groups, resume)
    site.current.owed = () if site.stage.shards is None or table is None else tuple(
        (shard, Process.parse(giver).worker, Process.parse(taker).worker) for shard, giver, taker in table.moves)
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


def kept(stage: Stage) -> Kept:
    """A copy of the shards that this worker has, for `put_back`."""
    shards = stage.shards
    return {} if shards is None else {
        shard: ({name: tensor.clone() for name, tensor in shards.tensors(shard).items()}, shards.numbers(shard))
        for shard in shards.held}


def put_back(stage: Stage, shards: Kept) -> None:
    """Make this worker's shards what was `kept`, which is used up: its tensors may be theirs from now on."""
    for shard, (tensors, numbers) in shards.items():
        assert stage.shards is not None
        stage.shards.take(shard, tensors, numbers)


def digests(stage: Stage) -> dict[int, int]:
    """A checksum of each shard that this worker has."""
    return {} if stage.shards is None else {shard: digest(stage.shards.tensors(shard)) for shard in stage.shards.held}


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
