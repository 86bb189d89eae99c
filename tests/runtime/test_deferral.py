"""Gradients that users take themselves inside what the runtime runs: they are there, and none is left out or twice.

Each case is a model beside plain autograd, bit for bit, over micro-batches whose B is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_recycle.runtime.compute.split import Splitter, WeightQueue

WIDTH = 8


def non_reentrant(function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, *inputs, use_reentrant=False)


def reentrant(function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, *inputs, use_reentrant=True)


class Model(nn.Module):
    """Layers, and whatever ``between(model, x)`` does with them."""

    def __init__(self, between: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.extra, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.between = between

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self, x)).square().mean()


class Recomputing(torch.autograd.Function):
    """A hand-written checkpoint, as of reversible layers; ``how`` it takes the gradients of its module's parameters."""

    @staticmethod
    def forward(ctx: Any, module: Callable, how: str, x: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.module, ctx.how, ctx.parameters = module, how, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        parameters = ctx.parameters
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.module(x)
            if ctx.how == "grad":
                return (None, None, *torch.autograd.grad(y, [x, *parameters], gradient))
        if ctx.how == "left":  # in .grad, as torch's own checkpoint does
            y.backward(gradient)
            return (None, None, x.grad, *[None] * len(parameters))
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        y.backward(gradient)
        own = [2 * parameter.grad for parameter in parameters]
        for parameter, before in zip(parameters, kept):
            parameter.grad = before
        return (None, None, x.grad, *own)


def recomputed(how: str, inner: Callable = lambda function, x: function(x)) -> Callable[..., torch.Tensor]:
    def between(model: Model, x: torch.Tensor) -> torch.Tensor:
        parameters = [*model.norm.parameters(), *model.first.parameters(), *model.second.parameters()]
        return Recomputing.apply(lambda y: inner(model.pair, y), how, x, *parameters)
    return between


def force(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The gradient of an energy, which is differentiated again."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(model.pair(x).square().sum(), x, create_graph=True)[0]


def penalty_of_a_layer_inside(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model.first(x)
    inside, = torch.autograd.grad(model.second(y).sum(), y, retain_graph=True, create_graph=True)
    return y + inside.square()


def own_weight(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model.first(x)
    own, = torch.autograd.grad(y.square().sum(), model.first.weight, create_graph=True)
    return model.second(y) * own.norm()


def backward_of_its_own(model: Model, x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        model.second(x.detach()).square().mean().backward()
    return model.pair(x)


def other_weights(model: Model, x: torch.Tensor) -> torch.Tensor:
    """A step of the first layer's own, as in meta learning."""
    own = dict(model.first.named_parameters())
    found = torch.autograd.grad(model.first(x).square().mean(), list(own.values()), create_graph=True)
    moved = {name: parameter - 0.1 * gradient for (name, parameter), gradient in zip(own.items(), found)}
    return model.second(torch.func.functional_call(model.first, moved, (x,)))


def by_functions(model: Model, x: torch.Tensor) -> torch.Tensor:
    forces = torch.func.grad(lambda y: model.pair(y).square().sum())(x)
    each = torch.func.vmap(model.first)(x)
    return forces + torch.func.jvp(model.second, (each,), (x,))[1]


def hooked_after(model: Model, x: torch.Tensor) -> torch.Tensor:
    """A hook that comes when the layer has run."""
    y = model.first(x)
    if not model.first.weight._backward_hooks:
        model.first.weight.register_hook(lambda gradient: 3 * gradient)
    return y


def twice_and_inside(model: Model, x: torch.Tensor) -> torch.Tensor:
    return recomputed("grad")(model, model.first(x))


def nested(outer: Callable, inner: Callable, core: Callable) -> Callable[..., torch.Tensor]:
    return lambda model, x: outer(lambda y: model.extra(inner(lambda z: core(model, z), y)), x)


def checkpointed(how: Callable, core: Callable) -> Callable[..., torch.Tensor]:
    return lambda model, x: how(lambda y: core(model, y), x)


HOW = {"non-reentrant": non_reentrant, "reentrant": reentrant, "DeepSpeed's": deepspeeds.checkpoint,
       "DeepSpeed's non-reentrant": deepspeeds.non_reentrant_checkpoint}
CORES = {"force": force, "penalty of a layer inside": penalty_of_a_layer_inside, "own weight": own_weight,
         "a backward of its own": backward_of_its_own, "other weights": other_weights, "torch.func": by_functions,
         "a function that takes gradients": recomputed("grad"), "a function that leaves them": recomputed("left"),
         "a function that looks at them": recomputed("taken"), "once more inside a function": twice_and_inside,
         "a hook that comes later": hooked_after,
         "a checkpoint in a function": recomputed("taken", reentrant),
         "a checkpoint in a function that takes them": recomputed("grad", non_reentrant)}
CASES = {**CORES, **{f"{name}, {kind}": checkpointed(how, core) for name, core in CORES.items()
                     for kind, how in HOW.items()},
         **{f"force, {one} in {other}": nested(HOW[other], HOW[one], force) for one in HOW for other in HOW
            if not (one == "DeepSpeed's non-reentrant" and other == "non-reentrant")}}


def inputs(number: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(number), requires_grad=True)


def both(between: Callable[..., torch.Tensor]) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Autograd's gradients and ours, of parameters and input, of three micro-batches."""
    stock, model = Model(between), Model(between)
    splitter = Splitter(model)
    for number in range(3):
        stock.zero_grad()
        model.zero_grad()
        x, y = inputs(number), inputs(number)
        stock(x).backward()
        loss, queue = model(y), WeightQueue()
        with splitter.into(queue, [loss]):
            loss.backward()
        later = queue.identities()
        assert {id(model.last.weight), id(model.last.bias)} <= later, "split where it can be"
        queue.formed = [(p, p.grad) for p in model.parameters() if id(p) in later and p.grad is not None]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and id(p) not in later}
        found |= {names[id(parameter)]: gradient for parameter, gradient in queue.contributions()}
        expected = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.grad is not None}
        yield {**expected, "input": x.grad}, {**found, "input": y.grad}


@pytest.mark.parametrize("case", CASES)
def test_gradients_that_users_take_inside_have_autograds_bits(case):
    try:
        pairs = list(both(CASES[case]))
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error)) as own:  # autograd or the checkpoint does not do this at all
            Model(CASES[case])(inputs(0)).backward()
        assert str(own.value) == str(error)
        pytest.skip(f"stock: {str(error)[:60]}")
    for expected, found in pairs:
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("how", HOW)
def test_checkpoints_of_frameworks_go_on_deferring(how):
    model = Model(nested(HOW[how], HOW[how], Model.pair))
    splitter, queue = Splitter(model), WeightQueue()
    loss = model(inputs(0))
    with splitter.into(queue, [loss]):
        loss.backward()
    assert len(queue.deferred) == 4 and model.first.weight.grad is None and model.norm.weight.grad is not None
