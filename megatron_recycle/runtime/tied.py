"""Gradients of parameters that several stages keep copies of (tied embeddings).

Each of these stages has reduced its own gradient; the parameter's gradient is their sum, one value per stage,
added in stage order, so that it does not depend on how many workers a stage has left (promise P3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_recycle.errors import TransportAborted
from megatron_recycle.runtime.accumulate import Layout
from megatron_recycle.runtime.groups import Groups, wait_for
from megatron_recycle.runtime.stage import Tie

# Above any number that a channel's messages reach, below the abort's own.
_FIRST_TAG = 2**30


def fold_ties(ties: Sequence[Tie], layout: Layout, gradient: torch.Tensor, groups: Groups) -> None:
    """Replace this stage's gradient of every tied parameter by the sum over all its stages, in place.

    All peers of a stage have the same bits, so any of them can give: worker i of a stage gives to the other
    stage's workers j with j mod n == i. Raises TransportAborted when the generation ends meanwhile.
    """
    for index, tie in enumerate(ties):
        own = layout.view(gradient, tie.parameter)
        try:
            values = _gather(tie, own, index, groups)
        except RuntimeError as error:
            raise TransportAborted(f"exchanging a tied gradient failed: {error}") from error
        total = values[0].clone()
        for value in values[1:]:
            total += value
        own.copy_(total)


def _gather(tie: Tie, own: torch.Tensor, index: int, groups: Groups) -> list[torch.Tensor]:
    """Each stage's value, in stage order."""
    me = groups.me
    mine = groups.peers(me.stage)
    works: list[dist.Work] = []
    outgoing = own.contiguous()
    values = []
    for stage in tie.stages:
        if stage == me.stage:
            values.append(own)
            continue
        theirs = groups.peers(stage)
        for place, receiver in enumerate(theirs):
            if mine[place % len(mine)] == me:
                works.append(groups.world.send([outgoing], groups.rank(receiver), _FIRST_TAG + index))
        buffer = torch.empty_like(outgoing)
        giver = theirs[mine.index(me) % len(theirs)]
        works.append(groups.world.recv([buffer], groups.rank(giver), _FIRST_TAG + index))
        values.append(buffer)
    for work in works:
        wait_for(work, groups.world)
    return values
