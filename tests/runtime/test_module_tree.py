"""Whatever is changed in a model, its parts are those that torch finds in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from megatron_recycle.runtime.compute.module_tree import ModuleTree


def tie(model: nn.Sequential) -> None:
    model[1][0].weight = model[0].weight


def rename(model: nn.Sequential) -> None:
    model[0].register_parameter("shift", model[0]._parameters.pop("bias"))


def take_over_from_another(model: nn.Sequential) -> None:
    model[0].__dict__.update(nn.Linear(2, 2).__dict__)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(2, 2))),
    "no parameter": lambda model: setattr(model[0], "bias", None),
    "a tie": tie,
    "another name": rename,
    "one more layer": lambda model: model[1].append(nn.Linear(2, 2)),
    "one layer less": lambda model: model[1].pop(0),
    "a layer that is another": lambda model: setattr(model[1], "0", nn.Linear(2, 2)),
    "no layer": lambda model: setattr(model[1], "0", None),
    "weights of a norm": lambda model: weight_norm(model[0]),
    "all of another layer": take_over_from_another,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_in_a_model_is_seen_and_the_same_parts_are_given_until_then(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    tree = ModuleTree(model)
    before = tree.parts
    assert tree.parts is before
    change(model)
    now = tree.parts
    assert now is not before and now is tree.parts
    assert list(map(id, now.modules)) == list(map(id, model.modules()))
    assert [(name, id(parameter)) for name, parameter in now.parameters.items()] == [
        (name, id(parameter)) for name, parameter in model.named_parameters()]
