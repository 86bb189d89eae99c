"""What a script may set for its next iteration is found, undone for the one that is run again, and made again."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.variables import Variables

BETA = 1.0
UNUSED = 1.0
ARGUMENTS = Namespace(beta=1.0, iteration=0)


class Scaled(nn.Module):
    """Its forward depends on much."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.linear.weight.data.fill_(1.0)
        self.register_buffer("shift", torch.zeros(1))
        self.options = SimpleNamespace(scale=1.0)
        self.table = [1.0, {"scale": torch.ones(1)}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.options.scale * self.table[0] * self.table[1]["scale"] * self.factor * BETA * ARGUMENTS.beta
        return self.linear(x) * scale + self.shift


class Samples:
    def __init__(self) -> None:
        self.values = [1.0, 2.0]

    def __getitem__(self, index: int) -> float:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)


def set_global(model: Scaled, box: list[float], data: Subset) -> None:
    globals()["BETA"] *= 3.0


def hook(model: Scaled, box: list[float], data: Subset) -> None:
    model.linear.register_forward_hook(lambda module, inputs, output: output * 3.0)


CHANGES: dict[str, Callable[[Scaled, list[float], Subset], Any]] = {
    "a global": set_global,
    "a variable of a closure": lambda model, box, data: box.__setitem__(0, 3.0),
    "an option": lambda model, box, data: setattr(ARGUMENTS, "beta", 3.0 * ARGUMENTS.beta),
    "an attribute's attribute": lambda model, box, data: setattr(model.options, "scale", 3.0),
    "an attribute of a class": lambda model, box, data: setattr(Scaled, "factor", 3.0 * Scaled.factor),
    "an item": lambda model, box, data: model.table.__setitem__(0, 3.0),
    "a tensor": lambda model, box, data: model.table[1]["scale"].fill_(3.0),
    "a buffer": lambda model, box, data: model.shift.data.fill_(3.0),
    "another buffer": lambda model, box, data: setattr(model, "shift", torch.full((1,), 3.0)),
    "a hook": hook,
    "a hook on a gradient": lambda model, box, data: model.linear.weight.register_hook(lambda gradient: gradient * 3.0),
    "a forward": lambda model, box, data: setattr(model, "forward", lambda x: 3.0 * model.linear(x)),
    "a dataset's attribute": lambda model, box, data: setattr(data.dataset, "values", [3.0, 3.0]),
    "a subset's indices": lambda model, box, data: setattr(data, "indices", [1, 0]),
}


@pytest.fixture(autouse=True)
def globals_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests change them; whichever comes next in this process finds them as they are written here."""
    monkeypatch.setitem(globals(), "BETA", 1.0)
    monkeypatch.setattr(ARGUMENTS, "beta", 1.0)
    monkeypatch.setattr(Scaled, "factor", 1.0)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_results_depend_on_is_put_back_and_made_again(change):
    model, box, data = Scaled(), [1.0], Subset(Samples(), [0, 1])
    loss = functools.partial(lambda factor, output: output.sum() * box[0] * factor, 1.0)

    def result() -> tuple[float, float]:
        model.linear.weight.grad = None
        value = loss(model(torch.tensor([data[0]])))
        value.backward()
        return value.item(), model.linear.weight.grad.item()

    variables = Variables(model, [loss, data])
    before = result()
    assert not variables.changes()
    change(model, box, data)
    after = result()
    assert after != before
    changes = variables.changes()
    for each in changes:
        each.undo()
    assert result() == before
    for each in changes:
        each.redo()
    assert result() == after


class Engine(nn.Module):
    """As a backend's, which counts for itself."""

    def train_batch(self) -> None:
        self.seconds = self.__dict__.get("seconds", 0.0) + 1.5

    def describe(self, group: Any) -> Any:
        return group.weight  # an optimizer's, say: no name of what the engine changes


Engine.__module__ = "megatron_recycle.backends.deepspeed.engine"


def test_an_engine_that_the_loss_function_knows_has_variables_of_the_script_and_of_its_own():
    """Its own change with every iteration: were they the script's, each step would wait for the verdict on the last."""
    engine, model = Engine(), Scaled()
    engine.train_batch()
    variables = Variables(model, [lambda output: output.sum() * engine.weight * (engine.seconds > 0)])
    engine.train_batch()
    assert not variables.changes()
    engine.weight = 0.5
    assert [change.name for change in variables.changes()] == ["weight"]
    variables.keep()
    engine.weight = 0.7
    for change in variables.changes():
        change.undo()
    assert engine.weight == 0.5


def test_what_nothing_is_computed_with_is_not_watched():
    model = Scaled()
    variables = Variables(model, [])
    globals()["UNUSED"] += 1
    ARGUMENTS.iteration += 1
    assert not variables.changes()


def test_a_large_tensor_that_is_written_to_is_refused_with_the_remedies():
    model = Scaled()
    model.register_buffer("mask", torch.zeros(5000))
    variables = Variables(model, [])
    model.mask.fill_(1.0)
    (change,) = variables.changes()
    with pytest.raises(UnsupportedError, match=r"of shape \(5000,\).*engine.settle\(\)"):
        change.undo()


def test_a_tensor_that_nobody_has_any_more_is_no_change():
    """What a forward has left in a module, and others a while longer, goes when they let go of it."""
    model = Scaled()
    variables = Variables(model, [])
    model.given = held = torch.zeros(2)
    assert variables.changes()
    variables.keep()  # looks into it from here on
    model.given = torch.ones(2)
    variables.keep()
    del held
    assert variables.changes() == []
