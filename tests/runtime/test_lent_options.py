"""What a script sets in a lent layer its copies get too; what they cannot be told keeps it from being lent."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.lent.layers import Neighbours
from megatron_recycle.runtime.lent.options import Options, put
from megatron_recycle.runtime.lent.terms import HOME


class Layer(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.p, self.window, self.sizes = p, (1, 2), [1, {"a": math.nan}]
        self.act, self.table = torch.relu, torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


def told(options: Options) -> bytes:
    options.begin()
    return options.told(3, 4)


def test_a_copy_that_is_built_later_is_what_the_layer_was_when_the_job_began():
    layer, made = Layer(), Layer(p=0.9)  # the script's variables are others by then
    put(told(Options(lambda: {3: layer})), {3: made})
    assert made.p == 0.5


def test_numbers_and_what_contains_them_are_told_when_the_script_sets_them():
    layer, made = Layer(), Layer()
    options = Options(lambda: {3: layer})
    before = told(options)
    put(before, {3: made})
    made.p = 0.7  # by its own forward
    layer.window, layer.linear._scale = (5, (6,)), 2.0
    layer.sizes[1]["a"] = 3
    now = told(options)
    put(now, {3: made}, before)
    assert (made.window, made.sizes, made.linear._scale, made.p) == ((5, (6,)), [1, {"a": 3}], 2.0, 0.7)


def test_what_an_evaluation_sets_is_set_back():
    layer, made = Layer(), Layer()
    options = Options(lambda: {3: layer})
    with options.running():
        pass
    layer.eval()
    with options.running():
        layer.table = torch.zeros(2)  # its forward computes it
    layer.train()
    put(told(options), {3: made})
    assert made.training


CHANGES: dict[str, Callable[[Layer], object]] = {
    "writes to a tensor": lambda layer: layer.table.mul_(2),
    "puts another in its place": lambda layer: setattr(layer, "table", torch.ones(2)),
    "sets a function": lambda layer: setattr(layer, "act", torch.tanh),
    "puts another forward in place": lambda layer: setattr(layer, "forward", torch.tanh),
    "adds it to a list": lambda layer: layer.sizes.append(torch.ones(2)),
    "takes an attribute away": lambda layer: delattr(layer, "p"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_cannot_be_told_is_not_lent_otherwise_than_it_is(change: Callable[[Layer], object]):
    layer = Layer()
    options = Options(lambda: {3: layer})
    told(options)
    change(layer)
    with pytest.raises(UnsupportedError, match="of layer 3.*set lend to off"):
        told(options)


def test_a_copy_that_the_script_makes_of_a_layer_draws_what_the_script_wants():
    """It does not copy the worker with it, and does not draw for the layer."""
    class Lending:
        first, layers, lendable, refused, build = 0, [Layer(), Layer()], (0, 1), "", None

        def running(self, layers):
            return torch.no_grad()

    seeds: list[int] = []
    neighbours = Neighbours(Lending(), lambda module: None, True)
    with neighbours.running(HOME, seeds.append):
        made = copy.deepcopy(Lending.layers[1])
        made(torch.ones(2))
        assert not seeds
        Lending.layers[1](torch.ones(2))
    assert seeds == [1] and next(iter(made._forward_pre_hooks.values())).neighbours is None


def test_a_layer_that_became_another_is_refused_where_it_is_at_home():
    """A neighbour's room for a copy is of the layer as it began: gloo ends a process whose room is too small."""
    class Lending:
        first, layers, lendable, refused, build = 0, [Layer(), Layer()], (0, 1), "", None

    neighbours = Neighbours(Lending(), lambda module: None, True)
    neighbours.give(False, 1)
    neighbours.check((0, 1))
    Lending.layers[1].extra = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="other modules and parameters or buffers"):
        neighbours.give(False, 1)
    with pytest.raises(UnsupportedError, match="other modules and parameters or buffers"):
        neighbours.check((0, 1))


def test_a_layer_that_is_tied_to_another_later_is_not_lent():
    """Sums that a helper brings would be added in another order than at home."""
    class Lending:
        first, layers, lendable, refused, build = 0, [Layer(), Layer()], (0, 1), "", None

    neighbours = Neighbours(Lending(), lambda module: None, True)
    Lending.layers[0].linear.weight = Lending.layers[1].linear.weight
    with pytest.raises(UnsupportedError, match=r"shares linear.weight with another layer"):
        neighbours.give(False, 1)
