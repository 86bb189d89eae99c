"""Weight gradients of Megatron's linear layers, deferred and added up by apex's kernel where that is there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("megatron.core")

MICROBATCHES = [torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Megatron's function with the plugin's in its place, and a stand-in for apex's kernels."""
    from megatron.core.tensor_parallel import layers

    def kernel(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        assert inputs.dim() == gradient.dim() == 2
        calls.append(total.dtype)
        total.addmm_(gradient.t().to(total.dtype), inputs.to(total.dtype))

    calls: list[torch.dtype] = []
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=kernel, wgrad_gemm_accum_fp16=kernel)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    name = "LinearWithGradAccumulationAndAsyncCommunication"
    later = len(inspect.signature(getattr(layers, name).forward).parameters) - 10  # gtp_remat_size, since core 0.19
    monkeypatch.setattr(layers, name, getattr(layers, name))  # puts stock's back afterwards

    def apply(inputs: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter, fusion: bool) -> torch.Tensor:
        function: Any = getattr(layers, name)
        return function.apply(inputs, weight, bias, fusion, False, False, None, 0, None, *[1] * later)

    apply.calls = calls  # type: ignore[attr-defined]
    return apply


def gradients(linear: Any, *, fusion: bool, uses: int = 1) -> dict[str, torch.Tensor]:
    """Sums over the micro-batches of what B leaves and W adds."""
    from megatron_recycle.backends.megatron.split import MegatronSplitter
    from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
    from megatron_recycle.runtime.compute.split import WeightQueue

    splitter = MegatronSplitter()
    weight = nn.Parameter(torch.linspace(-1, 1, 20).view(5, 4) if uses == 1 else torch.linspace(-1, 1, 16).view(4, 4))
    bias = nn.Parameter(torch.zeros(weight.shape[0]))
    weight.main_grad = torch.full_like(weight, 7.0)  # not where the runtime adds gradients up
    bias.main_grad = torch.zeros_like(bias)
    layout = Layout([weight, bias])
    sums = Accumulators(layout, lambda pipeline, microbatch: (WHOLE, 0))
    for number, inputs in enumerate(MICROBATCHES):
        queue, outputs = WeightQueue(), inputs.clone().requires_grad_()
        for _ in range(uses):
            outputs = linear(outputs, weight, bias, fusion)
        loss = outputs.square().sum()
        with splitter.into(queue, [loss]):
            loss.backward()
        assert weight.grad is None and len(queue.deferred) == uses
        with torch.no_grad():
            sums.add(0, number, queue.contributions())
    assert bool((weight.main_grad == 7.0).all())
    flat = sums.sum(WHOLE)
    return {"weight": layout.view(flat, weight), "bias": layout.view(flat, bias)}


@pytest.mark.parametrize("fusion", [False, True])
def test_the_sums_are_those_of_a_plain_layer(fusion, linear):
    found = gradients(linear, fusion=fusion)
    plain = nn.Linear(4, 5)
    with torch.no_grad():
        plain.weight.copy_(torch.linspace(-1, 1, 20).view(5, 4))
        plain.bias.zero_()
    for inputs in MICROBATCHES:
        plain(inputs).square().sum().backward()
    assert torch.allclose(found["weight"], plain.weight.grad) and torch.allclose(found["bias"], plain.bias.grad)
    assert linear.calls == [torch.float32] * (len(MICROBATCHES) if fusion else 0)


def test_a_weight_used_twice_is_summed_before_it_is_added(linear):
    """As everywhere: all of a micro-batch's uses of a parameter come first, so that bits do not depend on who adds."""
    fused, formed = gradients(linear, fusion=True, uses=2), gradients(linear, fusion=False, uses=2)
    assert linear.calls == [] and torch.equal(fused["weight"], formed["weight"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_that_a_forward_takes_itself_are_not_delayed(linear, reentrant):
    """Though a checkpoint runs that forward again in B; the checkpoint's own backward goes on deferring."""
    from megatron_recycle.backends.megatron.split import MegatronSplitter
    from megatron_recycle.runtime.compute.split import WeightQueue

    def force(layer: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]

    def run(layer: Any, x: torch.Tensor) -> torch.Tensor:
        inside = checkpoint(lambda y: layer(y) + force(layer, y), x, use_reentrant=reentrant)
        return layer(inside).square().sum()

    weight, bias = nn.Parameter(torch.eye(4) + 0.1), nn.Parameter(torch.zeros(4))
    weight.main_grad, bias.main_grad = torch.zeros(4, 4), torch.zeros(4)
    x, y = (MICROBATCHES[0].clone().requires_grad_() for _ in range(2))
    run(lambda x: nn.functional.linear(x, weight, bias), x).backward()
    expected, weight.grad, bias.grad = (weight.grad, bias.grad), None, None
    splitter, queue = MegatronSplitter(), WeightQueue()
    loss = run(lambda x: linear(x, weight, bias, False), y)
    with splitter.into(queue, [loss]):
        loss.backward()
    later = {id(parameter): gradient for parameter, gradient in queue.contributions()}
    assert len(queue.deferred) == 3, "the last layer, the one beside the force, and the one that the force goes through"
    torch.testing.assert_close(weight.grad + later[id(weight)], expected[0])
    torch.testing.assert_close(later[id(bias)], expected[1])
    assert bias.grad is None
    torch.testing.assert_close(y.grad, x.grad)
