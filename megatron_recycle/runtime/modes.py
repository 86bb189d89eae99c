"""How the script trains: with gradients, and with which modules in training mode.

A failure may undo a step that `train()` has returned from, and the script may have turned to evaluation since (dropout
off, no gradients) when the iteration is run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Modes:
    """The modes of one stage's modules.

    Args:
        model: the stage.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._training = self._now()

    def remember(self) -> None:
        """An iteration is trained: as the modules are now."""
        self._training = self._now()

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Inside the block everything is as it was when an iteration was last trained."""
        before = self._now()
        _set(self._training)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            _set(before)

    def _now(self) -> list[tuple[nn.Module, bool]]:
        return [(module, module.training) for module in self._model.modules()]


def _set(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
