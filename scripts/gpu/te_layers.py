#!/usr/bin/env python3
"""Transformer Engine's own linear layers, as they are and with their weight gradients left for later by the plugin.

    python scripts/gpu/te_layers.py              # on a GPU, with Transformer Engine and megatron-core installed
    python scripts/gpu/te_layers.py --dry-run    # without: on the tests' stand-in for its kernels (tests/te)

Three micro-batches through two layers, a norm in the first. By themselves the layers form weight gradients in their
backward, or add them to `main_grad` there; under the plugin that is done afterwards. In the micro-batches' order both
have to give the same bits; the other way round the same sums but for rounding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
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
            device: str = "cpu", recipe: str | None = None, experts: int = 0) -> dict[str, Any]:
    """What came out of it.

    Args:
        fused: weight gradients are added to `main_grad`, of 32 bits, by the kernel that forms them.
        uses: how often a micro-batch goes through the layers.
        backwards: weight gradients are formed the other way round.
        recipe: of products in 8 bits, one of `RECIPES`.
        experts: the second layer is so many in one, each for its rows.
    """
    from megatron_recycle.backends.megatron import te
    from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
    from megatron_recycle.runtime.compute.split import WeightQueue

    torch.manual_seed(0)
    plain, model = (_layers(fused, dtype, device, experts) for _ in range(2))
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


def is_well(found: dict[str, Any], uses: int, backwards: bool, dtype: torch.dtype, recipe: str | None = None,
            experts: int = 0) -> bool:
    """Whether that is as it has to be. In 8 bits biases' gradients are formed in B, before rounding."""
    exact, layers = not backwards and uses == 1, 1 + max(1, experts)
    formed = (2 if recipe is None else 2 + layers) * MICROBATCHES
    return bool(found["items"] == [layers * uses] * MICROBATCHES and found["formed in B"] == formed
                and found["untouched"] and (found["same bits"] if exact else
                                            found["far"] < (1e-5 if dtype == torch.float32 else 2e-2)))


class _Experts(nn.Module):
    """Layers in one, each for as many of the rows as the others."""

    def __init__(self, layers: nn.Module, count: int) -> None:
        super().__init__()
        self.layers, self.count = layers, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1] // self.count
        y: torch.Tensor = self.layers(x, [rows] * self.count)
        return y


def _layers(fused: bool, dtype: torch.dtype, device: str, experts: int) -> nn.Module:
    import transformer_engine.pytorch as te

    width = WIDTHS[device]
    options: dict[str, Any] = {"device": device, "params_dtype": dtype, "fuse_wgrad_accumulation": fused}
    model = nn.Sequential(te.LayerNormLinear(width, width, **options),
                          _Experts(te.GroupedLinear(experts, width, width, **options), experts) if experts else
                          te.Linear(width, width, **options))
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return model


def _loss(model: nn.Module, seed: int, uses: int, dtype: torch.dtype, device: str, recipe: str | None) -> torch.Tensor:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    x = torch.randn(4, 16, WIDTHS[device], generator=torch.Generator().manual_seed(seed)).to(device, dtype)
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


def cases(recipes: Sequence[str]) -> list[dict[str, Any]]:
    """What `compare` is asked for, with these ``recipes`` of 8 bits."""
    plain = [{"fused": fused, "uses": uses, "backwards": backwards, "dtype": dtype} for dtype, fused, uses, backwards in
             itertools.product((torch.float32, torch.bfloat16), (False, True), (1, 2), (False, True))]
    rounded = [{"fused": fused, "uses": 2, "backwards": True, "dtype": torch.bfloat16, "recipe": recipe,
                "experts": experts} for fused, recipe, experts in itertools.product((False, True), recipes, (0, 2))]
    experts = [{"fused": fused, "uses": 1, "backwards": False, "dtype": torch.bfloat16, "recipe": recipe, "experts": 2}
               for fused, recipe in itertools.product((False, True), (None, *recipes[:1]))]
    return [*plain, *rounded, *experts]


def judge(case: dict[str, Any], device: str) -> dict[str, Any]:
    """``case``, what came of it, and whether that is "well"."""
    found = compare(**case, device=device)
    rest = {name: value for name, value in case.items() if name != "fused"}
    return {**case, "dtype": str(case["dtype"]), "well": is_well(found, **rest), **found}


def on_stand_ins() -> int:
    """Run this without a GPU, on each Transformer Engine's Python that scripts/setup.sh has fetched."""
    root = Path(__file__).resolve().parents[2]
    folders = sorted((Path(sys.prefix) / "transformer_engine").glob("[0-9]*"))
    if not folders:
        print("te_layers.py: no Transformer Engine's Python is here; scripts/setup.sh fetches it", file=sys.stderr)
        return 2
    return max(subprocess.call([sys.executable, "-W", "ignore", str(root / "tests" / "te" / "stand_in.py"), str(folder),
                                __file__, "--dry-run"]) for folder in folders)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="JSON", help="the report, whose part d is written")
    parser.add_argument("--dry-run", action="store_true",
                        help="without a GPU: on the tests' stand-in for the kernels; nothing is written")
    args = parser.parse_args(argv)
    dry, stands_in = args.dry_run, "tests.te.stand_in" in sys.modules
    if dry and not stands_in:
        return on_stand_ins()
    import check_report

    if not dry and check_report.machine()["gpu"] is None:
        print("te_layers.py: there is no GPU that torch can use; --dry-run asks for none", file=sys.stderr)
        return 2
    if dry:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        import megatron_cpu

        megatron_cpu.install(pretend=True)
    try:
        import transformer_engine.pytorch as te
        from megatron.core.utils import get_te_version
    except ImportError as error:
        print(f"te_layers.py: {error}", file=sys.stderr)
        return 2
    able = {"tensorwise": te.is_fp8_available, "blockwise": te.is_fp8_block_scaling_available,
            "mxfp8": te.is_mxfp8_available}
    recipes = [recipe for recipe in RECIPES if able[recipe]()]
    print(f"Transformer Engine {get_te_version()}; recipes of 8 bits here: {', '.join(recipes) or 'none'}", flush=True)
    results = []
    for case in cases(recipes):
        results.append({"version": str(get_te_version()), **judge(case, "cpu" if dry else "cuda")})
        print(f"{'well' if results[-1]['well'] else 'BAD '} {json.dumps(results[-1])}", flush=True)
        if not dry:
            check_report.write(args.out, "d: Transformer Engine", results)
    return 0 if all(result["well"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
