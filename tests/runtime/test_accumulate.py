"""The order of sums is the logical one, whoever computes what."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.reduction import ExactReduction, fold
from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout


def contribution(pipeline: int, microbatch: int) -> torch.Tensor:
    """A gradient whose sums depend on their order."""
    generator = torch.Generator().manual_seed(100 * pipeline + microbatch)
    return torch.randn(7, generator=generator) * 10.0 ** torch.randint(-3, 4, (7,), generator=generator)


def logical(counts: list[int], block: int) -> torch.Tensor:
    """The reference, written down as the promise says it."""
    pipelines = []
    for pipeline, count in enumerate(counts):
        blocks = []
        for start in range(0, count, block):
            total = contribution(pipeline, start)
            for microbatch in range(start + 1, min(start + block, count)):
                total = total + contribution(pipeline, microbatch)
            blocks.append(total)
        value = blocks[0]
        for other in blocks[1:]:
            value = value + other
        pipelines.append(value)
    result = pipelines[0]
    for other in pipelines[1:]:
        result = result + other
    return result


@given(st.data())
def test_any_spread_of_blocks_over_workers_gives_the_same_bits(data):
    pipelines = data.draw(st.integers(1, 4))
    count, block = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    blocks = -(-count // block)
    workers = [Worker(number, 0) for number in range(3)]
    owner = {(pipeline, index): data.draw(st.sampled_from(workers))
             for pipeline in range(pipelines) for index in range(blocks)}
    pieces: dict[Worker, list[tuple[int, int, int]]] = {worker: [] for worker in workers}
    for (pipeline, index), worker in sorted(owner.items()):
        mine = pieces[worker]
        if mine and mine[-1][0] == pipeline and mine[-1][1] == 0 and mine[-1][2] == index - 1:
            mine[-1] = (pipeline, 0, index)
        else:
            mine.append((pipeline, index, index))
    parameter = nn.Parameter(torch.zeros(7))
    layout = Layout([parameter])
    found = []
    for worker in workers:
        reduction = ExactReduction(pipelines, [count] * pipelines, block, pieces, worker)
        sums = Accumulators(layout, reduction.place)
        for pipeline in range(pipelines):
            for microbatch in range(count):
                if owner[pipeline, microbatch // block] == worker:
                    sums.add(pipeline, microbatch, [(parameter, contribution(pipeline, microbatch))])
        found += [(piece, sums.sum(piece)) for piece in pieces[worker]]
    assert torch.equal(fold(sorted(found, key=lambda item: item[0])), logical([count] * pipelines, block))


def test_a_first_contribution_is_copied_so_that_minus_zero_stays():
    parameter = nn.Parameter(torch.zeros(2))
    sums = Accumulators(Layout([parameter]), lambda pipeline, microbatch: (WHOLE, 0))
    sums.add(0, 0, [(parameter, torch.tensor([-0.0, 1.0]))])
    assert torch.signbit(sums.sum(WHOLE))[0]


def test_a_parameter_without_gradient_counts_as_zero():
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    sums = Accumulators(Layout([used, unused]), lambda pipeline, microbatch: (WHOLE, 0))
    sums.add(0, 0, [(used, torch.ones(2))])
    assert sums.sum(WHOLE).tolist() == [1, 1, 0, 0, 0]
