"""Which parameters of a stage are trained, and how their gradients lie in one flat buffer."""

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
    """The trained parameters of ``stage``; others once the script has frozen some, or a peer's have come.

    Attributes:
        layout: of the flat gradient.
        trained: which parameters that are, to be compared with the peers'.
        initial_state: the tensors and counters that this worker came in with, until it trains.
        shards: those of the optimizer's state that it came in with, likewise.
        gathered: where the optimizer is cut into shards, the iteration whose step all parameters are of; None: some may
            not be.
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
        """The stage's parameters may be others now."""
        self.layout = Layout(self._stage.parameters, self._stage.gradient_dtype)
        self.trained = Trained.of(self._stage.module, self.layout)

    def drop_gradients(self) -> None:
        """Drop the gradients that an attempt has left on the parameters."""
        for parameter in (*self.layout.parameters, *self.neighbours.parameters):
            parameter.grad = None
