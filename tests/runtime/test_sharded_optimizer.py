"""A shard may be stepped parameter by parameter, in the model's own memory: Megatron's distributed one in fp32."""

from __future__ import annotations

import torch
from torch import nn

from megatron_recycle.runtime.compute.sharded_optimizer import MASTER, Piece, ShardedOptimizer, Slot


def test_what_a_script_writes_to_a_parameter_counts_and_twins_step_alike():
    """Each in its own copy of the model; a third worker adopts what one of them has."""
    def worker(own: tuple[int, ...]) -> tuple[nn.Parameter, ShardedOptimizer]:
        parameter = nn.Parameter(torch.arange(10.0))
        cut = [[Slot(0, 6, (Piece(parameter, 0, 6, 0),))], [Slot(0, 4, (Piece(parameter, 6, 10, 0),))]]
        return parameter, ShardedOptimizer(torch.optim.Adam([parameter], lr=0.1, foreach=False), cut, own,
                                           in_place=True)

    whole = nn.Parameter(torch.arange(10.0))
    optimizer = torch.optim.Adam([whole], lr=0.1, foreach=False)
    twins = [worker((0, 1)), worker((0, 1))]
    for step in range(3):
        whole.grad = torch.linspace(-1.0, 1.0, 10) * (step + 1)
        with torch.no_grad():
            for parameter in (whole, *(parameter for parameter, _ in twins)):
                parameter.clamp_(max=8.5)
        optimizer.step()
        for parameter, shards in twins:
            shards.load(list(whole.grad.split([6, 4])), 1.0)
            shards.step()
            assert torch.equal(parameter, whole)
            assert shards.masters(0)[0].data_ptr() == parameter.data_ptr()  # no second copy of it
    parameter, third = worker((0,))
    giver = twins[0][1]
    third.take(1, {name: tensor.clone() for name, tensor in giver.tensors(1).items()}, giver.numbers(1))
    assert torch.equal(parameter[6:], whole[6:]) and third.held == (0, 1)
    assert torch.equal(third.tensors(1)[f"{MASTER} 0"], giver.tensors(1)[f"{MASTER} 0"])
