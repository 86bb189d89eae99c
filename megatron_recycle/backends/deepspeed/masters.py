"""16-bit training with fp32 master weights that are whole on every worker.

Stock's `BF16_Optimizer` cuts masters and moments over the data-parallel ranks, so that a dead worker's part is lost.
Stock's fp16 optimizers ask other ranks for overflow and norm, which come from the verdict here. This one does neither.
Its state dict has the form of stock's `FP16_UnfusedOptimizer`.

Loss scaling follows stock's rule for torch optimizers (`FP16_UnfusedOptimizer._update_scale`, which ignores
`hysteresis`), except where DeepSpeed 0.19.8 contradicts itself: it scales the loss only under ZeRO, and divides
gradients by the scale that holds after the step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig
from torch import nn

INNER, MASTERS = "optimizer_state_dict", "fp32_groups"
"""Keys of its state dict."""
_SCALING = ("cur_scale", "cur_iter", "last_overflow_iter")
"""State of the loss scaling that an update changes."""


class WrappingOptimizer(DeepSpeedOptimizer):
    """An engine's optimizer around a torch one.

    Attributes:
        overflow: whether the next `step` only notes an overflow; stock's name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.overflow = False

    @property
    def state(self) -> MutableMapping[Any, Any]:
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def loss_scale(self) -> float:
        """The factor of a micro-batch's loss before its backward."""
        raise NotImplementedError

    @property
    def cur_scale(self) -> float:
        """`loss_scale` by another of stock's names."""
        return self.loss_scale


class MasterWeightOptimizer(WrappingOptimizer):
    """A torch optimizer over fp32 copies of a model's 16-bit parameters.

    Args:
        optimizer: over the model's parameters; its groups are pointed to the copies.
        loss_scale_config: stock's numbers; without ``use_grad_scaling`` there is no scaling.

    Attributes:
        masters: the copy of each parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loss_scale_config: LossScaleConfig) -> None:
        super().__init__(optimizer)
        self.loss_scale_config = loss_scale_config
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        for group in optimizer.param_groups:
            own = {parameter: nn.Parameter(parameter.detach().float()) for parameter in group["params"]}
            self.masters.update(own)
            group["params"] = list(own.values())

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, and overflows skipped."""
        return bool(self.loss_scale_config.use_grad_scaling)

    @property
    def loss_scale(self) -> float:
        """The factor of a micro-batch's loss before its backward."""
        return float(self.loss_scale_config.cur_scale)

    def step(self, closure: None = None) -> None:
        """One update of masters and model with the masters' gradients, which are unscaled already; after an overflow
        only the scale changes."""
        if self.scales:
            _update(self.loss_scale_config, self.overflow)
        if self.overflow:
            return
        self.optimizer.step()
        self._copy_to_model()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the masters' gradients, and the model's."""
        for parameter, master in self.masters.items():
            parameter.grad = master.grad = None

    def counters(self) -> dict[str, Any]:
        """State that `step` changes besides tensors and the inner optimizer."""
        return {name: getattr(self.loss_scale_config, name) for name in _SCALING}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore the result of `counters`."""
        for name in _SCALING:
            setattr(self.loss_scale_config, name, counters[name])

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        inner = self.optimizer.state_dict()  # first: its hook waits until the last step is final
        config = self.loss_scale_config
        return {"dynamic_loss_scale": config.dynamic_loss_scale, **self.counters(),
                "scale_factor": config.scale_factor, "scale_window": config.scale_window,
                INNER: inner, MASTERS: [group["params"] for group in self.param_groups]}

    def load_state_dict(self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """Load a state dict of this class: masters always, moments if wanted."""
        config = self.loss_scale_config
        config.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.set_counters({name: state_dict.get(name) for name in _SCALING})
        if config.dynamic_loss_scale:
            config.scale_factor, config.scale_window = state_dict["scale_factor"], state_dict["scale_window"]
        if load_optimizer_states:
            # Copied: the inner optimizer would keep references to the lists.
            self.optimizer.load_state_dict(copy.deepcopy(state_dict[INNER]))
        with torch.no_grad():
            for group, saved in zip(self.param_groups, state_dict[MASTERS], strict=True):
                for master, value in zip(group["params"], saved, strict=True):
                    master.copy_(value)
        self._copy_to_model()

    def refresh_fp32_params(self) -> None:
        """Set the masters from the model's parameters, where only those were loaded."""
        for parameter, master in self.masters.items():
            master.data.copy_(parameter.data)

    def _copy_to_model(self) -> None:
        for parameter, master in self.masters.items():
            parameter.data.copy_(master.data)


def _update(config: LossScaleConfig, overflow: bool) -> None:
    """Stock's rule for the loss scale."""
    if config.dynamic_loss_scale:
        if overflow:
            config.cur_scale = max(config.cur_scale / config.scale_factor, config.min_loss_scale)
            config.last_overflow_iter = config.cur_iter
        else:
            stable = config.cur_iter - config.last_overflow_iter - 1
            if stable > 0 and stable % config.scale_window == 0:
                config.cur_scale *= config.scale_factor
    config.cur_iter += 1
