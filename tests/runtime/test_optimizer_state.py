"""What a torch optimizer keeps is given, taken and put back by name, whichever framework has built it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.errors import TransferError
from megatron_recycle.runtime.compute.edits import same
from megatron_recycle.runtime.compute.optimizer_state import OptimizerState


class Stage:
    """Two linear layers, the first of them frozen if wanted; in 16 bits with fp32 copies."""

    def __init__(self, seed: int = 0, kind: Any = torch.optim.Adam, frozen: bool = False, half: bool = False,
                 layers: int = 2, groups: int = 1) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
        self.module.register_buffer("mean", torch.randn(3))
        if half:
            self.module.bfloat16()
        parameters = list(self.module.parameters())
        self.masters = {one: nn.Parameter(one.detach().float()) for one in parameters} if half else {}
        stepped = [self.masters.get(one, one) for one in parameters]
        self.optimizer = kind([{"params": stepped[number::groups], "lr": 0.1} for number in range(groups)])
        self.state = OptimizerState(self.module, self.optimizer, self.masters, own=("weight_decay",))
        self.train(range(2 * frozen, len(parameters)))

    def train(self, which: Any) -> None:
        parameters = list(self.module.parameters())
        self.state.train(parameters[number] for number in which)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for parameter in self.state.trained.values():
                stepped = self.masters.get(parameter, parameter)
                stepped.grad = torch.randn(stepped.shape)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for parameter, master in self.masters.items():
                parameter.data.copy_(master.data)

    def all(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in {**self.state.tensors(), **self.state.fixed()}.items()}


KINDS = [torch.optim.Adam, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), torch.optim.Rprop]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 2], ids=["before its first step", "after others"])
def test_a_peer_becomes_a_copy_and_steps_as_the_giver_does(kind, half, before):
    giver, taker = Stage(0, kind, half=half), Stage(1, kind, half=half)
    giver.step(3)
    taker.step(before)
    tensors, counters = giver.all(), giver.state.counters()
    taker.state.load(tensors, counters)
    assert same(taker.all(), tensors) and same(taker.state.counters(), counters)
    torch.manual_seed(5)
    giver.step()
    torch.manual_seed(5)
    taker.step()
    assert same(taker.all(), giver.all())
    assert not any(own is sent for sent in tensors.values() for own in taker.state.tensors().values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_is_undone_exactly_also_the_first(kind, steps):
    stage = Stage(0, kind)
    stage.step(steps)
    before, counters = stage.all(), stage.state.counters()
    stage.optimizer.param_groups[0]["lr"] = 0.5
    stage.step()
    stage.state.reset(before.keys())
    with torch.no_grad():
        for name, tensor in stage.state.tensors().items():
            tensor.copy_(before[name])
    stage.state.set_counters(counters)
    assert same(stage.all(), before) and same(stage.state.counters(), counters)
    assert bool(stage.optimizer.state) == bool(steps), "an optimizer makes its state where there is none at all"


def test_names_tell_parameters_copies_and_the_optimizers_own():
    stage = Stage(half=True, frozen=True)
    stage.step()
    assert set(stage.state.tensors()) == {f"{key} 1.{name}" for name in ("weight", "bias")
                                          for key in ("parameter", "master", "step", "exp_avg", "exp_avg_sq")}
    assert set(stage.state.fixed()) == {"parameter 0.weight", "parameter 0.bias", "master 0.weight", "master 0.bias",
                                        "buffer mean"}
    assert stage.state.tensors()["parameter 1.bias"].data_ptr() == stage.module[1].bias.data_ptr()


def test_what_was_trained_and_is_frozen_now_goes_with_the_rest():
    giver, taker = Stage(), Stage(1)
    giver.step()
    giver.train([2, 3])
    giver.step()
    assert "exp_avg 0.weight" in giver.state.fixed() and "exp_avg 0.weight" not in giver.state.tensors()
    taker.state.load(giver.all(), giver.state.counters())
    assert list(taker.state.trained) == ["1.weight", "1.bias"] and same(taker.all(), giver.all())


def test_the_scripts_own_settings_stay_where_they_are():
    """What a schedule has set goes to one that comes in. A step that is undone leaves it, if the framework notes it."""
    giver, taker = Stage(), Stage(1)
    giver.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.3)
    counters = giver.state.counters()
    taker.state.set_counters(counters, only=("step",))
    assert taker.optimizer.param_groups[0]["lr"] == 0.1
    taker.state.set_counters(counters)
    assert taker.optimizer.param_groups[0]["lr"] == 0.5 and taker.optimizer.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize(("giver", "taker", "words"), [
    (Stage(layers=3), Stage(), "trains parameters by now"),
    (Stage(layers=3, half=True), Stage(half=True), "trains parameters by now"),
    (Stage(half=True), Stage(), "master 0.weight by now"),
    (Stage(groups=2), Stage(), "2 parameter groups by now, the one that this worker has built 1")])
def test_another_model_or_optimizer_is_refused_by_name(giver, taker, words):
    with pytest.raises(TransferError, match=words):
        taker.state.load(giver.all(), giver.state.counters())
