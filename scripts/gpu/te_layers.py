#!/usr/bin/env python3
"""Transformer Engine's own linear layers, as they are and with their weight gradients left for later by the plugin.

    python scripts/gpu/te_layers.py              # on a GPU, with Transformer Engine and megatron-core installed

Three micro-batches through two layers, a norm in the first. By themselves the layers form weight gradients in their
backward, or add them to `main_grad` there; under the plugin that is done afterwards. In the micro-batches' order both
have to give the same bits; the other way round the same sums but for rounding. Without a GPU the tests run this on a
stand-in for the kernels (tests/te).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project need not be installed

import torch
from torch import nn

WIDTHS = {"cpu": 32, "cuda": 256}
MICROBATCHES = 3
RECIPES = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
"""Megatron's names of the recipes of 8 bits without a history -> Transformer Engine's classes."""


def compare(fused: bool, uses: int, backwards: bool, dtype: torch.dtype = torch.float32,
            device: str = "cpu", recipe: str | None = None) -> dict[str, Any]:
    """What came out of it.

    Args:
        fused: weight gradients are added to `main_grad`, of 32 bits, by the kernel that forms them.
        uses: how often a micro-batch goes through the layers.
        backwards: weight gradients are formed the other way round.
        recipe: of products in 8 bits, one of `RECIPES`.
    """
    from megatron_recycle.backends.megatron import te
    from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
    from megatron_recycle.runtime.compute.split import WeightQueue

    torch.manual_seed(0)
    plain, model = _layers(fused, dtype, device), _layers(fused, dtype, device)
    model.load_state_dict(plain.state_dict(), strict=False)
    for seed in range(MICROBATCHES):
        _loss(plain, seed, uses, dtype, device, recipe).backward()
        _add_up(plain)
    splitter: Any = te.splitter_for([model], split_backward=True)
    layout = Layout(list(model.parameters()), torch.float32)
    sums = Accumulators(layout, lambda pipeline, microbatch: (WHOLE, 0))
    queues, formed = [WeightQueue() for _ in range(MICROBATCHES)], 0
    for seed, queue in enumerate(queues):
        loss = _loss(model, seed, uses, dtype, device, recipe)
        with splitter.into(queue, [loss]):
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                sums.add(0, seed, [(parameter, parameter.grad)])
                parameter.grad, formed = None, formed + 1
    items = [len(queue.deferred) for queue in queues]
    order = list(enumerate(queues))
    for seed, queue in reversed(order) if backwards else order:
        with torch.no_grad():
            sums.add(0, seed, queue.contributions())
    flat = sums.sum(WHOLE)
    pairs = [(layout.view(flat, mine), theirs.main_grad)
             for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)]
    scale = max(float(theirs.abs().max()) for _, theirs in pairs)
    return {"items": items, "formed in B": formed, "same bits": all(torch.equal(*pair) for pair in pairs),
            "far": max(float((mine - theirs).abs().max()) for mine, theirs in pairs) / scale,
            "untouched": all(bool((parameter.main_grad == 0).all()) for parameter in model.parameters())}


def is_well(found: dict[str, Any], uses: int, backwards: bool, dtype: torch.dtype, recipe: str | None = None) -> bool:
    """Whether that is as it has to be. In 8 bits biases' gradients are formed in B, before rounding."""
    exact = not backwards and uses == 1
    formed = (2 if recipe is None else 4) * MICROBATCHES
    return bool(found["items"] == [2 * uses] * MICROBATCHES and found["formed in B"] == formed
                and found["untouched"] and (found["same bits"] if exact else
                                            found["far"] < (1e-5 if dtype == torch.float32 else 2e-2)))


def _layers(fused: bool, dtype: torch.dtype, device: str) -> nn.Module:
    import transformer_engine.pytorch as te

    width = WIDTHS[device]
    options: dict[str, Any] = {"device": device, "params_dtype": dtype, "fuse_wgrad_accumulation": fused}
    model = nn.Sequential(te.LayerNormLinear(width, width, **options), te.Linear(width, width, **options))
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return model


def _loss(model: nn.Module, seed: int, uses: int, dtype: torch.dtype, device: str, recipe: str | None) -> torch.Tensor:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    x = torch.randn(2, 16, WIDTHS[device], generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    how = {} if recipe is None else {"fp8_recipe": getattr(recipes, RECIPES[recipe])()}
    with te.fp8_autocast(enabled=recipe is not None, **how):
        for _ in range(uses):
            x = model(x)
    return x.float().square().mean()


def _add_up(model: nn.Module) -> None:
    """What Megatron's DistributedDataParallel does after a backward."""
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad, parameter.grad_added_to_main_grad = None, False


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="JSON", help="the report, whose part d is written")
    args = parser.parse_args(argv)
    import check_report

    if check_report.machine()["gpu"] is None:
        print("te_layers.py: there is no GPU that torch can use; tests/te runs this without", file=sys.stderr)
        return 2
    try:
        import transformer_engine.pytorch  # noqa: F401
        from megatron.core.utils import get_te_version
    except ImportError as error:
        print(f"te_layers.py: {error}", file=sys.stderr)
        return 2
    results = []
    for dtype, fused, uses, backwards in itertools.product(
            (torch.float32, torch.bfloat16), (False, True), (1, 2), (False, True)):
        found = compare(fused, uses, backwards, dtype, "cuda")
        results.append({"well": is_well(found, uses, backwards, dtype), "version": str(get_te_version()),
                        "dtype": str(dtype), "fused": fused, "uses": uses, "backwards": backwards, **found})
        print(f"{'well' if results[-1]['well'] else 'BAD '} {json.dumps(results[-1])}", flush=True)
        check_report.write(args.out, "d: Transformer Engine", results)
    return 0 if all(result["well"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
