"""Guards of a stage's last copy (`guard`): which copies are made before which iteration, and the way back.

As long as some stage has one worker, all workers copy their own state every `guard_interval` iterations, at the same
boundary. That stage's copy also goes to its keeper, a worker of another stage. A lost stage comes back with a new
process, which gets the keeper's copy; all others take up their own copies of the same iteration. Where no copy is as
new as the newest checkpoint, all load that instead, and each worker gets from it its own shards of the new cuts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import asdict, replace

from megatron_recycle.control import Go
from megatron_recycle.membership import Standing, workers_of
from megatron_recycle.membership.inputs import Received
from megatron_recycle.membership.worker_events import Guarded
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.activity import COPY
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.copies import StateCopy, receive, send
from megatron_recycle.runtime.facts import Facts, Past
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.saving import load
from megatron_recycle.runtime.shards import begin_anew
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.state_copy import give, stage_tensors
from megatron_recycle.runtime.stepper import Stepper
from megatron_recycle.runtime.worker_extension import PEERS, Meeting, Source, WorkerExtension


class LastCopies(WorkerExtension):
    """The way back of a lost stage."""

    def reports(self, site: Site, standing: Standing) -> Mapping[str, Any]:
        """The copies that this worker has, and the earliest checkpoint that it can go back to."""
        guard, since = site.trainable.guard, site.framework.data.since
        read = bisect_left(range(-1, standing.committed + 1), since,
                           key=lambda iteration: site.grids.number(iteration + 1))
        return {"guard": guard.report(guard.back, read - 1)}

    def source(self, meeting: Meeting) -> Source | None:
        return _WayBack() if meeting.resume.restored else None

    def settle(self, meeting: Meeting) -> None:
        """Copies wait for an iteration that all begin: a closed stage does not begin the open iteration."""
        meeting.site.trainable.guard.first = meeting.resume.next + bool(meeting.resume.closed)

    def due(self, site: Site, stepper: Stepper, generation: Generation, iteration: int) -> None:
        """Make copies if they are due; all workers do so at the same iteration. Not before an iteration is committed:
        the script can make that state again."""
        guard, number = site.trainable.guard, generation.epoch.generation
        if not generation.keepers:
            guard.forget()
            return
        if not guard.due(number, iteration, site.config.guard_interval):
            return
        stepper.wait()
        if stepper.standing.verdict is None:
            return
        began, first = time.monotonic(), guard.begins
        with site.phases.working(COPY):
            own = StateCopy.of(stage_tensors(site.stage), stepper.facts())
            kept = _exchange(generation, own)
            guard.keep(number, iteration, own, kept)
        if first or kept:
            _tell(site, iteration, own, kept, 1000 * (time.monotonic() - began))


def _exchange(generation: Generation, own: StateCopy) -> dict[int, StateCopy]:
    """Send and receive copies; returns the copies of other stages that this worker keeps."""
    groups = generation.groups
    found: dict[int, StateCopy] = {}
    for stage, keeper in generation.keepers.items():
        last = groups.peers(stage)[0]
        if groups.me == last:
            send(groups.control, groups.control_ranks[keeper], own)
        elif groups.me == keeper:
            found[stage] = receive(groups.control, groups.control_ranks[last])
    return found


def _tell(site: Site, iteration: int, own: StateCopy, kept: Mapping[int, StateCopy], ms: float) -> None:
    """Report the cost of copies: an event of each keeper, and a log line of each worker that begins to copy."""
    if kept:
        size = sum(copy.nbytes for copy in kept.values())
        site.agent.event(Guarded(iteration - 1, tuple(sorted(kept)), size, round(ms, 1)))
    else:
        get_logger().info(
            "megatron-recycle: worker %s keeps two copies of its state, %.1f MiB each, in CPU memory, made in %.0f ms "
            "every %d iterations, while a stage has one worker (guard)", site.place.name, own.nbytes / 2**20, ms,
            site.config.guard_interval)


class _WayBack(Source):
    """The state after an iteration that all go back to, from copies or a checkpoint."""

    def give(self, meeting: Meeting) -> None:
        """Take up that state, and send the joiners their part."""
        site, groups, resume = meeting.site, meeting.groups, meeting.resume
        guard, target, checkpoint = site.trainable.guard, resume.target, resume.checkpoint
        guard.go_back(target)
        source = "copies in memory" if checkpoint is None else f"the checkpoint in {checkpoint.place}"
        get_logger().warning("megatron-recycle: %s: all go back to the state after iteration %d, from %s",
                             _lost(meeting.go), target, source)
        if checkpoint is None:
            self._from_copies(meeting)
        else:
            guard.midway = True
            begin_anew(site.stage, groups, resume)
            (tensors, facts), past = load(site, meeting.go.generation, checkpoint), site.past
            meeting.stepper.enter(tensors, facts(past))
            if groups.me == min(member for member in groups.members if member not in meeting.joined):
                for worker in meeting.joined:
                    send(groups.control, groups.control_ranks[worker], StateCopy.of({}, past))
        site.trainable.initial_state = None
        site.trainable.lay_out()
        if checkpoint is None:
            give(groups, meeting.joined, stage_tensors(site.stage), meeting.stepper.facts())
        self._await_all(meeting)

    def _from_copies(self, meeting: Meeting) -> None:
        site, groups, target = meeting.site, meeting.groups, meeting.resume.target
        guard = site.trainable.guard
        for stage, keeper in _restored(meeting.go).items():
            if groups.me == keeper:
                for worker in (worker for worker in meeting.joined if worker.stage == stage):
                    send(groups.control, groups.control_ranks[worker], guard.of[stage][target])
                    send(groups.control, groups.control_ranks[worker], StateCopy.of({}, site.past))
        tensors, copied = guard.own[target].open(site.stage.device)
        meeting.stepper.enter(tensors, Facts.from_json(copied))

    def take(self, meeting: Meeting) -> tuple[dict[str, torch.Tensor], Facts, Received]:
        """From the keeper; from peers, if the stage has any; or from the checkpoint. Raises the errors of loading,
        too."""
        began, site, groups, resume = time.monotonic(), meeting.site, meeting.groups, meeting.resume
        if resume.checkpoint is not None:
            begin_anew(site.stage, groups, resume)
            tensors, facts = load(site, meeting.go.generation, resume.checkpoint)
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # the script changes the originals
            giver = min(member for member in groups.members if member not in meeting.joined)
            _, raw_past = receive(groups.control, groups.control_ranks[giver]).open(site.stage.device)
            return tensors, facts(Past.from_json(raw_past)), Received(sum(tensor.nbytes for tensor in tensors.values()),
                                                                      1000 * (time.monotonic() - began))
        keeper = _restored(meeting.go).get(groups.me.stage)
        if keeper is None:
            return PEERS.take(meeting)
        copy = receive(groups.control, groups.control_ranks[keeper])
        received = Received(copy.nbytes, 1000 * (time.monotonic() - began))
        tensors, raw_facts = copy.open(site.stage.device)
        _, raw_past = receive(groups.control, groups.control_ranks[keeper]).open(site.stage.device)
        past = Past.from_json(raw_past)  # scripts have evaluated since the copy was made
        return tensors, replace(Facts.from_json(raw_facts), **asdict(past)), received

    def taken(self, meeting: Meeting) -> None:
        self._await_all(meeting)

    def _await_all(self, meeting: Meeting) -> None:
        """Wait until all workers stand at the state to go back to. Only then does a joiner count: else a failure would
        find a stage behind the others, and no worker that holds what they hold."""
        with meeting.site.phases.waiting("the others' way back"):
            count(meeting.groups.control, True)
        meeting.site.trainable.guard.midway = False


def _lost(go: Go) -> str:
    """The state that no worker has any more, in words."""
    new = {worker.stage for worker in workers_of(go.resume.joined)}
    stages = [stage for stage in go.resume.restored if int(stage) in new]
    cut = [stage for stage in go.resume.restored if int(stage) not in new]
    return " and ".join([f"stage {', '.join(stages)} was lost"] * bool(stages)
                        + [f"nobody has all shards of stage {', '.join(cut)}'s optimizer state, or all its messages of "
                           "an iteration that scripts have left"] * bool(cut))


def _restored(go: Go) -> dict[int, Worker]:
    return {int(stage): Worker.parse(keeper) for stage, keeper in go.resume.restored.items()}
