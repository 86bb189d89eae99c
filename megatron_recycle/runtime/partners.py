"""The partners of a worker: whom it is going to send to on a generation's communicators.

Where a library connects two workers at their first transfer, they are connected when a generation is built, and before
another plan is taken up, so that no transfer of an iteration is the first of its pair.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import combinations

from megatron_recycle.membership import Process, Resume, Standing, workers_of
from megatron_recycle.plan import Pair, Worker, pair_of, pairs, tied_pairs
from megatron_recycle.runtime.comm.first_transfers import make_first_transfers
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.site import Site


def connect_partners(site: Site, standing: Standing, generation: Generation, limit: float,
                     phase: AbstractContextManager[object], resume: Resume | None = None) -> None:
    """Connect all pairs that send to each other under the plan of ``generation``, and, when all ``resume``, before that
    and in the rest of an iteration; all members come here. ``limit``: seconds; ``phase``: what the training thread is
    in meanwhile.

    Raises GenerationOver.
    """
    groups = generation.groups
    if not groups.world.backend.lazy:
        return
    peers = groups.peers(groups.me.stage)
    everybody = site.exact or generation.cuts is not None  # peers exchange pieces, or shards
    stage = {*combinations(peers, 2)} if everybody else set() if resume is None else _given(resume, peers)
    talk = pairs(generation.plan) | tied_pairs(generation.plan)
    if resume is not None:
        talk |= pairs(generation.program_of(resume.next).plan)
    with phase:
        make_first_transfers(groups, talk, stage, site.stage.device, lambda: site.interrupted(standing), limit)


def _given(resume: Resume, peers: tuple[Worker, ...]) -> set[Pair]:
    """The ``peers`` of which one gives the other its state, or a gradient, before training goes on."""
    joined = set(workers_of(resume.joined))
    found = {pair_of(giver, taker) for taker in peers if taker in joined for giver in peers if giver not in joined}
    copies = [(Process.parse(to).worker, Process.parse(source).worker) for to, source in resume.copies.items()]
    return found | {pair_of(*pair) for pair in copies if pair[0] in peers}
