"""Gradients of a backward in two parts are those of a backward in one, whatever the model does."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_recycle.runtime.compute import split
from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
from megatron_recycle.runtime.compute.apex_kernel import fused_kernel
from megatron_recycle.runtime.compute.split import Splitter, WeightQueue


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


def run(splitter: Splitter, model: nn.Module, tokens: torch.Tensor) -> WeightQueue:
    """F and B of one micro-batch; returns what is left for W."""
    loss = model(tokens)
    queue = WeightQueue()
    with splitter.into(queue, [loss]):
        loss.backward()
    return queue


def gradients(model: nn.Module, split: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(11, (2, 5))
    splitter = Splitter(model)
    queue = run(splitter, model, tokens) if split else WeightQueue()
    if not split:
        model(tokens).backward()
    later = queue.identities()
    queue.formed = [(p, p.grad) for p in model.parameters() if id(p) in later and p.grad is not None]
    for parameter, gradient in queue.contributions():
        parameter.grad = gradient
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def build(**options: object) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("autocast", [False, True])
def test_whole_backwards_are_autograds_own(checkpointing, autocast, monkeypatch):
    """Also of layers that B runs again; under autocast they are split layers that defer nothing."""
    def refuse(*_: object) -> None:
        raise AssertionError("a split layer")

    options = {"checkpointing": checkpointing, "autocast": autocast}
    expected, model = plain(build(**options)), build(**options)
    splitter = Splitter(model)
    if not autocast:
        monkeypatch.setattr(split._SplitLinear, "apply", refuse)
    torch.manual_seed(1)
    with splitter.whole():
        loss = model(torch.randint(11, (2, 5)))
    with splitter.whole():
        loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        if autocast and name.startswith("twice"):  # as above: summed in 16 bits by autograd
            torch.testing.assert_close(found[name], gradient, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(found[name], gradient), name


def test_b_computes_no_weight_gradient_of_a_linear_layer():
    model = build()
    queue = run(Splitter(model), model, torch.randint(11, (2, 5)))
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


class Shared(nn.Module):
    """One weight for the embedding and the output, one used by its layer and past it, and layers frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.out.weight = self.embedding.weight
        self.both = nn.Linear(8, 8)
        self.only_bias, self.only_weight = nn.Linear(8, 8), nn.Linear(8, 8)
        self.only_bias.weight.requires_grad_(False)
        self.only_weight.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.both(x) + functional.linear(x, self.both.weight)
        return self.out(self.only_weight(self.only_bias(x))).square().mean()


def shared() -> Shared:
    torch.manual_seed(0)
    return Shared()


def test_a_weight_that_b_and_w_both_add_to_has_autograds_bits():
    expected, found = plain(shared()), gradients(shared(), split=True)
    assert set(found) == set(expected) and "only_bias.weight" not in found and "only_weight.bias" not in found
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_what_cannot_be_split_runs_whole_and_is_named():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
            self.out = nn.Linear(8, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = functional.one_hot(tokens % 8, 8).float()
            return self.out(self.normed(self.attention(x, x, x, need_weights=False)[0])).square().mean()

    def built() -> nn.Module:
        torch.manual_seed(0)
        return Attention()

    model = built()
    text = Splitter(model).describe()
    assert text.startswith("weight gradients of 1 linear layers")
    for name in ("attention (MultiheadAttention", "attention.out_proj (NonDynamicallyQuantizableLinear", "normed"):
        assert name in text
    expected, found = plain(built()), gradients(built(), split=True)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


class Around(nn.Module):
    """Two linear layers, and between the embedding and the loss whatever ``between(first, second, x)`` does."""

    def __init__(self, between: Callable[..., torch.Tensor], trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8).requires_grad_(trained)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.between = between

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.between(self, self.embedding(tokens)).square().mean()


def written_to(model: Around, x: torch.Tensor) -> torch.Tensor:
    y = model.first(x)
    y.mul_(2)
    y[0].add_(1)
    z = functional.relu(model.first(y[:, :3]), inplace=True) + 1
    z = model.second(z)
    return functional.relu(z, inplace=True)


def detached(model: Around, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.second(x)
    return model.second(model.first(x)) - target


def checkpointed_without_linear(model: Around, x: torch.Tensor) -> torch.Tensor:
    return model.second(checkpoint(model.norm, model.first(x), use_reentrant=True))


def checkpointed_beside(model: Around, x: torch.Tensor) -> torch.Tensor:
    x = checkpoint(lambda y: model.first(model.norm(y)), model.first(x), use_reentrant=True)
    return model.second(checkpoint(model.second, x, use_reentrant=False))


def offloaded(model: Around, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        x = model.first(x)
    return model.second(x)


def looked_at(model: Around, x: torch.Tensor) -> torch.Tensor:
    y = model.first(x)
    with torch.enable_grad():
        inside = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    return model.second(y) + inside


def hooked(model: Around, x: torch.Tensor) -> torch.Tensor:
    y = model.first(x.view(-1, 8))
    y.register_hook(lambda gradient: 2 * gradient)
    return model.second(y)


def penalised(model: Around, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model.second(model.first(x)).square().sum(), x, create_graph=True)[0]


def balanced(model: Around, x: torch.Tensor) -> torch.Tensor:
    y = model.first(x)
    own, = torch.autograd.grad(y.sum(), model.first.weight, retain_graph=True)
    return model.second(y) * own.norm().detach()


BETWEEN = {
    "in a row": lambda model, x: model.second(model.first(x)),
    "columns": lambda model, x: model.second(model.first(x[0].t()).t()[:8].contiguous().t().t()),
    "transposed": lambda model, x: model.second(model.first(x.transpose(0, 1)).transpose(0, 1)[..., :8]),
    "vector": lambda model, x: model.second(model.first(x[0, 0])),
    "unused": lambda model, x: (model.second(x), model.first(x))[1],
    "hooked": hooked, "penalised": penalised, "balanced": balanced,
    "written to": written_to, "detached": detached, "looked at": looked_at, "offloaded": offloaded,
    "checkpointed without linear": checkpointed_without_linear, "checkpointed beside": checkpointed_beside,
}


@pytest.mark.parametrize("trained", [True, False], ids=["", "first has no gradient before it"])
@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_is_done_around_a_linear_layer_gradients_have_autograds_bits(between, trained):
    if not trained and between in ("looked at", "penalised", "checkpointed without linear", "checkpointed beside"):
        pytest.skip("needs a gradient")
    stock, model = Around(BETWEEN[between], trained), Around(BETWEEN[between], trained)
    splitter = Splitter(model)
    for number in range(3):
        tokens = torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(number))
        stock.zero_grad()
        stock(tokens).backward()
        model.zero_grad()
        queue = run(splitter, model, tokens)
        expected = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.grad is not None}
        later = queue.identities()
        queue.formed = [(p, p.grad) for p in model.parameters() if id(p) in later and p.grad is not None]
        whole = {id(p) for p, _ in queue.formed}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and id(p) not in whole}
        found |= {names[id(parameter)]: gradient for parameter, gradient in queue.contributions()}
        assert set(found) == set(expected) and later
        for name, gradient in expected.items():
            if between == "transposed":  # autograd sums a bias's gradient over both dimensions in their own order
                torch.testing.assert_close(found[name], gradient)
            else:
                assert torch.equal(found[name], gradient), (number, name)


