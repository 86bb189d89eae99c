"""The stand-in's tensors of 8 bits: as near to what they were made of as such numbers are, read as Transformer Engine's
own Python reads them, and multiplied as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.te.job import TEJob
from tests.te.versions import engines

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes


def look(observer_of: Callable[[str], Any], rank: int) -> dict[str, float]:
    """By kind of tensor and half of it: how far a number is at most from what it was, beside the largest of its block;
    and how far from that which the package's own Python reads."""
    import sys

    import torch

    from tests.backends.megatron_job import SCRIPTS

    sys.path.insert(0, SCRIPTS)
    import megatron_cpu

    megatron_cpu.install(pretend=True)
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    from tests.te import kernels, quantised

    e4m3, found = kernels.DType.kFloat8E4M3, {}
    x = torch.randn(160, 192, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 160)[:, None]
    halves: dict[str, Any] = {"rowwise": True, "columnwise": True}
    kinds = {
        "whole": Float8CurrentScalingQuantizer(e4m3, device="cpu", **halves),
        "rows of blocks": Float8BlockQuantizer(e4m3, block_scaling_dim=1, **halves),
        "squares": Float8BlockQuantizer(e4m3, block_scaling_dim=2, **halves),
        "mx": MXFP8Quantizer(e4m3, **halves)}
    for name, quantizer in kinds.items():
        for internal in (False, True):
            quantizer.internal = internal
            made = quantised.quantize(x, quantizer)
            assert internal != isinstance(made, torch.Tensor)
            for by_rows in (True, False):
                read = quantised.matrix(made, by_rows)
                # A number is off by a sixteenth of itself, or by what the smallest one of its scale is.
                found[f"{name} {by_rows}"] = float(((read - x).abs() - x.abs() / 16).max() / x.abs().max())
                if name in ("rows of blocks", "squares"):
                    found[f"{name} {by_rows} theirs"] = float((made.dequantize() - read).abs().max() / x.abs().max())
                    made._rowwise_data = made._rowwise_scale_inv = None  # theirs reads rows where there are any
        quantizer.set_usage(rowwise=True, columnwise=False)
        try:
            quantised.matrix(quantised.quantize(x, quantizer), False)
        except AssertionError:
            found[f"{name} lacks"] = 0.0
    return found


@engines
def test_they_are_near_what_they_were_made_of_by_either_half(engine: Path):
    with TEJob(engine, 1, {}, body=look, coordinated=False) as job:
        result = job.wait()[0]
        assert result.status == 0, job.where()
    assert len(result.value) == 16
    far = {name: value for name, value in result.value.items() if name.endswith("theirs")}
    assert not any(far.values()), far
    assert max(result.value.values()) < 1e-5
