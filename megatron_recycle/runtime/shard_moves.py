"""Shards of an optimizer's state on their way to other workers, mostly after a failure.

Shards are copied to their new holders (`adopt`) in the recovery. They are copied before the next iteration if the
recovery meets some peers in their scripts, or if the stage is closed for an iteration that is not committed: its step
may have to be repeated by the workers with its slices. A copy counts once it is whole. A giver keeps its shard until
the next gradient is held, of which it gets nothing for that shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_recycle.membership import Standing
from megatron_recycle.membership.names import Process
from megatron_recycle.membership.report import ShardsReport
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.bundle import Head, Incoming, Lane, Outgoing, read
from megatron_recycle.runtime.comm.comm import Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.comm.tags import SHARD_STATE
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer
from megatron_recycle.runtime.generation import Generation, PendingShards
from megatron_recycle.runtime.shards import cuts, gather, kept, table
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stepper import Stepper
from megatron_recycle.runtime.worker_extension import Meeting, WorkerExtension

_MIB = 2**20
_TAGS = 2**14
"""Tags of a move: for pieces of 256 GiB."""


class ShardMoves(WorkerExtension):
    """Keeps holders of each shard of the optimizer's state, whichever worker is lost."""

    def reports(self, site: Site, standing: Standing) -> Mapping[str, Any]:
        """The shards that this worker has whole; none where each worker has all of the state."""
        shards = site.stage.shards
        return {} if shards is None else {"shards": ShardsReport(
            shards.count, max(site.config.state_copies or site.place.grid.pipelines, shards.least),
            dict.fromkeys(shards.held, standing.holds))}

    def level(self, meeting: Meeting) -> None:
        """Send stepped parameters to the peers that did not get them before the failure."""
        site, groups, todo, stepped = meeting.site, meeting.groups, meeting.todo, meeting.standing.stepped
        before = cuts(site.stage, groups, meeting.resume, begun=True)
        if before is None or meeting.resume.restored or meeting.go.generation == 1:
            return
        with site.phases.copying():
            # If all have their parameters, scripts may have edited them since, on some peers and not yet on others.
            (lacking,) = count(groups.stage_control, not todo.enter and site.trainable.gathered != stepped)
            if lacking and not todo.enter:
                with site.phases.writing():
                    gather(site.stage, groups, before, [
                        peer for peer in groups.peers(groups.me.stage) if peer not in meeting.joined])
                site.trainable.gathered = stepped

    def settle(self, meeting: Meeting) -> None:
        """Copy what is owed, or note that it is."""
        site, go = meeting.site, meeting.go
        owed = meeting.stepper.current.owed = owed_by(meeting)
        if owed is not None and site.place.me.stage not in go.resume.closed and (
                go.generation == 1 or go.closing is not None
                or not meeting.some_are_between(with_joined=False)):
            adopt(site, meeting.stepper)
        if meeting.todo.enter:
            with site.phases.copying():
                site.trainable.shards = kept(site.stage)

    def catch_up(self, site: Site, stepper: Stepper, generation: Generation) -> None:
        if stepper.current.owed is not None:
            stepper.wait()
        adopt(site, stepper)


def owed_by(meeting: Meeting) -> PendingShards | None:
    """The shards to copy to their new holders."""
    stage, groups = meeting.site.stage, meeting.groups
    own = table(groups, meeting.resume)
    if stage.shards is None or own is None or not own.moves:
        return None
    had = cuts(stage, groups, meeting.resume, begun=True)
    assert had is not None
    return PendingShards(tuple((shard, Process.parse(giver).worker, Process.parse(taker).worker)
                      for shard, giver, taker in own.moves), had)


def adopt(site: Site, stepper: Stepper) -> None:
    """Copy the shards that are owed, where all peers are at the same place of their scripts. Raises GenerationOver, and
    TransferError if one arrives damaged."""
    current = stepper.current
    if current.owed is not None and site.stage.shards is not None:
        with site.phases.copying():
            _tell(site, copy(site, current.get().groups, current.owed.moves), site.stage.shards)
    current.owed = None


def copy(site: Site, groups: Groups, moves: Sequence[tuple[int, Worker, Worker]]) -> list[int]:
    """Copy shards; ``moves``: (shard, giver, taker), the same on all peers of a stage. Returns the shards that this
    worker has taken. Raises as `adopt`."""
    shards, peers, me = site.stage.shards, groups.peers(groups.me.stage), groups.me
    assert shards is not None
    lanes = [Lane(groups.stage_control, groups.stage, SHARD_STATE, _TAGS * number) for number in range(len(moves))]
    taken = [(lane, peers.index(giver), shard) for lane, (shard, giver, taker) in zip(lanes, moves) if taker == me]
    given: list[tuple[Lane, int, Outgoing]] = []
    sending: list[Pending] = []
    for lane, (shard, giver, taker) in zip(lanes, moves):
        if giver == me:
            own, to = {**shards.tensors(shard)}, peers.index(taker)
            sending += lane.send_head(Head.of(shards.numbers(shard), own).text, to)
            given.append((lane, to, Outgoing(own)))
    heads = [Head.parse(lane.receive_head(source)) for lane, source, _ in taken]
    with groups.stage.batch():
        for lane, to, share in given:
            sending += share.send(lane, to)
        arriving = [Incoming(lane, [source], head.tensors, site.stage.device)
                    for (lane, source, _), head in zip(taken, heads)]
    for lane, to, share in given:
        sending += share.send_sums(lane, to)
    for (_, _, shard), head, coming in zip(taken, heads, arriving):
        tensors = coming.finish(f"shard {shard} of stage {me.stage}")
        shards.take(shard, tensors, read(head.facts, tensors))
    for each in sending:
        each.wait()
    return [shard for _, _, shard in taken]


def _tell(site: Site, adopted: Sequence[int], shards: ShardedOptimizer) -> None:
    if adopted:
        size = sum(tensor.nbytes for shard in adopted for tensor in shards.tensors(shard).values())
        get_logger().info("megatron-recycle: worker %s holds shards %s of its stage's optimizer state; %s came from "
                          "peers (%.1f MiB)", site.place.name, ", ".join(map(str, shards.held)),
                          ", ".join(map(str, adopted)), size / _MIB)
