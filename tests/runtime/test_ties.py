"""Stages that share several parameters with different other stages add each of them up with the right ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import FastReduction
from megatron_recycle.runtime.compute.accumulate import WHOLE, Layout
from megatron_recycle.runtime.stage import Tie
from tests.fakes.network import Fabric
from tests.runtime.comms import connected

WORDS, PLACES = (0, 1), (0, 2)  # the stages of two tied parameters


def gradient(me: Worker, groups: Groups) -> list[float]:
    tied = [(number, stages_of) for number, stages_of in enumerate((WORDS, PLACES)) if me.stage in stages_of]
    parameters = [nn.Parameter(torch.zeros(1)) for _ in tied]
    ties = [Tie(parameter, stages_of, first=True, number=number)
            for parameter, (number, stages_of) in zip(parameters, tied, strict=True)]
    layout = Layout(parameters)
    flat = torch.full((len(tied),), 10.0**me.pipeline * 100.0**me.stage)
    sums: Any = SimpleNamespace(layout=layout, sum=lambda piece: flat if piece is WHOLE else None)
    return FastReduction(1, 1).gradient(sums, groups, ties).tolist()


def reduced(live: list[Worker], ordered: bool) -> dict[Worker, list[float]]:
    """What each worker's parameters get, of gradients 1 (pipeline 0) and 10 (pipeline 1), times 1, 100, 10000 by
    stage: 0 has copies of both tied ones, 1 of the first, 2 of the second."""
    fabric = Fabric(ordered=ordered)
    groups = connected(fabric, Grid(3, (1, 1)), live)
    found = fabric.run(*[lambda me=me: gradient(me, groups[me]) for me in live])
    return dict(zip(live, found, strict=True))


WORKERS = [Worker(pipeline, stage) for pipeline in range(2) for stage in range(3)]


@pytest.mark.parametrize("ordered", [False, True], ids=["gloo's rules", "NCCL's rules"])
@pytest.mark.parametrize("lost", [None, Worker(1, 2)], ids=str)
def test_each_tie_is_added_up_over_its_own_stages(ordered, lost):
    """Also where these stages have lost workers of different pipelines."""
    words, places = 11.0 * 101, 11.0 * 10001 if lost is None else 11.0 + 10000
    expected = {0: [words, places], 1: [words], 2: [places]}
    workers = [worker for worker in WORKERS if worker != lost]
    assert reduced(workers, ordered) == {worker: expected[worker.stage] for worker in workers}
