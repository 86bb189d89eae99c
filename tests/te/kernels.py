"""What Transformer Engine's Python layers call of its compiled module, in plain torch on the CPU.

Names, order of arguments and results are those of `transformer_engine_torch`; what is not here raises by name when it
is called. 16-bit tensors are multiplied in their own type and normalised in 32 bits, as its kernels do; a product that
is added to a sum of 32 bits is formed in 32 bits.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.te.quantised import is_quantised, matrix, quantize


class DType(enum.IntEnum):
    """Types of numbers, by the values that Transformer Engine gives them."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class NVTE_QKV_Format(enum.IntEnum):
    """Orders of the dimensions sequence (s), batch (b), heads (h), width (d), and of tokens (t)."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2
    NVTE_BSHD_2SBHD = 3
    NVTE_SBHD_2BSHD = 4
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6
    NVTE_BHSD = 7
    NVTE_QKV_Format_NOT_SET = 8


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """Which of its attentions is used: none."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen = 0  # type: ignore[attr-defined]  # older versions name it, newer count

_TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


# ---- products


def generic_gemm(A: Tensor, transA: bool, B: Tensor, transB: bool, out: Tensor | None, quantizer: Any,
                 out_dtype: DType | None, bias: Tensor | None, bias_type: DType, gelu: bool, gelu_in: Tensor | None,
                 grad: bool, workspace: Tensor, workspace_size: int, accumulate: bool, split_accumulator: bool,
                 comm_overlap: Any = None, comm_type: Any = None, extra_output: Tensor | None = None,
                 bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
                 ) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
    """op(B) @ op(A), as cuBLAS sees matrices whose columns lie together; (product, gradient of ``bias``, ...).

    ``accumulate``: it is added to ``out``. With ``grad`` and a bias, B is the gradient of a linear layer's output.
    """
    assert quantizer is None and not gelu and comm_overlap is None and not bulk_overlap
    assert alpha == 1.0 and beta in (None, 0.0, 1.0)
    dtype = out.dtype if out is not None else _TORCH[out_dtype] if out_dtype is not None else B.dtype
    if is_quantised(A) or is_quantised(B):  # products of 8 bits are summed in 32
        first, second = _operand(B, not transB), _operand(A, transA)
    else:
        first, second = _rows(B).to(dtype), _rows(A).to(dtype)
    product = (first.t() if transB else first) @ (second.t() if transA else second)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = _rows(B).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.to(product.dtype)
    product = product.to(dtype)
    if out is None:
        out = product if transB else product.reshape(*B.size()[:-1], product.shape[-1])
    elif accumulate:
        out += product
    else:
        out.copy_(product.view_as(out))
    return out, bias_gradient, None, extra_output


def te_general_grouped_gemm(A: Sequence[Tensor], transA: bool, B: Sequence[Tensor], transB: bool, out: list[Tensor],
                            out_dtype: DType, splits: Sequence[int] | None, bias: Sequence[Tensor], bias_type: DType,
                            single_output: bool, gelu_in: Sequence[Tensor], grad: bool, workspaces: Sequence[Tensor],
                            workspace_size: int, accumulate: bool, split_accumulator: bool, processors: int,
                            ) -> Sequence[Tensor]:
    """`generic_gemm` of each pair. ``single_output``: the products lie one behind the other in ``out``'s only tensor.
    With ``grad`` the gradients of biases are written into ``bias``, whose tensors are empty if there are none."""
    parts = torch.split(out[0], list(splits or ())) if single_output else out
    for a, b, product, one in zip(A, B, parts, bias, strict=True):
        if not math.prod(b.size()):
            if not accumulate:
                product.zero_()
            continue
        has_bias = one.numel() > 0
        _, gradient, *_ = generic_gemm(a, transA, b, transB, product, None, None, one if has_bias else None, bias_type,
                                       False, None, grad, torch.empty(0), 0, accumulate, split_accumulator)
        if gradient is not None:
            one.copy_(gradient)
    return bias


def _operand(tensor: Any, by_rows: bool) -> Tensor:
    return matrix(tensor, by_rows) if is_quantised(tensor) else _rows(tensor).float()


def _rows(tensor: Tensor) -> Tensor:
    """(..., n) as (rows, n)."""
    return tensor.reshape(-1, tensor.shape[-1])


def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Apex's, for core's own layers: adds a weight's gradient to ``total``, of inputs (rows, in) and (rows, out)."""
    total.addmm_(gradient.t().to(total.dtype), inputs.to(total.dtype))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


