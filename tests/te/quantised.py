"""What Transformer Engine's compiled module does to tensors of 8 bits, in plain torch on the CPU: for the recipes that
scale each tensor by what is in it (tensorwise, in blocks of 128, and MX's blocks of 32).

Numbers are rounded to 8 bits as its kernels do, and products are formed of the rounded ones in 32 bits, so that what is
trained is what such a recipe trains but for the order of sums. Tensors are laid out as its Python expects them, and by
the half that a product needs: one that lacks the half is an error here as well.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class FP8FwdTensors(enum.IntEnum):
    """Places of a layer's tensors of the forward in its list of quantizers."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    """Likewise of the backward."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class Float8BlockScaleTensorFormat(enum.IntEnum):
    """Whether a tensor in blocks of 128 lies as products want it, or as it is gathered from several processes."""

    GEMM_READY = 0
    COMPACT = 1


_E4M3 = 7
"""The number that the compiled module's DType has for it; the other one is E5M2."""
_MX = 32
_BLOCK = 128


def _type(number: int) -> torch.dtype:
    return torch.float8_e4m3fn if int(number) == _E4M3 else torch.float8_e5m2


def is_quantised(tensor: Any) -> bool:
    """Whether it is one of Transformer Engine's tensors of few bits."""
    return any(kind.__name__ == "QuantizedTensorStorage" for kind in type(tensor).__mro__)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """``tensor`` (..., n) in the 8 bits that ``quantizer`` says, with the halves that it wants; in ``output``, if there
    is one, unless ``noop`` says that it is to be left as it is."""
    if output is None:
        whole = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        output = type(whole).__mro__[1](**whole.get_metadata()) if quantizer.internal else whole
    if noop is None or not bool(noop):
        _fill(output, tensor.detach().reshape(-1, tensor.shape[-1]).float(), quantizer)
    return output


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The gradient of a bias, and ``gradient`` as `quantize` makes it."""
    return gradient.reshape(-1, gradient.shape[-1]).float().sum(0).to(gradient.dtype), quantize(gradient, quantizer)


def split_quantize(tensor: Tensor, sizes: Sequence[int], quantizers: Sequence[Any]) -> list[Any]:
    """Each of the parts of ``tensor``, of so many rows, by a quantizer of its own."""
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(list(sizes)), quantizers, strict=True)]


def dequantize(tensor: Any, dtype: int) -> Tensor:
    """What ``tensor`` holds, as numbers of 32 bits, or of 16 where ``dtype`` says so."""
    kinds = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
    return matrix(tensor, _has_rows(tensor)).reshape(tensor.size()).to(kinds[int(dtype)])


def fp8_transpose(data: Tensor, kind: int, out: Tensor | None = None) -> Tensor:
    """(..., n) bytes as (n, ...)."""
    turned = data.reshape(-1, data.shape[-1]).t().reshape(data.shape[-1], *data.shape[:-1]).contiguous()
    return turned if out is None else out.copy_(turned)


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """(a, b, ...) as (b, a, ...)."""
    return tensor.transpose(0, 1).contiguous()


def matrix(tensor: Any, by_rows: bool) -> Tensor:
    """``tensor`` (..., n) as (rows, n) numbers of 32 bits, from the half that products along rows, or else along
    columns, read."""
    name = type(tensor).__name__
    if name.startswith("Float8Tensor"):
        if by_rows:
            return _numbers(_there(tensor._data), tensor) * tensor._scale_inv
        assert not tensor._transpose_invalid
        return (_numbers(_there(tensor._transpose).flatten(1), tensor) * tensor._scale_inv).t()
    data = _there(tensor._rowwise_data if by_rows else tensor._columnwise_data)
    scale = tensor._rowwise_scale_inv if by_rows else tensor._columnwise_scale_inv
    if name.startswith("MXFP8Tensor"):
        numbers = _numbers(data, tensor)
        return numbers * _spread(torch.exp2(scale.float() - 127), numbers.shape, *((1, _MX) if by_rows else (_MX, 1)))
    assert name.startswith("Float8BlockwiseQTensor"), name
    assert tensor._is_gemm_ready_format()
    if tensor._is_2D_scaled:
        numbers = _numbers(data if by_rows else data.flatten(1), tensor)
        numbers = numbers * _spread(scale, numbers.shape, _BLOCK, _BLOCK)
    else:
        numbers = _numbers(data if by_rows else data.flatten(1), tensor)
        numbers = numbers * _spread(scale.t(), numbers.shape, 1, _BLOCK)
    return numbers if by_rows else numbers.t()


def _there(data: Tensor | None) -> Tensor:
    assert data is not None and data.numel(), "a product of a half that this tensor was made without"
    return data


def _has_rows(tensor: Any) -> bool:
    return getattr(tensor, "_data", getattr(tensor, "_rowwise_data", None)) is not None


def _numbers(data: Tensor, tensor: Any) -> Tensor:
    return data.reshape(-1, data.shape[-1]).view(_type(tensor._fp8_dtype)).float()


# ---- making


def _fill(output: Any, wide: Tensor, quantizer: Any) -> None:
    """Write ``wide`` (rows, n) into ``output``, which `quantizer` has made."""
    kind, name = _type(quantizer.dtype), type(quantizer).__name__
    if name == "Float8CurrentScalingQuantizer":
        _fill_whole(output, wide, quantizer, kind)
    elif name == "Float8BlockQuantizer":
        _fill_blocks(output, wide, quantizer, kind)
    elif name == "MXFP8Quantizer":
        for data, scale, height, width in ((output._rowwise_data, output._rowwise_scale_inv, 1, _MX),
                                           (output._columnwise_data, output._columnwise_scale_inv, _MX, 1)):
            if data is not None:
                exponents = _mx_exponents(_largest(wide, height, width), kind)
                _put(data, _rounded(wide, torch.exp2(127 - exponents.float()), height, width, kind))
                scale.fill_(0)[:exponents.shape[0], :exponents.shape[1]] = exponents
    else:
        raise NotImplementedError(f"tests/te/quantised.py has no {name}")


def _fill_whole(output: Any, wide: Tensor, quantizer: Any, kind: torch.dtype) -> None:
    largest = wide.abs().max().reshape(1)
    if quantizer.with_amax_reduction:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    scale = _scale(largest, kind, quantizer)
    quantizer.amax.copy_(largest)
    quantizer.scale.copy_(scale)
    rounded = _rounded(wide, scale.view(1, 1), *wide.shape, kind)
    if output._data is not None:
        _put(output._data, rounded)
    if output._transpose is not None:
        _put(output._transpose, rounded.t())
        output._transpose_invalid = False
    output._scale_inv.copy_(1.0 / scale)


def _fill_blocks(output: Any, wide: Tensor, quantizer: Any, kind: torch.dtype) -> None:
    square = quantizer.block_scaling_dim == 2
    ready = output._is_gemm_ready_format()
    for data, inverse, across in ((output._rowwise_data, output._rowwise_scale_inv, False),
                                  (output._columnwise_data, output._columnwise_scale_inv, True)):
        if data is None:
            continue
        given = wide.t() if across else wide
        height = _BLOCK if square else 1
        scale = _scale(_largest(given, height, _BLOCK), kind, quantizer)
        rounded = _rounded(given, scale, height, _BLOCK, kind)
        _put(data, rounded if ready or not across else rounded.t())
        inverted = 1.0 / scale
        if not square and (ready or across):
            inverted = inverted.t()
        inverse.fill_(0.0)[:inverted.shape[0], :inverted.shape[1]] = inverted


def _scale(largest: Tensor, kind: torch.dtype, quantizer: Any) -> Tensor:
    """By what numbers up to ``largest`` are multiplied so that they fill the type."""
    found = torch.finfo(kind).max / largest.clamp(min=quantizer.amax_epsilon)
    found = torch.where(largest > 0, found, torch.ones_like(found))
    found = torch.where(torch.isfinite(largest), found, torch.ones_like(found))
    found = found.clamp(max=torch.finfo(torch.float32).max)
    return torch.exp2(torch.floor(torch.log2(found))) if quantizer.force_pow_2_scales else found


def _mx_exponents(largest: Tensor, kind: torch.dtype) -> Tensor:
    """MX's scales, powers of two: their exponents, 127 for one, rounded up."""
    return (torch.ceil(torch.log2(largest / torch.finfo(kind).max)).clamp(-127, 127) + 127).nan_to_num().to(torch.uint8)


def _largest(wide: Tensor, height: int, width: int) -> Tensor:
    """Of each block of ``height`` rows and ``width`` columns."""
    rows, columns = (math.ceil(size / block) for size, block in zip(wide.shape, (height, width), strict=True))
    padded = functional.pad(wide.abs(), (0, columns * width - wide.shape[1], 0, rows * height - wide.shape[0]))
    return padded.reshape(rows, height, columns, width).amax((1, 3))


def _spread(scale: Tensor, shape: Sequence[int], height: int, width: int) -> Tensor:
    """A number per block as one per element; ``scale`` may have padding behind its own."""
    return scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[:shape[0], :shape[1]]


def _rounded(wide: Tensor, scale: Tensor, height: int, width: int, kind: torch.dtype) -> Tensor:
    """(rows, n) bytes."""
    limit = torch.finfo(kind).max
    return (wide * _spread(scale, wide.shape, height, width)).clamp(-limit, limit).to(kind).view(torch.uint8)


def _put(place: Tensor, rounded: Tensor) -> None:
    place.copy_(rounded.reshape(place.shape))
