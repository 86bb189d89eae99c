"""Apex's kernels that add a weight gradient to a sum without forming it first, if apex is installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_recycle.runtime.compute.split import Kernel

_MODULE = "fused_weight_gradient_mlp_cuda"
_HALVES = (torch.float16, torch.bfloat16)


def fused_kernel(sums: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel for sums of this type; None if apex is not installed, has none, or the device is no GPU."""
    if device.type != "cuda":
        return None
    try:
        kernels: Any = importlib.import_module(_MODULE)
    except ImportError:
        return None
    if sums == torch.float32:
        return kernels.wgrad_gemm_accum_fp32
    return kernels.wgrad_gemm_accum_fp16 if sums in _HALVES else None
