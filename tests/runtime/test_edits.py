"""What a script changes while a step may still be undone is made again on the step that counts."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.edits import Edits, merged, same
from megatron_recycle.runtime.compute.modes import Modes
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer, even


class OneWeight:
    """A stage of one parameter; a step adds 1 to it and halves the rate."""

    shards: ShardedOptimizer | None = None

    def __init__(self, may_guess_wrong: bool = False) -> None:
        self.module = nn.Module()
        self.module.weight = nn.Parameter(torch.zeros(2))
        self.rate, self.clipping, self.may_guess_wrong = 1.0, 0.0, may_guess_wrong

    def step(self) -> None:
        self.module.weight.data += 1
        self.rate /= 2

    def undo(self) -> None:
        self.module.weight.data -= 1
        self.rate *= 2

    def state(self) -> dict[str, torch.Tensor]:
        return {"parameter weight": self.module.weight.detach()}

    def counters(self) -> Any:
        return {"rate": self.rate}

    def set_counters(self, counters: Any) -> None:
        self.rate = counters["rate"]

    @property
    def references(self) -> dict[str, Any]:
        return {"clipping": self.clipping}

    def refer(self, references: dict[str, Any]) -> None:
        self.clipping = references["clipping"]


def test_what_is_set_by_hand_outlives_an_undone_step():
    stage = OneWeight()
    edits = Edits(stage)
    stage.step()
    edits.leave(open_=True)
    assert not edits.found()
    stage.rate, stage.clipping = 0.3, 2.0
    stage.module.weight.data.mul_(10)
    assert edits.found()

    def remake() -> None:
        stage.module.weight.data.fill_(1.0)

    with edits.apart(0, remake):
        assert (stage.rate, stage.clipping) == (0.5, 0.0)
        assert stage.module.weight.tolist() == [1, 1]
        stage.undo()
        stage.step()
    assert (stage.rate, stage.clipping) == (0.3, 2.0)
    assert stage.module.weight.tolist() == [10, 10]
    assert not edits.found()


def test_what_is_written_to_a_step_that_may_be_wrong_is_refused_with_both_remedies():
    stage = OneWeight(may_guess_wrong=True)
    edits = Edits(stage)
    edits.leave(open_=True)
    stage.module.weight.data[0] = 5.0
    with pytest.raises(UnsupportedError, match="weight after iteration 3") as refusal, edits.apart(3, stage.step):
        pass
    assert "engine.settle()" in str(refusal.value) and '"step": "barrier"' in str(refusal.value)


@pytest.mark.parametrize("write", [lambda shards: shards.masters(0)[0].mul_(2),
                                   lambda shards: shards.optimizer.state[shards.masters(0)[0]]["exp_avg"].zero_()])
def test_what_is_written_to_shards_of_a_step_that_may_be_undone_is_refused(write):
    """To undo it puts them back."""
    stage = OneWeight()
    weights = [stage.module.weight]
    stage.shards = ShardedOptimizer(torch.optim.Adam(weights), even([weights], 1), [0])
    stage.shards.load([torch.ones(2)], 1.0)
    stage.shards.step()
    edits = Edits(stage)
    for final in (False, True):
        edits.leave(open_=True)
        assert not edits.found(final)
        with torch.no_grad():
            write(stage.shards)
        assert edits.found(final)
        with pytest.raises(UnsupportedError, match="of shard 0 after iteration 3.*Call engine.settle"), \
                edits.apart(3, lambda: None):
            pass


def test_what_is_changed_on_a_final_step_simply_stands():
    stage = OneWeight(may_guess_wrong=True)
    edits = Edits(stage)
    edits.leave(open_=False)
    stage.module.weight.data[0], stage.rate = 5.0, 0.1
    assert not edits.found()


def test_what_is_changed_after_the_verdict_has_come_stands_but_is_refused_as_before_it():
    """What is refused does not depend on who is faster."""
    stage, wrong = OneWeight(), OneWeight(may_guess_wrong=True)
    edits, of_wrong = Edits(stage), Edits(wrong)
    edits.leave(open_=True)
    of_wrong.leave(open_=True)
    stage.rate = wrong.rate = 0.3
    stage.module.weight.data[0] = 5.0
    assert edits.found() and not edits.found(final=True) and not of_wrong.found(final=True)
    wrong.module.weight.data[0] = 5.0
    assert of_wrong.found(final=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("shape", "start"),
                         [((512, 512), 0), ((512, 512), 1), ((128, 128), 0), ((3, 5), 0), ((1,), 1)])
def test_what_is_written_by_way_of_data_is_found_in_every_type_and_shape(
        dtype: torch.dtype, shape: tuple[int, ...], start: int):
    stage = OneWeight()
    flat = torch.ones(math.prod(shape) + start, dtype=dtype)  # as in a flat buffer, not at its beginning
    stage.module.weight = nn.Parameter(flat[start:].view(shape))
    edits = Edits(stage)
    edits.leave(open_=True)
    assert not edits.found()
    stage.module.weight.data.mul_(2)  # whose sum may come round to where it was
    assert edits.found()
    edits.leave(open_=True)
    stage.module.weight.data.view(-1)[::2].mul_(2)
    assert edits.found()


def test_data_that_lies_another_way_in_the_same_memory_is_found():
    stage = OneWeight()
    stage.module.weight = nn.Parameter(torch.arange(4.0).view(2, 2))
    edits = Edits(stage)
    edits.leave(open_=True)
    stage.module.weight.data = stage.module.weight.data.t()
    assert edits.found()


def test_only_the_scripts_changes_are_merged():
    before = {"groups": [{"lr": 1.0, "decay": 0.1}], "steps": 4, "mean": torch.zeros(1)}
    edited, now = copy.deepcopy(before), copy.deepcopy(before)
    edited["groups"][0]["lr"] = 0.5
    edited["groups"].append({"lr": 7.0, "decay": 0.0})
    now["steps"], now["mean"] = 3, torch.ones(1)
    expected = {"groups": [{"lr": 0.5, "decay": 0.1}, {"lr": 7.0, "decay": 0.0}], "steps": 3, "mean": torch.ones(1)}
    assert same(merged(before, edited, now), expected)
    assert same(merged(before, before, now), now)


def test_an_iteration_that_is_run_again_trains_what_it_trained():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    modes = Modes(model)
    assert not modes.look()
    modes.remember()
    model[0].weight.requires_grad_(False)
    model.eval()
    with modes.of_training():
        assert model[0].weight.requires_grad and model[1].training
    assert not model[0].weight.requires_grad and not model[1].training
    assert modes.look()
    modes.remember()
    assert not modes.look()


def test_a_stage_without_parameters_has_nothing_to_look_at():
    stage = SimpleNamespace(state=dict, references={}, counters=dict, module=nn.Module(), shards=None)
    edits = Edits(stage)
    edits.leave(open_=True)
    assert not edits.found()
