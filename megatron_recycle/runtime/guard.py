"""The last copy of a stage, guarded (`guard`): who copies what before which iteration, and the way back.

As long as some stage has one worker, all workers copy their own state every `guard_interval` iterations, at the same
boundary, and that stage's goes to its keeper, a worker of another stage, as well. A stage that is lost comes back with
a new process: it gets its keeper's copy, and all others take up their own copies of the same iteration. Or all load the
newest checkpoint, where no copy is as new; there each gets the shards that are its own from then on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from megatron_recycle.control import Go
from megatron_recycle.membership import workers_of
from megatron_recycle.membership.inputs import Received
from megatron_recycle.membership.worker_events import Guarded
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime import shards
from megatron_recycle.runtime.activity import COPY
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.copies import StateCopy, receive, send
from megatron_recycle.runtime.facts import Facts, Past
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.saving import load
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.state_copy import give, stage_tensors, take
from megatron_recycle.runtime.stepper import Stepper


def refresh(site: Site, stepper: Stepper, generation: Generation, iteration: int) -> None:
    """Before ``iteration`` begins, make copies if they are due; all workers do so at the same iteration. Not before
    an iteration was committed: what there is then, the script can make again.

    Raises GenerationOver and WrongGuess.
    """
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
    """The copies of other stages that this worker keeps."""
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
    """The cost of copies: an event of each keeper, and a line of each worker that begins to copy."""
    if kept:
        size = sum(copy.nbytes for copy in kept.values())
        site.agent.event(Guarded(iteration - 1, tuple(sorted(kept)), size, round(ms, 1)))
    else:
        get_logger().info(
            "megatron-recycle: worker %s keeps two copies of its state, %.1f MiB each, in CPU memory, made in %.0f ms "
            "every %d iterations, while a stage has one worker (guard)", site.place.name, own.nbytes / 2**20, ms,
            site.config.guard_interval)


def go_back(site: Site, stepper: Stepper, groups: Groups, go: Go) -> None:
    """For a worker that is left: take up the state after the iteration that all go back to, and give those that come in
    what they need. Raises GenerationOver."""
    me, guard, target = groups.me, site.trainable.guard, go.resume.target
    joined, checkpoint = workers_of(go.resume.joined), go.resume.checkpoint
    guard.go_back(target)
    where = "copies in memory" if checkpoint is None else f"the checkpoint in {checkpoint.place}"
    get_logger().warning("megatron-recycle: %s: all go back to the state after iteration %d, from %s", _lost(go),
                         target, where)
    if checkpoint is not None:
        guard.midway = site.stage.shards is not None  # else a stage that is lost says so
        shards.begin_anew(site.stage, groups, go.resume)
        (tensors, facts), past = load(site, go.generation, checkpoint), site.past
        stepper.enter(tensors, facts(past))
        if me == min(member for member in groups.members if member not in joined):
            for worker in joined:
                send(groups.control, groups.control_ranks[worker], StateCopy.of({}, past))
        site.trainable.brought = None
        site.trainable.lay_out()
        return
    for stage, keeper in _restored(go).items():
        if me == keeper:
            for worker in (worker for worker in joined if worker.stage == stage):
                send(groups.control, groups.control_ranks[worker], guard.of[stage][target])
    tensors, copied = guard.own[target].open(site.stage.device)
    stepper.enter(tensors, Facts.from_json(copied))
    site.trainable.brought = None
    site.trainable.lay_out()
    give(groups, joined, stage_tensors(site.stage), stepper.facts())


def all_are_back(site: Site, groups: Groups) -> None:
    """Wait until everybody stands where all go back to. Only then does one that has come in count: else a failure would
    find a stage behind the others, with nobody who holds what they do. Raises GenerationOver."""
    with site.phases.waiting("the others' way back"):
        count(groups.control, True)
    site.trainable.guard.midway = False


def take_back(site: Site, groups: Groups, go: Go) -> tuple[dict[str, torch.Tensor], Facts, Received]:
    """For a worker that comes in: the state of its stage, from the keeper or, if others hold it, from them; or from the
    checkpoint that all go back to. Raises GenerationOver and TransferError, and what loading that raises."""
    began = time.monotonic()
    if go.resume.checkpoint is not None:
        shards.begin_anew(site.stage, groups, go.resume)
        tensors, facts = load(site, go.generation, go.resume.checkpoint)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # what the script does to it is no part
        giver = min(member for member in groups.members if member not in workers_of(go.resume.joined))
        _, told = receive(groups.control, groups.control_ranks[giver]).open(site.stage.device)
        return tensors, facts(Past.from_json(told)), Received(sum(tensor.nbytes for tensor in tensors.values()),
                                                              1000 * (time.monotonic() - began))
    keeper = _restored(go).get(groups.me.stage)
    if keeper is None:
        tensors, told, received = take(groups, workers_of(go.resume.joined), site.stage.device)
    else:
        copy = receive(groups.control, groups.control_ranks[keeper])
        received = Received(copy.nbytes, 1000 * (time.monotonic() - began))
        tensors, told = copy.open(site.stage.device)
    return tensors, Facts.from_json(told), received


def _lost(go: Go) -> str:
    """What nobody has any more."""
    new = {worker.stage for worker in workers_of(go.resume.joined)}
    stages = [stage for stage in go.resume.restored if int(stage) in new]
    cut = [stage for stage in go.resume.restored if int(stage) not in new]
    return " and ".join([f"stage {', '.join(stages)} was lost"] * bool(stages)
                        + [f"nobody has all shards of stage {', '.join(cut)}'s optimizer state, or all its messages of "
                           "an iteration that scripts have left"] * bool(cut))


def _restored(go: Go) -> dict[int, Worker]:
    return {int(stage): Worker.parse(keeper) for stage, keeper in go.resume.restored.items()}
