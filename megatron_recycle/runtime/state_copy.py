"""The copy of a stage's whole state, from its workers to a joiner."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_recycle.membership.inputs import Received
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.bundle import Head, Incoming, Lane, Outgoing, read
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import STATE
from megatron_recycle.runtime.stage import Stage


def give(groups: Groups, joined: Sequence[Worker], tensors: Mapping[str, torch.Tensor], facts: Any) -> None:
    """Send all ``tensors`` and ``facts`` (see `Head.of`) of this stage to its workers among ``joined``.

    Raises:
        GenerationOver: a newer generation begins.
    """
    peers = groups.peers(groups.me.stage)
    takers = [peers.index(worker) for worker in peers if worker in joined]
    givers = [worker for worker in peers if worker not in joined]
    if not takers or groups.me not in givers:
        return
    own = {**tensors}
    text, lane, number = Head.of(facts, own).text, _lane(groups), givers.index(groups.me)
    share = Outgoing(own, number, len(givers))
    moving = [pending for taker in takers
              for pending in ([] if number else lane.send_head(text, taker)) + share.send(lane, taker)]
    for pending in moving + share.send_sums(lane, *takers):
        pending.wait()


def take(groups: Groups, joined: Sequence[Worker],
         device: torch.device) -> tuple[dict[str, torch.Tensor], Any, Received]:
    """Receive the tensors and facts of `give`, into new buffers.

    Returns:
        tensors, facts, and the cost of the transfer.

    Raises:
        TransferError: the received data differ from the sent data.
        GenerationOver: a newer generation begins.
    """
    peers, lane = groups.peers(groups.me.stage), _lane(groups)
    givers = [peers.index(worker) for worker in peers if worker not in joined]
    head = Head.parse(lane.receive_head(givers[0]))
    began = time.monotonic()
    tensors = Incoming(lane, givers, head.tensors, device).finish(f"the state of stage {groups.me.stage}")
    received = Received(sum(tensor.nbytes for tensor in tensors.values()), 1000 * (time.monotonic() - began))
    return tensors, read(head.facts, tensors), received


def _lane(groups: Groups) -> Lane:
    return Lane(groups.stage_control, groups.stage, STATE)


def stage_tensors(stage: Stage) -> dict[str, torch.Tensor]:
    """All tensors that must be equal on the workers of this stage."""
    return {**stage.state(), **stage.fixed()}
