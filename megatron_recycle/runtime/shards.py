"""Operations on the shards of a stage's optimizer state: norms, steps, parameters.

A step changes on each worker the part of the model that belongs to its own shards. The other parts come from the
holders of their shards (`gather`). Moves of shards to other workers after a failure: `shard_moves`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import ConfigError
from megatron_recycle.membership import Resume
from megatron_recycle.membership.names import Process
from megatron_recycle.membership.shards import ShardTable
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.sharded_reduction import Cuts, exchange
from megatron_recycle.runtime.comm.tags import SHARD_PARAMETERS
from megatron_recycle.runtime.compute.accumulate import Layout
from megatron_recycle.runtime.compute.data import digest
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.stage import Stage

Kept = Mapping[int, tuple[Mapping[str, torch.Tensor], Sequence[Mapping[str, Any]]]]
"""By shard, its tensors and numbers."""


def check(stage: Stage, place: Place, config: RecycleConfig) -> None:
    """Raises ConfigError for settings that exclude an optimizer state in shards."""
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


def cuts(stage: Stage, groups: Groups, resume: Resume, begun: bool) -> Cuts | None:
    """The holders of this stage's shards: when the generation had ``begun``, or from the end of the recovery on; None
    if its state is not cut."""
    shards, own = stage.shards, table(groups, resume)
    if shards is None or own is None:
        return None
    return Cuts(tuple(tuple(Process.parse(name).worker for name in names)
                      for names in (own.had if begun else own.holders)),
                lambda shard, layout: shards.spans(shard, layout.starts), shards.wire)


def table(groups: Groups, resume: Resume) -> ShardTable | None:
    """The table of this worker's stage and part; None: its state is not cut."""
    mine = groups.me.stage, groups.part
    return next((table for table in resume.shards if (table.stage, table.part) == mine), None)


def norms(stage: Stage, cut: Cuts | None, groups: Groups, layout: Layout,
          gradient: torch.Tensor) -> tuple[tuple[float, ...], float]:
    """The stage's squared norm, or that of each shard, and the number of zeros in its reduced ``gradient``, the same
    bits on all peers; all of them take part. Raises GenerationOver."""
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
    """A reduced gradient as `Stage.step` takes it."""
    return layout.views(gradient) if stage.shards is None else stage.shards.split(gradient)


def _parts(stage: Stage, shard: int, values: torch.Tensor) -> list[torch.Tensor]:
    """The elements of each parameter's gradient in a shard."""
    assert stage.shards is not None
    of: dict[int, torch.Tensor] = {}
    for piece, part in zip(stage.shards.pieces(shard), stage.shards.parts(shard, values)):
        key = id(piece.parameter)
        of[key] = part if key not in of else torch.cat([of[key], part])
    return [of.get(id(parameter), values[:0]) for parameter in stage.parameters]


def keep_only(stage: Stage, cut: Cuts | None, me: Worker) -> None:
    """Drop the shards that this worker has given away."""
    if cut is not None and stage.shards is not None:
        for shard in set(stage.shards.held) - set(cut.of(me)):
            stage.shards.drop(shard)


def begin_anew(stage: Stage, groups: Groups, resume: Resume) -> None:
    """Have exactly the shards that are this worker's after ``resume``, with any content: a checkpoint is loaded into
    them."""
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
    """Send each shard's part of the model from one of its holders to the ``peers`` that do not hold it; all of them
    take part. Raises GenerationOver."""
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


def kept(stage: Stage) -> Kept:
    """A copy of this worker's shards, for `put_back`."""
    shards = stage.shards
    return {} if shards is None else {
        shard: ({name: tensor.clone() for name, tensor in shards.tensors(shard).items()}, shards.numbers(shard))
        for shard in shards.held}


def put_back(stage: Stage, shards: Kept) -> None:
    """Restore this worker's shards from `kept` copies, which are used up: the shards may keep their tensors."""
    for shard, (tensors, numbers) in shards.items():
        assert stage.shards is not None
        stage.shards.take(shard, tensors, numbers)


def digests(stage: Stage) -> dict[int, int]:
    """A checksum of each shard that this worker has."""
    return {} if stage.shards is None else {shard: digest(stage.shards.tensors(shard)) for shard in stage.shards.held}
