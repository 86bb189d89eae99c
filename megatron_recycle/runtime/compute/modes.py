"""How the script trains: with gradients, which parameters, and with which modules in training mode.

A failure may undo a step that `train()` has returned from, and the script may have turned to evaluation since (dropout
off, no gradients), or have frozen parameters, when the iteration is run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class _Mode:
    modules: list[nn.Module]
    training: list[bool]
    parameters: list[nn.Parameter]
    trained: list[bool]

    @classmethod
    def of(cls, model: nn.Module) -> _Mode:
        # The class's own methods: a backend may watch those of the model.
        modules = list(nn.Module.modules(model))
        parameters = [parameter for _, parameter in nn.Module.named_parameters(model)]
        return cls(modules, [module.training for module in modules],
                   parameters, [parameter.requires_grad for parameter in parameters])

    def same(self, other: _Mode) -> bool:
        return (self.training == other.training and self.trained == other.trained
                and list(map(id, self.modules)) == list(map(id, other.modules))
                and list(map(id, self.parameters)) == list(map(id, other.parameters)))

    def use(self) -> None:
        for module, training in zip(self.modules, self.training):
            module.training = training
        for parameter, trained in zip(self.parameters, self.trained):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


class Modes:
    """The modes of one stage's modules and parameters.

    Args:
        model: the stage.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._training = self._next = _Mode.of(model)

    def look(self) -> bool:
        """An iteration is about to be trained: whether they are otherwise now than in the last one."""
        self._next = _Mode.of(self._model)
        return not self._training.same(self._next)

    def gone(self) -> bool:
        """Whether there are parameters, of those in the last iteration, that `look` has not found any more."""
        return not set(map(id, self._training.parameters)) <= set(map(id, self._next.parameters))

    def remember(self) -> None:
        """It is trained as `look` has found them."""
        self._training = self._next

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Inside the block everything is as it was when an iteration was last trained."""
        before = _Mode.of(self._model)
        self._training.use()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            before.use()
