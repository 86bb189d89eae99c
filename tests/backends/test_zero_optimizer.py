"""ZeRO-1's optimizer has what stock's engine, and scripts, ask of stock's."""

from __future__ import annotations

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import nn

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
