"""A few numbers added up over many workers: in threads here, which meet as processes would."""

from __future__ import annotations

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.tags import COMMITS
from megatron_recycle.runtime.comm.tree_allreduce import add_up
from tests.fakes.network import Fabric


@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("seed", range(3))
def test_everybody_gets_the_sum_with_few_messages(size: int, seed: int):
    fabric = Fabric(seed)
    comms = fabric.comms(size)
    sent = [0] * size
    for comm in comms:
        def send(tensors, to, tag, send=comm.group.send, rank=comm.rank):
            sent[rank] += 1
            return send(tensors, to, tag)

        comm.group.send = send
    tensors = [torch.tensor([float(rank), 1.0]) for rank in range(size)]
    fabric.run(*[lambda comm=comm, tensor=tensor: add_up(tensor, comm, COMMITS[3])
                 for comm, tensor in zip(comms, tensors, strict=True)])
    assert all(tensor.tolist() == [size * (size - 1) / 2, size] for tensor in tensors)
    assert sum(sent) == 2 * (size - 1) and max(sent) <= 3


def test_a_closed_connection_ends_the_wait():
    fabric = Fabric()
    one, other = fabric.comms(2)
    fabric.die(other.group.process)
    (found,) = fabric.run(lambda: add_up(torch.zeros(1), one, COMMITS[3]))
    assert isinstance(found, GenerationOver)
    assert "an iteration's commit from rank 1 failed: connection closed" in str(found)
