"""The place of an optimizer's masters (fp32 copies of 16-bit parameters) in Megatron, and their rounding to parameters.

Here the optimizer steps the masters. Stock does so too, except with `--use-precision-aware-optimizer`: then Transformer
Engine's Adam steps the model's own parameters, and keeps masters in its state, or only the 16 bits of each that its
parameter lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

MASTER = "master_param"
"""Transformer Engine's name for a master in its state."""
_SETTINGS = ("master_weights", "use_decoupled_grad", "store_param_remainders", "_scales")


class Masters:
    """Masters of most optimizers.

    Attributes:
        state_bytes: of an element's moments; None: 4 for each.
    """

    state_bytes: int | None = None

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def taken(self, held: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """The master of stock's stepped tensor; removed from ``state``."""
        return held.detach()

    def shown(self, part: torch.Tensor, master: torch.Tensor, state: Mapping[str, Any] | None
              ) -> tuple[torch.Tensor, Mapping[str, Any] | None]:
        """Stock's stepped tensor, and its state, for a ``part`` of a parameter with this master; None: no state yet."""
        return master, state

    def show(self, view: Any) -> None:
        """Restore stock's settings in ``view``, a copy of the optimizer."""

    def zeros(self, key: str, master: torch.Tensor) -> torch.Tensor:
        """A moment before the first step."""
        return torch.zeros_like(master.data)

    def set(self, master: torch.Tensor, part: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a checkpoint's tensors, by stock's names, for a part of a parameter."""
        master.data.copy_(tensors["param"])
        for key, own in self._inner.state[master].items():
            if key in tensors:
                own.data.copy_(tensors[key])

    def rounded(self, values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """``values`` of masters, rounded as for parameters of ``kind`` after a step."""
        return values


class PrecisionAware(Masters):
    """Masters of Transformer Engine's Adam, with moments of 32 bits or bf16."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._as_stock = {name: getattr(inner, name) for name in _SETTINGS}
        self._remainders = inner.store_param_remainders
        self.state_bytes = sum(inner.name_to_dtype_map[key].itemsize for key in ("exp_avg", "exp_avg_sq"))
        inner.master_weights = inner.use_decoupled_grad = inner.store_param_remainders = False
        # It looks up a scale for each moment without 32 bits; those of bf16 are unused.
        inner._scales = defaultdict(lambda: defaultdict(lambda: torch.ones(1)))

    def taken(self, held: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        inside = state.pop(MASTER, None)
        if inside is None or held.dtype == torch.float32:
            return held.detach().float()
        return whole(held.detach(), inside) if inside.dtype == torch.int16 else inside

    def shown(self, part: torch.Tensor, master: torch.Tensor, state: Mapping[str, Any] | None
              ) -> tuple[torch.Tensor, Mapping[str, Any] | None]:
        if not self._as_stock["master_weights"]:
            return super().shown(part, master, state)
        lower_half = self._remainders and part.dtype == torch.bfloat16
        return part, state and {**state, MASTER: remainder(master.data) if lower_half else master.data}

    def show(self, view: Any) -> None:
        vars(view).update(self._as_stock)

    def zeros(self, key: str, master: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(master.data, dtype=self._inner.name_to_dtype_map[key])

    def set(self, master: torch.Tensor, part: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        value = tensors["param"]
        whole_value = whole(part, value) if value.dtype == torch.int16 else value
        super().set(master, part, {**tensors, "param": whole_value})

    def rounded(self, values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        return upper(values) if self._remainders and kind == torch.bfloat16 else values


def masters_of(inner: Any) -> Masters:
    """Take over the masters of ``inner``, a Megatron optimizer's own one, which then keeps none inside."""
    return PrecisionAware(inner) if hasattr(inner, "name_to_dtype_map") else Masters(inner)


# Transformer Engine cuts the 32 bits of a master in two: bf16 gets the upper half, plus one if the lower half begins
# with a 1. torch rounds a tie to even, so its bf16 and the lower half would not always restore the master.

def upper(master: torch.Tensor) -> torch.Tensor:
    """The bf16 part of a master."""
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def remainder(master: torch.Tensor) -> torch.Tensor:
    """The lower half of a master, as int16."""
    return (master.contiguous().view(torch.int32) << 16 >> 16).to(torch.int16)


def whole(values: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The master with this `upper` and `remainder`."""
    low = rest.to(torch.int32)
    high = values.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)
