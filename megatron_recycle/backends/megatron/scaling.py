"""The loss scale of Megatron's optimizer: fp16's dynamic one (`--initial-loss-scale` and its like), or a constant one
(`--loss-scale`, also with bf16).

Stock asks all stages whether a gradient has overflowed, and leaves the step out on all of them if one has. Here each
stage reports it with its share of the gradient norm, and the verdict distributes it. The scaler stays stock's own
object, with stock's rule. Its changes are among the stage's counters, so that undoing a step restores them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

OVERFLOW = math.inf
"""Stands for the square of a norm: a gradient is not finite."""
_TRACKERS = ("_growth_tracker", "_hysteresis_tracker")


class Scaling:
    """Scale and overflows of one stage's ``optimizer``.

    Attributes:
        scales: whether losses are scaled, and steps with overflowed gradients left out.
        skipped: iterations of this job whose step was left out.
        overflowed: whether the next step is to be left out.
    """

    def __init__(self, optimizer: Any) -> None:
        self._scaler: Any = getattr(optimizer, "grad_scaler", None)
        self.scales = self._scaler is not None
        self.skipped: Collection[int] = frozenset()
        self.overflowed = False
        if self.scales:
            optimizer._unscale_main_grads_and_check_for_nan = lambda: self._unscale(optimizer)

    @property
    def factor(self) -> float:
        """The factor that undoes the scale; 1 without one."""
        return 1.0 if self._scaler is None else float(self._scaler.inv_scale)

    def unscaled(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Unscaled fp32 copies of ``gradients``, as by stock's kernel; ``gradients`` itself without a scale."""
        return [gradient * self.factor for gradient in gradients] if self.scales else list(gradients)

    def share(self, norm_square: float, gradients: Sequence[torch.Tensor]) -> float:
        """A stage's report on its ``gradients``: the square of their norm, or that one is not finite. A norm too large
        for fp32 is no overflow of a gradient: it clips by 0, as in stock."""
        if not self.scales or math.isfinite(norm_square):
            return norm_square
        return sys.float_info.max if all(bool(one.isfinite().all()) for one in gradients) else OVERFLOW

    def any_overflow(self, norm_squares: Sequence[float]) -> bool:
        """Whether a stage has reported an overflow."""
        return self.scales and OVERFLOW in norm_squares

    def leave_out(self, iteration: int) -> None:
        """Leave out the step of ``iteration``, as stock would."""
        self._scaler.update(True)
        self.skip(iteration)

    def stepped(self) -> None:
        """Note a step of shards, which stock's optimizer does not see."""
        if self._scaler is not None:
            self._scaler.update(False)

    def skip(self, iteration: int) -> None:
        """Note that the step of ``iteration`` was left out."""
        self.skipped = frozenset((*self.skipped, iteration))

    def go_back(self, steps: int) -> None:
        """Forget iterations from ``steps`` on, which are undone and made again."""
        self.skipped = frozenset(one for one in self.skipped if one < steps)

    def counters(self) -> dict[str, Any]:
        """All state that a step changes."""
        if self._scaler is None:
            return {}
        return {"scale": float(self._scaler.scale), "skipped": sorted(self.skipped),
                **{name: getattr(self._scaler, name) for name in _TRACKERS if hasattr(self._scaler, name)}}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore the result of `counters`."""
        if self._scaler is None:
            return
        self._scaler._scale = torch.full_like(self._scaler.scale, counters["scale"])
        self.skipped = frozenset(counters["skipped"])
        for name in (name for name in _TRACKERS if name in counters):
            setattr(self._scaler, name, counters[name])

    def _unscale(self, optimizer: Any) -> bool:
        """Stock's function without its all-reduce: the verdict knows of overflows."""
        torch._amp_foreach_non_finite_check_and_unscale_(
            optimizer._collect_main_grad_data_for_unscaling(), optimizer.found_inf.zero_(), self._scaler.inv_scale)
        return self.overflowed
