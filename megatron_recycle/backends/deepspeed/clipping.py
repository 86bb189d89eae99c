"""Gradient norm and clipping: stock's arithmetic, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

from megatron_recycle.backends.deepspeed.chunks import chunks_of
from megatron_recycle.backends.deepspeed.masters import MasterWeightOptimizer
from megatron_recycle.backends.deepspeed.zero import ZeroOptimizer, clipping_coefficient

_TIED = "tied_modules"


class Clipping:
    """Clips the gradients of one engine's job.

    Args:
        engine: DeepSpeed's, built.
        keeper: its optimizer, if that has fp32 copies of 16-bit parameters, or shards.
        everywhere: whether parameters of all stages count in the norm.

    Attributes:
        limit: on the norm, as of the last `look`, from stock's place for it; 0: none.
    """

    def __init__(self, engine: PipelineEngine, keeper: MasterWeightOptimizer | ZeroOptimizer | None,
                 everywhere: bool) -> None:
        self._engine, self._keeper = engine, keeper
        self._zero = keeper if isinstance(keeper, ZeroOptimizer) else None
        self._everywhere = everywhere or keeper is not None
        self.look()

    def look(self) -> None:
        """Pick up the script's limit when an iteration begins."""
        self.limit = float(self._engine.gradient_clipping() if self._zero is None else self._zero.clip_grad)

    @property
    def scaled(self) -> MasterWeightOptimizer | ZeroOptimizer | None:
        """The optimizer, if losses are scaled for it (fp16)."""
        return self._keeper if self._keeper is not None and self._keeper.scales else None

    def norm_square(self, parameters: Mapping[str, nn.Parameter], gradients: Sequence[torch.Tensor]) -> float:
        """This stage's share of the squared norm, for ``parameters``, by name, with ``gradients``. Infinite if losses
        are scaled and a gradient has overflowed."""
        if self.scaled is not None and not all(gradient.isfinite().all() for gradient in gradients):
            return math.inf
        if self.limit <= 0.0 and self._keeper is None:
            return 0.0
        kind = torch.float32 if self._zero is None else self._zero.norm_type
        counted = [gradient.detach().to(kind) for (name, parameter), gradient in zip(parameters.items(), gradients)
                   if gradient.numel() and self._counts(name, parameter)]
        total = torch.stack(torch._foreach_norm(counted, 2.0)).pow(2.0).sum().float().item() if counted else 0.0
        return total if self.scaled is None else total / self.scaled.loss_scale**2

    def _counts(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` counts in the global norm. In fp32: the parameters of model-parallel rank 0, the first
        stage's first tensor-parallel part, and all that are cut over ranks. In 16 bits: the first part's of all stages,
        with a tied one once, and other parts' if cut over parts."""
        cut = is_model_parallel_parameter(parameter)
        first = self._engine.grid.get_slice_parallel_rank() == 0
        if not self._everywhere:
            return cut or (first and self._stock_stage(name) == 0)
        return (cut or first) and not getattr(parameter, "ds_pipe_replicated", False)

    def _stock_stage(self, name: str) -> int:
        """The stage that would have the parameter ``name`` with one chunk per stage: gives two chunks the same norm."""
        module = self._engine.module
        chunks = chunks_of(module)
        if chunks is None:
            return int(self._engine.stage_id)
        layer, _, rest = name.partition(".")
        if layer == _TIED:
            layer = str(next(number for number, spec in enumerate(module._layer_specs)
                             if isinstance(spec, TiedLayerSpec) and spec.key == rest.partition(".")[0]))
        return chunks.stock_stage_of(int(layer)) if layer.isdigit() else int(self._engine.stage_id)

    def coefficient(self, norm_squares: Sequence[float]) -> float:
        """Stock's clipping (`clip_grad_norm_`; with a loss scale `unscale_and_clip_grads`), operation by operation; NaN
        if a stage's gradients have overflowed."""
        engine = self._engine
        if self.scaled is not None and not math.isfinite(sum(norm_squares)):
            return math.nan
        if self._zero is not None:
            return clipping_coefficient(norm_squares, engine.num_stages, self.limit)
        if self.limit <= 0.0:
            return 1.0
        if self.scaled is not None:
            return 1.0 / max(1.0, (math.sqrt(sum(norm_squares)) + 1e-6) / self.limit)
        total = torch.zeros(1)
        for value in norm_squares:
            total += value
        # Stock averages the norm over data-parallel ranks, where it is the same.
        pipelines = engine.grid.data_parallel_size
        scaled = total.pow(1.0 / 2.0) * 1.0 / float(pipelines)
        norm = scaled.clone()
        for _ in range(pipelines - 1):
            norm += scaled
        limit = torch.tensor([self.limit])
        return torch.min(torch.tensor([1.0]), limit / (norm + 1e-6)).item()