def test_an_input_that_was_written_to_is_refused_as_autograd_refuses_it():
    def between(model: Around, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = model.first(x)
        x.mul_(2)
        return model.second(y)

    tokens = torch.randint(11, (4, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Around(between)(tokens).backward()
    model = Around(between)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(Splitter(model), model, tokens)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_hooks_on_a_linear_layers_parameters_run(checkpointing):
    def double(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(2)

    expected, found = build(checkpointing=checkpointing), build(checkpointing=checkpointing)
    for model in (expected, found):
        model.up.weight.register_hook(lambda gradient: 3 * gradient)
        model.twice.bias.register_post_accumulate_grad_hook(double)
    expected, found = plain(expected), gradients(found, split=True)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_hooks_on_what_was_accumulated_run():
    model, ran = Around(BETWEEN["in a row"]), []
    model.embedding.weight.register_post_accumulate_grad_hook(lambda parameter: ran.append(parameter.grad.clone()))
    queue = run(Splitter(model), model, torch.randint(11, (4, 4)))
    assert len(ran) == 1 and torch.equal(ran[0], model.embedding.weight.grad) and len(queue.deferred) == 2


def test_apexs_kernel_adds_up_what_it_can():
    """A stand-in kernel; the weight that is used twice is formed first, so that its uses are summed before."""
    calls = []

    def kernel(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        calls.append(tuple(total.shape))
        total.addmm_(gradient.t(), inputs)

    model = build()
    splitter = Splitter(model, kernel)
    assert "apex's kernel" in splitter.describe()
    layout = Layout([parameter for parameter in model.parameters() if parameter.requires_grad])
    sums = Accumulators(layout, lambda pipeline, microbatch: (WHOLE, 0))
    expected = build()
    for number in range(3):
        tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(number))
        queue = run(splitter, model, tokens)
        later = queue.identities()
        sums.add(0, number, [(p, p.grad) for p in layout.parameters if id(p) not in later])
        model.zero_grad()
        with torch.no_grad():
            sums.add(0, number, queue.contributions())
        expected(tokens).backward()
    assert calls == [(8, 8), (8, 16), (16, 8)] * 3, "conv, down, up"
    flat = sums.sum(WHOLE)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters()):
        if mine.requires_grad:
            torch.testing.assert_close(layout.view(flat, mine), theirs.grad, msg=name)


def test_apex_is_used_on_gpus_where_it_is_installed(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    name = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setitem(sys.modules, name, None)
    assert fused_kernel(torch.float32, gpu) is None
    stand_in = SimpleNamespace(wgrad_gemm_accum_fp32="into fp32", wgrad_gemm_accum_fp16="into 16 bits")
    monkeypatch.setitem(sys.modules, name, stand_in)
    assert fused_kernel(torch.float32, cpu) is None and fused_kernel(torch.float64, gpu) is None
    assert fused_kernel(torch.float32, gpu) == "into fp32"
    assert fused_kernel(torch.bfloat16, gpu) == fused_kernel(torch.float16, gpu) == "into 16 bits"


def test_a_copy_of_a_layer_and_one_from_a_file_compute_with_weights_of_their_own():
    """Averaged models are made so."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    Splitter(model)
    copied, file = copy.deepcopy(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        model[0].weight.zero_()
    for other in (copied, loaded):
        assert torch.equal(other(torch.eye(3)), other[0].weight.t())
        assert other[0].weight.abs().sum() > 0
