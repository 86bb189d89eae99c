"""The first transfer of each pair of workers, made before anything depends on it.

NCCL connects two workers at their first transfer in each direction: the thread that posts it stands still until the
other worker posts its own, for ever if that worker has died, and an abort need not free it. So all pairs that will send
to each other exchange one number first, in a thread that can be left behind: when a generation is built, and before
another plan is taken up. They do so in rounds that are the same for all (`plan.rounds`), so that no circular wait
arises. Transfers posted earlier on the same communicator come first everywhere, and those posted afterwards come
later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from itertools import combinations

import torch

from megatron_recycle.membership import Process, Resume, Standing, workers_of
from megatron_recycle.plan import Pair, Worker, pair_of, pairs, rounds, tied_pairs
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.rendezvous import unless_interrupted
from megatron_recycle.runtime.comm.tags import FIRST_IN_STAGE, FIRST_IN_WORLD, Tags
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.site import Site

RankPairs = frozenset[tuple[int, int]]


def connect_partners(site: Site, standing: Standing, generation: Generation, limit: float,
                     phase: AbstractContextManager[object], resume: Resume | None = None) -> None:
    """Connect all pairs that send to each other under the plan of ``generation``, and, when all ``resume``, before that
    and in the rest of an iteration; all members come here. ``limit``: seconds; ``phase``: the training thread's state
    meanwhile.

    Raises GenerationOver.
    """
    groups = generation.groups
    if not groups.world.backend.lazy:
        return
    peers = groups.peers(groups.me.stage)
    all_peers = site.exact or generation.cuts is not None  # peers exchange pieces, or shards
    stage = {*combinations(peers, 2)} if all_peers else set() if resume is None else _given(resume, peers)
    transfers = pairs(generation.plan) | tied_pairs(generation.plan)
    if resume is not None:
        transfers |= pairs(generation.program_of(resume.next).plan)
    with phase:
        make_first_transfers(groups, transfers, stage, site.stage.device, lambda: site.interrupted(standing), limit)


def _given(resume: Resume, peers: tuple[Worker, ...]) -> set[Pair]:
    """Pairs of ``peers`` in which one gives the other its state, or a gradient, before training goes on."""
    joined = set(workers_of(resume.joined))
    found = {pair_of(giver, taker) for taker in peers if taker in joined for giver in peers if giver not in joined}
    copies = [(Process.parse(to).worker, Process.parse(source).worker) for to, source in resume.copies.items()]
    return found | {pair_of(*pair) for pair in copies if pair[0] in peers}


def make_first_transfers(groups: Groups, world: Collection[Pair], stage: Collection[Pair], device: torch.device,
                         interrupted: Callable[[], bool], limit: float) -> None:
    """Connect the pairs of members that are not connected yet: ``world`` for `Groups.world`, ``stage``, of this
    worker's, for `Groups.stage`. All members come here with the same pairs. Does nothing if the library has connected
    all pairs before.

    Args:
        device: of the tensors.
        interrupted: whether the transfers are not wanted any more.
        limit: seconds for all of them.

    Raises GenerationOver: ``interrupted()``, or a member was lost or was too slow.
    """
    numbers = {worker: number for number, worker in enumerate(groups.members)}
    peers = {worker: number for number, worker in enumerate(groups.peers(groups.me.stage))}
    todo = [(groups.world, FIRST_IN_WORLD, _new(groups.world, world, numbers)),
            (groups.stage, FIRST_IN_STAGE, _new(groups.stage, stage, peers))]
    if not any(new for _, _, new in todo):
        return
    in_thread = groups.world.backend.in_thread()

    def connect(over: Callable[[], bool]) -> None:
        in_thread()
        for comm, tags, new in todo:
            _exchange(comm, tags, new, device)

    # After an abort the library may have let its thread go, or not.
    unless_interrupted(lambda: interrupted() or groups.world.aborted, connect, lambda _: None, groups.teardown.threads,
                       limit)
    for comm, _, new in todo:
        comm.ledger.met |= new


def _new(comm: Comm, wanted: Collection[Pair], numbers: Mapping[Worker, int]) -> RankPairs:
    if not comm.backend.lazy:
        return frozenset()
    return frozenset(pair_of(numbers[one], numbers[other]) for one, other in wanted) - comm.ledger.met


def _exchange(comm: Comm, tags: Tags, pairs: RankPairs, device: torch.device) -> None:
    """One number each way between the members of each pair; both ways at once, since either end may block the other's.
    Raises GenerationOver."""
    for pair in [pair for each in rounds(pairs) for pair in each if comm.rank in pair]:
        partner = sum(pair) - comm.rank
        with comm.batch():
            moving = [comm.send(torch.zeros(1, device=device), partner, tags[0]),
                      comm.receive(torch.zeros(1, device=device), partner, tags[0])]
        for pending in moving:
            # A worker that leaves a wait because a step is undone comes here again; its partner may have left the wait.
            pending.wait(stays=True)