# ---- norms


def layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor | None, quantizer: Any,
                  out_dtype: DType, margin: int, zero_centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, n) -> the normalised rows, and of each its mean and what it was multiplied by, in 32 bits."""
    wide = x.float()
    mean = wide.mean(-1)
    scale = (wide.var(-1, unbiased=False) + eps).rsqrt()
    y = (wide - mean[:, None]) * scale[:, None] * _gamma(weight, zero_centred) + bias.float()
    return _into(out, y.to(x.dtype), quantizer), mean, scale


def layernorm_bwd(dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, margin: int,
                  zero_centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows, the weight and the bias."""
    normal, wide = (x.float() - mean[:, None]) * scale[:, None], dy.float()
    g = wide * _gamma(weight, zero_centred)
    dx = scale[:, None] * (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (wide * normal).sum(0).to(weight.dtype), wide.sum(0).to(weight.dtype)


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, out_dtype: DType,
                margin: int, zero_centred: bool) -> tuple[Tensor, None, Tensor]:
    """As `layernorm_fwd`, without means."""
    wide = x.float()
    scale = (wide.square().mean(-1) + eps).rsqrt()
    return _into(out, (wide * scale[:, None] * _gamma(weight, zero_centred)).to(x.dtype), quantizer), None, scale


def rmsnorm_bwd(dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor, margin: int,
                zero_centred: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the weight."""
    normal, wide = x.float() * scale[:, None], dy.float()
    g = wide * _gamma(weight, zero_centred)
    dx = scale[:, None] * (g - normal * (g * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (wide * normal).sum(0).to(weight.dtype)


def _gamma(weight: Tensor, zero_centred: bool) -> Tensor:
    return weight.float() + (1.0 if zero_centred else 0.0)


def _into(out: Tensor | None, value: Tensor, quantizer: Any) -> Any:
    if quantizer is not None:
        return quantize(value, quantizer, out)
    return value if out is None else out.copy_(value)


# ---- activations


def gelu(x: Tensor, quantizer: Any = None) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def dgelu(dy: Tensor, x: Tensor, quantizer: Any = None) -> Tensor:
    return _derivative(gelu, dy, x)


def swiglu(x: Tensor, quantizer: Any = None) -> Tensor:
    gate, value = x.chunk(2, -1)
    return functional.silu(gate) * value


def dswiglu(dy: Tensor, x: Tensor, quantizer: Any = None) -> Tensor:
    return _derivative(swiglu, dy, x)


def _derivative(function: Any, dy: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        gradient, = torch.autograd.grad(function(x), x, dy)
    return gradient


# ---- attention


def scaled_masked_softmax_forward(x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    """Softmax over the last dimension of ``x`` times ``scale``; True in ``mask`` hides."""
    return (x.float() * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)


def scaled_softmax_forward(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).softmax(-1).to(x.dtype)


def scaled_aligned_causal_masked_softmax_forward(x: Tensor, scale: Tensor) -> Tensor:
    """What comes later is hidden; the last row sees all."""
    later = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1 + x.shape[-1] - x.shape[-2])
    return (x.float() * scale).masked_fill(later, float("-inf")).softmax(-1).to(x.dtype)


def _softmax_backward(dy: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    g, y32 = dy.float(), y.float()
    return (y32 * (g - (g * y32).sum(-1, keepdim=True)) * scale).to(dy.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward = _softmax_backward
scaled_aligned_causal_masked_softmax_backward = _softmax_backward
scaled_upper_triang_masked_softmax_forward = scaled_aligned_causal_masked_softmax_forward
scaled_upper_triang_masked_softmax_backward = _softmax_backward


def fused_rope_forward(t: Tensor, angles: Tensor, start: Any, order: NVTE_QKV_Format, interleaved: bool,
                       lengths: Tensor | None, context_size: int, context_rank: int) -> Tensor:
    """(s, b, h, d) with the first ``angles.shape[-1]`` of each head rotated; ``angles`` (s, 1, 1, n)."""
    assert order == NVTE_QKV_Format.NVTE_SBHD and start is None and lengths is None and context_size == 1
    return _rotated(t, angles[:t.shape[0]], 1.0, interleaved)


def fused_rope_backward(dy: Tensor, angles: Tensor, *rest: Any) -> Tensor:
    """The rotation back. Versions have more arguments before order of dimensions or not."""
    places = [place for place, value in enumerate(rest) if isinstance(value, NVTE_QKV_Format)]
    return _rotated(dy, angles[:dy.shape[0]], -1.0, bool(rest[places[0] + 1]))


def _rotated(t: Tensor, angles: Tensor, sign: float, interleaved: bool) -> Tensor:
    count = angles.shape[-1]
    turned, rest = t[..., :count].float(), t[..., count:]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        one, two = turned.chunk(2, -1)
        other = torch.cat((-two, one), -1)
    turned = turned * angles.float().cos() + sign * other * angles.float().sin()
    return torch.cat((turned.to(t.dtype), rest), -1)


# ---- optimizers: (chunk size, overflow flag, lists of tensors, ...)


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """The second list becomes the first one times ``scale``."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: Tensor) -> None:
    """As `multi_tensor_scale`, by a tensor of one number."""
    multi_tensor_scale(chunk, overflow, lists, float(scale))


def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]],
                        per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """The norm of all, in 32 bits, and of each if ``per_tensor``."""
    norms = [tensor.float().norm() for tensor in lists[0]]
    each = torch.stack(norms) if norms else torch.zeros(0)
    return each.norm().reshape(1), each if per_tensor else torch.zeros(0)


