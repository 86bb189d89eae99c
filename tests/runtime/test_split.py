"""Gradients of a backward in two parts are those of a backward in one, whatever the model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_recycle.runtime.split import Splitter, WeightQueue


class Conv1D(nn.Module):
    """As GPT-2's in the transformers package: the weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


class Triple(torch.autograd.Function):
    """A user's own function with a parameter; it cannot be split."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return 3 * x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return 3 * gradient * scale, (3 * gradient * x).sum()


class Model(nn.Module):
    """Embedding, norms, linear layers with and without bias, one used twice, one frozen, one Conv1D."""

    def __init__(self, checkpointing: str = "none", autocast: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.twice = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.conv = Conv1D(8, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.checkpointing, self.autocast = checkpointing, autocast

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            if self.checkpointing == "none":
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.checkpointing == "reentrant")
            x = self.frozen(self.twice(functional.relu(self.twice(x))))
            x = self.conv(x.float() if self.autocast else x)
            return Triple.apply(x, self.scale).float().square().mean()


def gradients(model: Model, split: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(11, (2, 5))
    splitter = Splitter(model)
    queue = WeightQueue()
    loss = model(tokens)
    with splitter.into(queue if split else None):
        loss.backward()
    for parameter in queue.parameters():
        if parameter.grad is not None:
            queue.formed[parameter] = parameter.grad
    for parameter, gradient in queue.contributions():
        parameter.grad = gradient
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def build(**options: object) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def plain(model: Model) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randint(11, (2, 5))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("autocast", [False, True])
def test_split_gradients_have_autograds_bits(checkpointing, autocast):
    options = {"checkpointing": checkpointing, "autocast": autocast}
    expected = plain(build(**options))
    found = gradients(build(**options), split=True)
    assert set(found) == set(expected) and "frozen.weight" not in found
    for name, gradient in expected.items():
        if autocast and name.startswith("twice"):
            # autocast keeps one low-precision copy of a weight for both uses, and sums there
            torch.testing.assert_close(found[name], gradient, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(found[name], gradient), name


def test_without_a_queue_nothing_is_delayed():
    expected, found = plain(build()), gradients(build(), split=False)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_b_computes_no_weight_gradient_of_a_linear_layer():
    model = build()
    splitter, queue = Splitter(model), WeightQueue()
    loss = model(torch.randint(11, (2, 5)))
    with splitter.into(queue):
        loss.backward()
    assert model.up.weight.grad is None and model.conv.weight.grad is None
    assert model.embedding.weight.grad is not None and model.norm.weight.grad is not None
    assert len(queue.deferred) == 5, "up, down, twice two times, conv"


def test_what_runs_whole_is_named_with_its_share():
    text = Splitter(build()).describe()
    assert text.startswith("weight gradients of 5 linear layers")
    for name in ("embedding (Embedding", "norm (LayerNorm", "model (Model"):
        assert name in text
    assert "frozen" not in text


def test_a_subclass_of_linear_is_left_alone():
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    assert not Splitter(nn.Sequential(Odd(2, 2))).layers
