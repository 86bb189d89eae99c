"""Calls of core's functions that differ between its versions."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

from megatron_recycle.backends.megatron.version import release

_NAMES_THE_MODEL = release() < (0, 17)
"""Whether backward asks for the kind of model, to be told apart from T5."""
CLIPS_BY_TENSORS = getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is not None
"""Whether the norm and what follows from it are tensors of 32 bits: since 0.17, where Transformer Engine can multiply
by one."""


def backward_step(inputs: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None, model: Any,
                  config: Any) -> torch.Tensor | None:
    """Core's backward from ``output`` of a forward of ``model``; returns the gradient of ``inputs``, if there are any.
    """
    kind = (get_model_type(model),) if _NAMES_THE_MODEL else ()
    returned: torch.Tensor | None = schedules.backward_step(inputs, output, gradient, *kind, config)
    return returned
