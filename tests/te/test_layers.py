"""Transformer Engine's layers on the stand-in compute what torch's own functions compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.te.job import TEJob
from tests.te.versions import engines

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes


def compare(observer_of: Callable[[str], Any], rank: int) -> dict[str, float]:
    """The largest difference of outputs and gradients, by layer."""
    import sys

    import torch
    from torch import nn
    from torch.nn import functional

    from tests.backends.megatron_job import SCRIPTS

    sys.path.insert(0, SCRIPTS)
    import megatron_cpu

    megatron_cpu.install(pretend=True)
    te: Any = sys.modules["transformer_engine.pytorch"]
    from transformer_engine.pytorch.attention import rope
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(0)
    found: dict[str, float] = {}
    options: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float32}

    def norm(x: Any, layer: Any, root: bool = False) -> Any:
        if root:
            return functional.rms_norm(x, x.shape[-1:], layer.layer_norm_weight, layer.eps)
        return functional.layer_norm(x, x.shape[-1:], layer.layer_norm_weight, layer.layer_norm_bias, layer.eps)

    def one(name: str, layer: Any, plain: Callable[[Any], Any], *more: Any) -> None:
        x = torch.randn(6, 16)
        results = []
        for run in (lambda x: layer(x, *more), plain):
            given = x.clone().requires_grad_()
            layer.zero_grad()
            y = run(given)
            (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
            results.append([y.detach(), given.grad, *[p.grad.clone() for p in layer.parameters()]])
        found[name] = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))

    linear = te.Linear(16, 8, **options)
    one("Linear", linear, lambda x: functional.linear(x, linear.weight, linear.bias))
    normed = te.LayerNormLinear(16, 8, **options)
    one("LayerNormLinear", normed, lambda x: functional.linear(norm(x, normed), normed.weight, normed.bias))
    rooted = te.LayerNormLinear(16, 8, normalization="RMSNorm", **options)
    one("LayerNormLinear rms", rooted, lambda x: functional.linear(norm(x, rooted, True), rooted.weight, rooted.bias))
    layer_norm, rms = te.LayerNorm(16, device="cpu"), te.RMSNorm(16, device="cpu")
    one("LayerNorm", layer_norm, lambda x: functional.layer_norm(x, (16,), layer_norm.weight, layer_norm.bias, 1e-5))
    one("RMSNorm", rms, lambda x: functional.rms_norm(x, (16,), rms.weight, 1e-5))
    for name, halves in (("gelu", 1), ("swiglu", 2)):
        mlp = te.LayerNormMLP(16, 32, activation=name, **options)

        def plain(x: Any, mlp: Any = mlp, halves: int = halves) -> Any:
            y = functional.linear(norm(x, mlp), mlp.fc1_weight, mlp.fc1_bias)
            if halves == 1:
                y = functional.gelu(y, approximate="tanh")
            else:
                gate, value = y.chunk(2, -1)
                y = functional.silu(gate) * value
            return functional.linear(y, mlp.fc2_weight, mlp.fc2_bias)

        one(f"LayerNormMLP {name}", mlp, plain)
    grouped = te.GroupedLinear(2, 16, 8, **options)
    one("GroupedLinear", grouped, lambda x: torch.cat([
        functional.linear(x[:2], grouped.weight0, grouped.bias0),
        functional.linear(x[2:], grouped.weight1, grouped.bias1)]), [2, 4])
    angles, heads = rope.RotaryPositionEmbedding(4)(6), []
    for fused in (True, False):
        x = torch.linspace(-1, 1, 96).view(6, 2, 2, 4).requires_grad_()
        y = rope.apply_rotary_pos_emb(x, angles, tensor_format="sbhd", fused=fused)
        (y * y.detach().cos()).sum().backward()
        heads.append((y.detach(), x.grad))
    found["rotary embedding"] = max(float((a - b).abs().max()) for a, b in zip(*heads))
    weights = [nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2)]
    makes: list[Any] = [FusedAdam, torch.optim.AdamW]
    for weight, optimizer in zip(weights, [make([weight], lr=0.1, weight_decay=0.1)
                                           for make, weight in zip(makes, weights)]):
        for step in range(3):
            weight.grad = torch.linspace(-2, 1, 8) * (step + 1)
            optimizer.step()
    found["FusedAdam"] = float((weights[0] - weights[1]).abs().max())
    return found


@engines
def test_outputs_and_gradients_are_torch_s(engine: Path):
    with TEJob(engine, 1, {}, body=compare, coordinated=False) as job:
        result = job.wait()[0]
        assert result.status == 0, job.where()
    assert len(result.value) == 10
    assert not {name: far for name, far in result.value.items() if far > 2e-6}