def multi_tensor_adam(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], rate: float, beta1: float,
                      beta2: float, eps: float, step: int, decoupled: int, bias_correction: int,
                      weight_decay: float) -> None:
    """One step of Adam on (gradients, parameters, first moments, second moments); a fifth list: the copies of 32 bits
    that are stepped in the parameters' place."""
    first = 1.0 - beta1**step if bias_correction else 1.0
    second = 1.0 - beta2**step if bias_correction else 1.0
    for gradient, parameter, mean, square, *master in zip(*lists, strict=True):
        p = (master[0] if master else parameter).float()
        g = gradient.float() if decoupled else gradient.float() + weight_decay * p
        mean.copy_(beta1 * mean + (1 - beta1) * g)
        square.copy_(beta2 * square + (1 - beta2) * g * g)
        update = (mean / first) / ((square / second).sqrt() + eps)
        p = p - rate * (update + weight_decay * p if decoupled else update)
        for target in (parameter, *master):
            target.copy_(p)


def multi_tensor_adam_param_remainder(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]],
                                      *settings: Any) -> None:
    """As `multi_tensor_adam`, where the fifth list has but the lower 16 bits of the copies of 32, as int16, and
    parameters of bf16 have the upper ones, one more where the lower ones begin with a 1."""
    *others, rests = lists
    masters = []
    for parameter, rest in zip(others[1], rests, strict=True):
        high = parameter.view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)
        masters.append(((high << 16) | (rest.to(torch.int32) & 0xFFFF)).view(torch.float32))
    multi_tensor_adam(chunk, overflow, [*others, masters], *settings)
    for parameter, rest, master in zip(others[1], rests, masters, strict=True):
        bits = master.view(torch.int32)
        low = bits & 0xFFFF
        rest.copy_(torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16))
        parameter.view(torch.int16).copy_(((bits >> 16) + (rest < 0).to(torch.int32)).to(torch.int16))


def multi_tensor_sgd(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], weight_decay: float,
                     momentum: float, dampening: float, rate: float, nesterov: bool, first: bool,
                     decay_after_momentum: bool, scale: float) -> None:
    """One step of SGD on (gradients, parameters, momenta); a fourth list: copies of the parameters of 16 bits."""
    for gradient, parameter, held, *copy in zip(*lists, strict=True):
        g = gradient.float() * scale
        if weight_decay and not decay_after_momentum:
            g = g + weight_decay * parameter
        if momentum:
            held.copy_(g if first else momentum * held + (1.0 - dampening) * g)
            g = g + momentum * held if nesterov else held
        if weight_decay and decay_after_momentum:
            g = g + weight_decay * parameter
        parameter.add_(g, alpha=-rate)
        for target in copy:
            target.copy_(parameter)


# ---- the machine


def get_fused_attn_backend(*question: Any, **more: Any) -> Any:
    """Attention is what its Python does where no kernel has it. Newer versions ask with one object, and want to know
    why."""
    none = NVTE_Fused_Attn_Backend.NVTE_No_Backend
    return (none, "there is no kernel here") if len(question) == 1 else none


def get_cublasLt_version() -> int:
    return 120805


def get_num_cublas_streams() -> int:
    return 1


def get_cudnn_version() -> int:
    return 91000


def device_supports_multicast() -> bool:
    return False
