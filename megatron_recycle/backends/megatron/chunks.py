"""The models of a worker: one, or with virtual pipelines one for each chunk of its stage.

Megatron deals the chunks of a virtual pipeline out in turn: the first of each stage, then the second of each stage, and
so on (interleaving). Each has a wrapper for data parallelism and a buffer of gradients of its own; one optimizer steps
them all. The plan says in which order they run. With `chunks: 2` the second ones go up the stages again (see `vshape`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron_recycle.backends.megatron.vshape import mirrored
from megatron_recycle.backends.patching import replaced


def placement(stages: int, chunks: int, v_shaped: bool) -> tuple[int, ...]:
    """The stage of each chunk of the model, as `Place`'s, where each of ``stages`` has so many ``chunks``."""
    if v_shaped:
        return (*range(stages), *reversed(range(stages)))
    return () if chunks == 1 else tuple(range(stages)) * chunks


class Chunks:
    """Those of one worker; outside of `running` the first is the one that runs.

    Args:
        models: in Megatron's DistributedDataParallel, in the order of the model's layers.
        v_shaped: whether they are two of a V.

    Attributes:
        models: the same.
        modules: with all parameters that each computes with: in a V the last one may have the first one's embedding.
        module: all of them as one module, which is the model itself where there is one.
        parameters: those that Megatron has made places for gradients for, chunk by chunk, and of each chunk as its
            buffer is laid out, which decides gloo's order of sums.
        now: number of the one that runs.
    """

    def __init__(self, models: Sequence[Any], v_shaped: bool) -> None:
        self.models = tuple(models)
        self._mirrored = v_shaped
        self.modules: Sequence[nn.Module] = self.models
        if v_shaped and self.tied_within:
            self.modules = (models[0], nn.ModuleList([models[1], _part(models[0]).embedding.word_embeddings]))
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

    @property
    def tied_within(self) -> bool:
        """Whether embedding and output layer are one tensor here, which takes no message between stages."""
        first, last = _part(self.models[0]), _part(self.models[-1])
        return first.pre_process and last.post_process and last.share_embeddings_and_output_weights

    @contextmanager
    def running(self, chunk: int) -> Iterator[None]:
        """Inside the block ``chunk`` runs."""
        with replaced(self, now=chunk), mirrored() if self._mirrored and chunk else nullcontext():
            yield


def _part(model: Any) -> Any:
    return get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
