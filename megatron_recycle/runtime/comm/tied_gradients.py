"""Gradients of parameters that several stages keep copies of (tied embeddings).

Each of these stages has its own gradient; the parameter's gradient is their sum, one value per stage, added in stage
order, so that it does not depend on the number of a stage's survivors (promise P3). A framework that adds up stages
before pipelines is followed where that is possible, by `FastReduction`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import tied_givers
from megatron_recycle.runtime.comm.comm import Pending, wait_all
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import TIES
from megatron_recycle.runtime.compute.accumulate import Layout
from megatron_recycle.runtime.stage import Tie


def fold_ties(ties: Sequence[Tie], layout: Layout, gradient: torch.Tensor, groups: Groups) -> None:
    """Replace this stage's gradient of every tied parameter by the sum over all its stages, in place.

    All peers of a stage have the same bits, so any of them can give: worker i of a stage gives to the other stage's
    workers j with j mod n == i. Where stages have workers in the same pipelines, each gives to its own pipeline, so
    that this also works for gradients that peers have not added up yet.

    Raises GenerationOver when the generation ends meanwhile, UnsupportedError if only some of its stages train it.
    """
    for tie in ties:
        trained = tie.parameter in layout
        flag = torch.full((1,), float(trained), device=gradient.device)
        everywhere = [bool(value) for value in _gather(tie, flag, 2 * tie.number, groups)]
        if len(set(everywhere)) > 1:
            raise UnsupportedError(_apart(tie, everywhere))
        if not trained:
            continue
        own = layout.view(gradient, tie.parameter)
        values = _gather(tie, own, 2 * tie.number + 1, groups)
        total = values[0].clone()
        for value in values[1:]:
            total += value
        own.copy_(total)


def pipelines_alike(tie: Tie, groups: Groups) -> bool:
    """Whether the stages of ``tie`` have live workers in the same pipelines; the answer is the same on all of them."""
    return len({tuple(peer.pipeline for peer in groups.peers(stage)) for stage in tie.stages}) == 1


def _apart(tie: Tie, everywhere: Sequence[bool]) -> str:
    trained = [str(stage) for stage, flag in zip(tie.stages, everywhere) if flag]
    frozen = [str(stage) for stage, flag in zip(tie.stages, everywhere) if not flag]
    return (f"a parameter of shape {tuple(tie.parameter.shape)} that stages {', '.join(map(str, tie.stages))} share is "
            f"trained by stage {', '.join(trained)} and frozen by stage {', '.join(frozen)}: freeze it on all ranks")


def _gather(tie: Tie, own: torch.Tensor, number: int, groups: Groups) -> list[torch.Tensor]:
    """Each stage's value, in stage order."""
    me, world = groups.me, groups.world
    own_peers = groups.peers(me.stage)
    outgoing = own.contiguous()
    values = {stage: torch.empty_like(outgoing) for stage in tie.stages if stage != me.stage}
    moving: list[Pending] = []
    # Both ends send and receive: a library that runs postings one after the other needs a batch.
    with world.batch():
        for stage, buffer in values.items():
            other_peers = groups.peers(stage)
            moving += [world.send(outgoing, groups.rank(receiver), TIES[number])
                       for receiver, giver in tied_givers(own_peers, other_peers).items() if giver == me]
            giver = tied_givers(other_peers, own_peers)[me]
            moving.append(world.receive(buffer, groups.rank(giver), TIES[number]))
    wait_all(moving)
    return [values.get(stage, own) for stage in tie.stages]
