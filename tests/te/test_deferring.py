"""Weight gradients of Transformer Engine's linear layers, left for W: in any order, each into its micro-batch's sum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.te.job import TEJob
from tests.te.versions import engines

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes


def deferred(observer_of: Callable[[str], Any], rank: int, fused: bool, uses: int) -> dict[str, Any]:
    """Three micro-batches through two layers, ``uses`` times each; their Ws run the other way round."""
    import sys

    import torch
    from torch import nn

    from tests.backends.megatron_job import SCRIPTS

    sys.path.insert(0, SCRIPTS)
    import megatron_cpu

    megatron_cpu.install(pretend=True)
    from megatron_recycle.backends.megatron import te
    from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
    from megatron_recycle.runtime.compute.split import WeightQueue

    pytorch: Any = sys.modules["transformer_engine.pytorch"]
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float32}

    def made(fuses: bool) -> Any:
        model = nn.Sequential(pytorch.LayerNormLinear(8, 8, fuse_wgrad_accumulation=fuses, **options),
                              pytorch.Linear(8, 8, fuse_wgrad_accumulation=fuses, **options))
        for parameter in model.parameters():
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.full_like(parameter, 7.0), False
        return model

    def loss_of(model: Any, seed: int) -> Any:
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))
        for _ in range(uses):
            x = model(x)
        return x.square().sum()

    plain, model = made(False), made(fused)
    model.load_state_dict(plain.state_dict(), strict=False)
    for seed in range(3):
        loss_of(plain, seed).backward()
    splitter = te.splitter_for([model], split_backward=True)
    layout = Layout(list(model.parameters()))
    sums = Accumulators(layout, lambda pipeline, microbatch: (WHOLE, 0))
    queues, left = [WeightQueue() for _ in range(3)], 0
    for seed, queue in enumerate(queues):
        loss = loss_of(model, seed)
        with splitter.into(queue, [loss]):
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                sums.add(0, seed, [(parameter, parameter.grad)])
                parameter.grad, left = None, left + 1
    items = [len(queue.deferred) for queue in queues]
    for seed, queue in reversed(list(enumerate(queues))):
        with torch.no_grad():
            sums.add(0, seed, queue.contributions())
    flat = sums.sum(WHOLE)
    whole = loss_of(model, 5)
    if not fused:
        whole.backward()  # of the script's own: nothing is left for later
    return {"items": items, "formed in B": left,
            "far": max(float((layout.view(flat, mine) - theirs.grad).abs().max())
                       for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)),
            "untouched": all(bool((parameter.main_grad == 7.0).all()) for parameter in model.parameters()),
            "own": all(parameter.grad is not None for parameter in model.parameters())}


@engines
@pytest.mark.parametrize(("fused", "uses"), [(False, 1), (True, 1), (True, 2)])
def test_sums_are_those_of_layers_that_defer_nothing(engine: Path, fused: bool, uses: int):
    with TEJob(engine, 1, {"fused": fused, "uses": uses}, body=deferred, coordinated=False) as job:
        result = job.wait()[0]
        assert result.status == 0, job.where()
    found = result.value
    assert found["items"] == [2 * uses] * 3
    assert found["formed in B"] == 3 * 2, "the norm's own weight and bias"
    assert found["far"] < 1e-5 and found["untouched"]
    assert found["own"] is not fused
