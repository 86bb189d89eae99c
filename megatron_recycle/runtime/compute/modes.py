"""Modes of the script's training: with gradients, which parameters, and with which modules in training mode.

A failure may undo a step that `train()` has returned from. By the time that iteration is run again, the script may have
switched to evaluation (dropout off, no gradients), or frozen parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from megatron_recycle.runtime.compute.module_tree import ModuleTree, Parts


@dataclass(frozen=True)
class _Mode:
    parts: Parts
    training: list[bool]
    trained: list[bool]

    @classmethod
    def of(cls, parts: Parts) -> _Mode:
        return cls(parts, [module.training for module in parts.modules],
                   [parameter.requires_grad for parameter in parts.parameters.values()])

    def same(self, other: _Mode) -> bool:
        return self.training == other.training and self.trained == other.trained and (
            self.parts is other.parts or self.identities() == other.identities())

    def identities(self) -> tuple[list[int], list[int]]:
        """Identities of the modules and of the parameters."""
        return list(map(id, self.parts.modules)), list(map(id, self.parts.parameters.values()))

    def use(self) -> None:
        for module, training in zip(self.parts.modules, self.training):
            module.training = training
        for parameter, trained in zip(self.parts.parameters.values(), self.trained):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


class Modes:
    """The modes of one stage's modules and parameters.

    Args:
        model: the stage.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tree = ModuleTree(model)
        self._training = self._next = _Mode.of(self._tree.parts)

    def look(self) -> bool:
        """An iteration is about to be trained: whether its modes differ from the last one's."""
        self._next = _Mode.of(self._tree.parts)
        return not self._training.same(self._next)

    def gone(self) -> bool:
        """Whether parameters of the last iteration are missing in the modes found by `look`."""
        return not set(self._training.identities()[1]) <= set(self._next.identities()[1])

    def remember(self) -> None:
        """The iteration is trained with the modes found by `look`."""
        self._training = self._next

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Inside the block all modes are as in the last trained iteration."""
        before = _Mode.of(self._tree.parts)
        self._training.use()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            before.use()
