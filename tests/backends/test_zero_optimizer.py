"""ZeRO-1's optimizer has what stock's engine, and scripts, ask of stock's."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import nn

from megatron_recycle.backends.deepspeed.recut import recut
from megatron_recycle.backends.deepspeed.zero import ZeroOptimizer


def _made(clipping: float) -> tuple[nn.Parameter, ZeroOptimizer]:
    weight = nn.Parameter(torch.ones(4))
    return weight, ZeroOptimizer(torch.optim.Adam([weight]), None, 0, 1, 1, {weight: "weight"}, clipping,
                                 torch.float32, LossScaler(scale=1.0), bf16=False)


def test_parameters_that_were_loaded_alone_are_what_the_next_step_begins_with():
    """`load_checkpoint(load_optimizer_states=False)`, or `load_module_only`."""
    weight, optimizer = _made(0.0)
    weight.data.fill_(3.0)
    optimizer._restore_from_bit16_weights()
    assert torch.equal(optimizer.shards.masters(0)[0].data, weight.data)


def test_the_limit_on_the_norm_is_the_optimizers_own_and_comes_with_checkpoints_and_peers():
    _, optimizer = _made(0.5)
    optimizer.clip_grad = 2.0
    (_, loaded), (_, joined) = _made(1.0), _made(1.0)
    loaded.load_state_dict([optimizer.state_dict()])
    joined.set_counters(optimizer.counters())
    assert loaded.clip_grad == joined.clip_grad == 2.0


def _of_two_groups(rank: int, size: int, bf16: bool) -> ZeroOptimizer:
    """Of 37 and 10 parameters, whose number tells them apart."""
    weights = [nn.Parameter(torch.arange(37.0).reshape(37)), nn.Parameter(torch.arange(100.0, 110.0))]
    optimizer = torch.optim.Adam([{"params": [weight]} for weight in weights])
    return ZeroOptimizer(optimizer, None, rank, size, 1, {weight: str(number) for number, weight in enumerate(weights)},
                         0.0, torch.float32, LossScaler(scale=1.0), bf16)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 1), (2, 5), (30, 2)])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_of_other_pipelines_is_cut_anew(before: int, after: int, bf16: bool):
    """Also where the last shards of a group are nothing but padding."""
    written = []
    for rank in range(before):
        one = _of_two_groups(rank, before, bf16)
        for master in one.shards.masters(rank):  # moments that tell numbers apart, too
            one.state[master] = {"step": torch.tensor(7.0), "exp_avg": 2 * master.detach(), "exp_avg_sq":
                                 3 * master.detach()}
        written.append(one.state_dict())
    for rank in range(after):
        one, expected = (_of_two_groups(rank, after, bf16) for _ in range(2))
        states = [recut(written.__getitem__, before, rank, after, one.numels) if number == rank else None
                  for number in range(after)]
        for master in one.shards.masters(rank):
            master.data.zero_()
        one.load_state_dict(states, load_from_fp32_weights=True)
        for master, other in zip(one.shards.masters(rank), expected.shards.masters(rank), strict=True):
            state = one.state[master]
            assert torch.equal(master, other) and state["step"] == 7
            assert torch.equal(state["exp_avg"], 2 * other) and torch.equal(state["exp_avg_sq"], 3 * other)
