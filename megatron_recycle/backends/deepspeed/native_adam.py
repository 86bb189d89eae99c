"""DeepSpeed's compiled Adam on CPUs, whose bias correction depends on the life of its process.

It keeps the powers of its betas in native code: it multiplies them from step to step, in 32 bits, and recomputes them
where steps are not consecutive. A joiner would recompute them, and differ from its peers in the last bit. So every
worker records how its own powers were made, sends that with its counters, and has them remade in the same way where a
peer's were made otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class Chain(NamedTuple):
    """The origin of powers: computed at the step ``begun``, then multiplied with their betas up to ``step``."""

    begun: int
    beta1: float
    beta2: float
    step: int


_Update = Callable[[int, float, float], None]
"""(step, beta1, beta2): make the native code step a dummy number."""


class NativeAdam:
    """Watches the native steps of ``optimizer``; does nothing for an optimizer without any.

    Attributes:
        chain: of its powers; None: there are none.
    """

    def __init__(self, optimizer: Any) -> None:
        self.chain: Chain | None = None
        self._update: _Update | None = None
        if not all(parameter.device.type == "cpu" for group in optimizer.param_groups for parameter in group["params"]):
            return  # a GPU's kernel gets the step as an argument, and keeps nothing
        if callable(getattr(optimizer, "multi_tensor_adam", None)):
            self._watch_fused(optimizer)
        elif hasattr(getattr(optimizer, "ds_opt_adam", None), "adam_update"):
            self._watch_plain(optimizer)

    def counters(self) -> list[float] | None:
        """For `set_counters`, here or on another worker."""
        return None if self.chain is None else list(self.chain)

    def set_counters(self, counters: Sequence[float] | None) -> None:
        """Restore the state of these `counters`. Takes a native step for each step since their beginning, unless the
        powers are already the same."""
        if counters is None or self._update is None:
            return
        begun, beta1, beta2, step = counters
        wanted, own = Chain(int(begun), beta1, beta2, int(step)), self.chain
        # After an undone step, the same step finds its powers made.
        if own is not None and own[:3] == wanted[:3] and own.step - wanted.step in (0, 1):
            return
        self.begin_anew()
        for number in range(wanted.begun, wanted.step + 1):
            self._update(number, beta1, beta2)
        self.chain = wanted

    def begin_anew(self) -> None:
        """Make the next step recompute its powers, as in a new process."""
        if self._update is not None and self.chain is not None:
            self._update(1, 0.0, 0.0)  # betas that no job uses
            self.chain = None

    def _note(self, step: int, beta1: float, beta2: float) -> None:
        own = self.chain
        if own is not None and own[1:3] == (beta1, beta2) and step - own.step in (0, 1):
            self.chain = own._replace(step=step)
        else:
            self.chain = Chain(step, beta1, beta2, step)

    def _watch_fused(self, optimizer: Any) -> None:
        native = optimizer.multi_tensor_adam

        @functools.wraps(native)
        def multi_tensor_adam(chunk: Any, skip: Any, tensors: Any, rate: float, beta1: float, beta2: float,
                              epsilon: float, step: int, *rest: Any) -> Any:
            self._note(step, beta1, beta2)
            return native(chunk, skip, tensors, rate, beta1, beta2, epsilon, step, *rest)

        def update(step: int, beta1: float, beta2: float) -> None:
            native(1, torch.zeros(1, dtype=torch.int), [[each] for each in torch.zeros(4, 1)], 0.0, beta1, beta2, 1.0,
                   step, optimizer.adam_w_mode, 1, 0.0)

        optimizer.multi_tensor_adam, self._update = multi_tensor_adam, update

    def _watch_plain(self, optimizer: Any) -> None:
        native = optimizer.ds_opt_adam

        @functools.wraps(native.adam_update)
        def adam_update(number: int, step: int, rate: float, beta1: float, beta2: float, *rest: Any) -> Any:
            self._note(step, beta1, beta2)
            return native.adam_update(number, step, rate, beta1, beta2, *rest)

        def update(step: int, beta1: float, beta2: float) -> None:
            native.adam_update(optimizer.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *torch.zeros(4, 1))

        names = [name for name in dir(native) if not name.startswith("_")]
        optimizer.ds_opt_adam = SimpleNamespace(
            **{**{name: getattr(native, name) for name in names}, "adam_update": adam_update})
        self._update = update
