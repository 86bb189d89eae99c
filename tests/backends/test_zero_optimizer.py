"""ZeRO-1's optimizer has what stock's engine, and scripts, ask of stock's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import nn

from megatron_recycle.backends.deepspeed.reshard import recut
from megatron_recycle.backends.deepspeed.zero import ZeroOptimizer
from megatron_recycle.errors import UnsupportedError


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


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 3), (2, 3), (4, 5)])
def test_shards_take_their_pieces_of_a_universal_checkpoint(rank: int, size: int, tmp_path: Path):
    """And the stage's parameters are all set, also those whose shards are elsewhere."""
    one, expected = (_of_two_groups(rank, size, bf16=False) for _ in range(2))
    groups = [{**group, "lr": 0.25, "params": []} for group in one.param_groups]
    (tmp_path / "zero").mkdir()
    torch.save({"param_groups": groups, "clip_grad": 2.0}, tmp_path / "zero" / "optimizer_state.pt")
    for parameter in one.shards.parameters:
        folder = tmp_path / "zero" / one._names[parameter]
        folder.mkdir()
        for key, factor in (("fp32", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
            torch.save({"param": factor * parameter.detach()}, folder / f"{key}.pt")
        torch.save(torch.tensor(7.0), folder / "step.pt")
        parameter.data.zero_()
    one.load_universal(str(tmp_path), 0, 1)
    assert one.clip_grad == 2.0 and {group["lr"] for group in one.param_groups} == {0.25}
    for parameter, other in zip(one.shards.parameters, expected.shards.parameters, strict=True):
        assert torch.equal(parameter, other)
    for master, other in zip(one.shards.masters(rank), expected.shards.masters(rank), strict=True):
        state = one.state[master]
        assert torch.equal(master, other)
        if other.abs().sum():  # not padding alone
            assert state["step"] == 7
            assert torch.equal(state["exp_avg"], 2 * other) and torch.equal(state["exp_avg_sq"], 3 * other)


def test_state_of_blocks_is_not_cut_anew():
    one = _of_two_groups(0, 1, bf16=False)
    written = one.state_dict()
    written["base_optimizer_state"]["state"] = {0: {"step": 3, "wrapped": {
        "state1": torch.zeros(38, dtype=torch.uint8), "absmax1": torch.zeros(1)}}}
    with pytest.raises(UnsupportedError, match=r"of blocks \(absmax1\).*go on with 1 pipelines"):
        recut([written].__getitem__, 1, 0, 2, one.numels)
