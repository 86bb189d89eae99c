"""The replica check: a stage's peers must hold the same parameters and optimizer state, bit for bit (`verify: peers`).

Peers are compared after every recovery and, with `verify_every`, between two iterations. If a recovery meets some peers
in their scripts, which may still make edits that others have made already, they are compared before the next iteration
instead. If most peers agree, the odd ones get the state of the majority before anything is computed with their own.
Without a majority the job stops and says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import VerificationError
from megatron_recycle.membership.worker_events import Corrupt, Healed
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.activity import COPY
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.sharded_reduction import Cuts
from megatron_recycle.runtime.compute.data import digest
from megatron_recycle.runtime.facts import Facts
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.shard_moves import copy
from megatron_recycle.runtime.shards import digests as shard_digests
from megatron_recycle.runtime.shards import gather
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.state_copy import give, stage_tensors, take
from megatron_recycle.runtime.stepper import Stepper
from megatron_recycle.runtime.worker_extension import Meeting, WorkerExtension


def compares(config: RecycleConfig) -> bool:
    """Whether peers are compared after a recovery."""
    return config.verify == "peers" or config.verify_every > 0


class PeerCheck(WorkerExtension):
    """Compares peers once all hold a state, and before iterations."""

    def settle(self, meeting: Meeting) -> None:
        """After a recovery, and at the start. Raises VerificationError."""
        site, standing, first = meeting.site, meeting.standing, meeting.go.generation == 1
        if compares(site.config):
            # A closed stage may not take state from a peer before its last step is final.
            between = not first and meeting.some_are_between()
            standing.unverified = between or standing.rejoins
            if not standing.unverified:
                _verify(site, meeting.stepper, meeting.generation, heal=not first)
                standing.verified = standing.committed + 1

    def due(self, site: Site, stepper: Stepper, generation: Generation, iteration: int) -> None:
        """Compare if ``iteration`` is one of every `verify_every`, or if the last recovery has not; all peers do so at
        the same one. Raises VerificationError."""
        if not stepper.standing.due(iteration, site.config.verify_every):
            return
        stepper.wait()
        with site.phases.waiting("a check"):
            _verify(site, stepper, generation, heal=True)
        stepper.standing.verified, stepper.standing.unverified = iteration, False


def _verify(site: Site, stepper: Stepper, generation: Generation, heal: bool) -> None:
    _verify_shards(site, stepper, generation, heal)
    digests = _exchange(site, generation.groups)
    if len(set(digests.values())) == 1:
        return
    (usual, count), *_ = Counter(digests.values()).most_common()
    odd = [peer for peer, value in digests.items() if value != usual]
    if heal and 2 * count > len(digests):
        _heal(site, stepper, generation, odd, digests)
        digests = _exchange(site, generation.groups)
        if len(set(digests.values())) == 1:
            return
    found = ", ".join(f"{peer}: {value:08x}" for peer, value in digests.items())
    text = (
        f"the workers of stage {site.place.me.stage} differ in parameters or optimizer state ({found}) after "
        f"iteration {stepper.standing.committed}. Before the first iteration: build the model from the same seed or "
        "checkpoint on all of them. Later: restart from the last checkpoint that was written before the last "
        "comparison in which they were equal, and check the memory of these hosts")
    raise VerificationError(text)


def _verify_shards(site: Site, stepper: Stepper, generation: Generation, heal: bool) -> None:
    """Compare the twins of each shard. An odd one gets the majority's content, and all peers get the parameters that
    follow from it. Raises VerificationError, and GenerationOver."""
    cuts, groups = generation.cuts, generation.groups
    if cuts is None:
        return
    differing = _differing(site, groups, cuts)
    usual = {shard: _usual(values) for shard, values in differing.items()}
    if differing and heal and None not in usual.values():
        _heal_shards(site, stepper, groups, cuts, [(shard, giver, twin) for shard, giver in usual.items()
                                                   if giver is not None for twin, value in differing[shard].items()
                                                   if value != differing[shard][giver]], differing)
        differing = _differing(site, groups, cuts)
    for shard, values in differing.items():
        raise VerificationError(
            f"the workers that hold shard {shard} of stage {site.place.me.stage}'s optimizer state differ "
            f"({', '.join(f'{holder}: {value:08x}' for holder, value in values.items())}) "
            f"after iteration {stepper.standing.committed}: restart from the last checkpoint that was written "
            "before the last comparison in which they were equal, and check the memory of these hosts")


def _differing(site: Site, groups: Groups, cuts: Cuts) -> dict[int, dict[Worker, int]]:
    """The shards whose twins differ, with the digest of each twin."""
    peers = groups.peers(groups.me.stage)
    found = torch.zeros(len(cuts.holders), len(peers), dtype=torch.float64)
    with site.phases.working("check"):
        for shard, value in shard_digests(site.stage).items():
            if shard in cuts.of(groups.me):
                found[shard, peers.index(groups.me)] = value
    groups.stage_control.sum(found).wait()
    digests = {shard: {holder: int(found[shard, peers.index(holder)]) for holder in holders}
               for shard, holders in enumerate(cuts.holders)}
    return {shard: values for shard, values in digests.items() if len(set(values.values())) > 1}


def _usual(values: Mapping[Worker, int]) -> Worker | None:
    """A holder with the value of more than half of the holders; None without a majority."""
    (usual, count), *_ = Counter(values.values()).most_common()
    return next(holder for holder, value in values.items() if value == usual) if 2 * count > len(values) else None


def _named(digests: Mapping[Worker, int]) -> dict[str, int | str]:
    return {str(peer): f"{value:08x}" for peer, value in digests.items()}


def _heal_shards(site: Site, stepper: Stepper, groups: Groups, cuts: Cuts, moves: Sequence[tuple[int, Worker, Worker]],
                 digests: Mapping[int, Mapping[Worker, int]]) -> None:
    own, iteration, began = site.stage.shards, stepper.standing.committed, time.monotonic()
    assert own is not None
    for shard, _, odd in moves:
        if odd == site.place.me:
            site.agent.event(Corrupt(iteration + 1, _named(digests[shard]), shard))
    with site.phases.working(COPY), site.phases.writing():
        taken = copy(site, groups, moves)
        for shard in taken:
            own.copy_to_model(shard)
        gather(site.stage, groups, cuts, groups.peers(groups.me.stage))  # parameters may have come from the odd one
    if taken:
        size = sum(tensor.nbytes for shard in taken for tensor in own.tensors(shard).values())
        site.agent.event(Healed(iteration + 1, size, round(1000 * (time.monotonic() - began), 1), tuple(taken)))


def _exchange(site: Site, groups: Groups) -> dict[Worker, int]:
    """Digest of every peer of this stage."""
    peers = groups.peers(groups.me.stage)
    digests = torch.zeros(len(peers), dtype=torch.float64)
    with site.phases.working("check"):
        digests[peers.index(groups.me)] = digest(site.stage.state())
    groups.stage_control.sum(digests).wait()
    return dict(zip(peers, map(int, digests.tolist())))


def _heal(site: Site, stepper: Stepper, generation: Generation, odd: Sequence[Worker],
          digests: dict[Worker, int]) -> None:
    """Copy the whole state from the other peers to ``odd``. It may take minutes, and all others wait."""
    with site.phases.working(COPY):
        if site.place.me in odd:
            _take_over(site, stepper, generation, odd, digests)
        else:
            give(generation.groups, odd, stage_tensors(site.stage), stepper.facts())


def _take_over(site: Site, stepper: Stepper, generation: Generation, odd: Sequence[Worker],
               digests: dict[Worker, int]) -> None:
    groups, iteration = generation.groups, stepper.standing.committed
    began = time.monotonic()
    site.agent.event(Corrupt(iteration + 1, _named(digests)))
    tensors, facts, received = take(groups, odd, site.stage.device)
    stepper.enter(tensors, Facts.from_json(facts))
    site.agent.event(Healed(iteration + 1, received.bytes, round(1000 * (time.monotonic() - began), 1)))
