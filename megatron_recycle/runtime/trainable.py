"""The trained parameters of a stage, and the layout of their gradients in one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_recycle.runtime.comm.trained_alike import Trained
from megatron_recycle.runtime.compute.accumulate import Layout
from megatron_recycle.runtime.copies import Guard
from megatron_recycle.runtime.lent.neighbourhood import Neighbourhood
from megatron_recycle.runtime.stage import Stage


class Trainable:
    """The trained parameters of ``stage``; they change once the script has frozen some, or a peer's have come.

    Attributes:
        layout: of the flat gradient.
        trained: which parameters these are, to be compared with the peers'.
        initial_state: the tensors and counters that this worker came in with, until it trains.
        shards: the shards of the optimizer's state that it came in with, likewise.
        gathered: with an optimizer cut into shards, the iteration whose step is in all parameters; None: it may not be
            in some.
        neighbours: copies of other stages' layers.
        guard: copies of the stage's state, and of others', that training can go back to.
    """

    def __init__(self, stage: Stage, neighbours: Neighbourhood) -> None:
        self._stage = stage
        self.neighbours = neighbours
        self.guard = Guard()
        self.initial_state: tuple[Mapping[str, torch.Tensor], Any] | None = None
        self.shards: Mapping[int, tuple[Mapping[str, torch.Tensor], Sequence[Mapping[str, Any]]]] = {}
        self.gathered: int | None = None
        self.lay_out()

    def lay_out(self) -> None:
        """Lay out the gradients again: the stage's parameters may have changed."""
        self.layout = Layout(self._stage.parameters, self._stage.gradient_dtype)
        self.trained = Trained.of(self._stage.module, self.layout)

    def drop_gradients(self) -> None:
        """Drop the gradients that an attempt has left on the parameters."""
        for parameter in (*self.layout.parameters, *self.neighbours.parameters):
            parameter.grad = None
