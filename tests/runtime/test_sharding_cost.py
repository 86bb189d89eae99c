"""What shards cost in memory, as it is said at the start; and what a reduction to their holders has under way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_recycle.runtime.comm.sharded_reduction import _parts
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer, even
from megatron_recycle.runtime.compute.sharding_cost import Bytes, described

BF16_ADAM = Bytes(parameter=2, gradient=4, state=12)


@pytest.mark.parametrize("shards", [2, 3, 8, 128])
def test_two_copies_cost_what_was_aimed_at(shards):
    assert BF16_ADAM.kept(2, shards, staggered=False) == pytest.approx(6 + 24 / shards)
    assert BF16_ADAM.kept(2, shards, staggered=True) == pytest.approx(6 + 56 / shards)
    assert BF16_ADAM.stock(shards) == pytest.approx(6 + 12 / shards)


def test_the_line_at_the_start_has_all_choices():
    line = described(BF16_ADAM, 3, 8, staggered=True)
    assert line.startswith("16.5 bytes per parameter of a worker, besides activations (state copies: 3, staggered)")
    assert "with 1, 2, 3, all copies 7.5, 9.0, 10.5, 18.0 with step barrier, and 9.5, 13.0, 16.5, 34.0" in line
    assert line.endswith("at least 7.5")
    assert "(state copies: all, barrier)" in described(BF16_ADAM, 2, 2, staggered=False)


@pytest.mark.parametrize(("kind", "settings", "expected"), [
    (torch.optim.Adam, {}, 12), (torch.optim.AdamW, {"amsgrad": True}, 16), (torch.optim.SGD, {}, 4),
    (torch.optim.SGD, {"momentum": 0.9}, 8), (torch.optim.RMSprop, {"centered": True}, 12),
    (torch.optim.Adagrad, {}, 8)])
def test_what_an_optimizer_keeps_is_what_it_has_after_a_step(kind, settings, expected):
    weight = nn.Parameter(torch.ones(64))
    shards = ShardedOptimizer(kind([weight], lr=0.1, **settings), even([[weight]], 1), [0])
    shards.load([torch.ones(64)], 0.5)
    shards.step()
    kept = sum(tensor.nbytes for tensor in shards.tensors(0).values() if tensor.dim())
    assert shards.state_bytes == expected == kept / 64


def test_gradients_of_shards_are_neither_copied_nor_changed():
    weights = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))]
    shards = ShardedOptimizer(torch.optim.SGD(weights, lr=1.0), even([weights], 3), [0, 2])  # 4, 4 and 2 with padding
    first, last = torch.arange(4.0), torch.arange(2.0)
    shards.load([first, last], 1.0)
    (one,), (other,) = shards.masters(0), shards.masters(2)
    assert one.grad.data_ptr() == first.data_ptr() and other.grad.tolist() == [0.0, 1.0, 0.0, 0.0]
    shards.load([first, last], 0.5)
    assert one.grad.tolist() == [0.0, 0.5, 1.0, 1.5] and first.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_shard_is_reduced_in_parts_that_are_the_whole():
    spans = [(0, 5), (10, 11), (20, 27)]
    assert _parts(spans, 4) == [[(0, 4)], [(4, 5), (10, 11), (20, 22)], [(22, 26)], [(26, 27)]]
    assert _parts(spans, 100) == [spans] and _parts([], 4) == []
