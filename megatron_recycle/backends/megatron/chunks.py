"""The models of a worker: one, or with virtual pipelines one for each chunk of its stage.

Megatron deals the chunks of a virtual pipeline out in turn: the first of each stage, then the second of each stage, and
so on (interleaving). Each has a wrapper for data parallelism and a buffer of gradients of its own; one optimizer steps
them all. The plan says in which order they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state
from torch import nn


def placement(stages: int, chunks: int) -> tuple[int, ...]:
    """The stage of each chunk of the model, as `Place`'s, where each of ``stages`` has so many ``chunks``."""
    return () if chunks == 1 else tuple(range(stages)) * chunks


class Chunks:
    """Those of one worker; outside of `running` the first is the one that runs.

    Args:
        models: in Megatron's DistributedDataParallel, in the order of the model's layers.

    Attributes:
        models: the same.
        module: all of them as one module, which is the model itself where there is one.
        parameters: those that Megatron has made places for gradients for, chunk by chunk, and of each chunk as its
            buffer is laid out, which decides gloo's order of sums.
        now: number of the one that runs.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self.models = tuple(models)
        self.module: nn.Module = self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)
        self.parameters: Sequence[nn.Parameter] = [
            parameter for model in self.models for parameter in reversed(list(model.module.parameters()))
            if hasattr(parameter, "main_grad")]
        self.now = 0

    @property
    def model(self) -> Any:
        """The one that runs."""
        return self.models[self.now]

    @property
    def vp_stage(self) -> int | None:
        """Megatron's number of the one that runs; None where there are no virtual pipelines."""
        return self.now if len(self.models) > 1 else None

    @property
    def computes_loss(self) -> bool:
        """Whether the one that runs is the last of the whole model."""
        return self.now == len(self.models) - 1 and parallel_state.is_pipeline_last_stage()

    @contextmanager
    def running(self, chunk: int) -> Iterator[None]:
        """Inside the block ``chunk`` runs."""
        before, self.now = self.now, chunk
        try:
            yield
        finally:
            self.now = before
