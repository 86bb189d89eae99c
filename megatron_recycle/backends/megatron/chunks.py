"""The models of a worker: one, or with virtual pipelines one for each chunk of its stage.

Megatron deals the chunks of a virtual pipeline out in turn: the first of each stage, then the second of each stage, and
so on (interleaving). Each has its own data-parallel wrapper and gradient buffer; one optimizer steps them all. The plan
orders their runs. With `chunks: 2` the second ones go up the stages again (see `vshape`).
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
    """The stage of each chunk of the model, as in `Place`, with ``chunks`` for each of ``stages``."""
    if v_shaped:
        return (*range(stages), *reversed(range(stages)))
    return () if chunks == 1 else tuple(range(stages)) * chunks


class Chunks:
    """The chunks of one worker; outside of `running` the first is current.

    Args:
        models: in Megatron's DistributedDataParallel, in the order of the model's layers.
        v_shaped: whether they are two of a V.

    Attributes:
        models: the same.
        modules: each with all parameters that it computes with: in a V the last one may have the first one's embedding.
        module: all of them as one module; a single model itself.
        parameters: with places for gradients in Megatron, by chunk, and within each in the order of its buffer, which
            decides gloo's order of sums.
        now: number of the current chunk.
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
        """The current chunk's model."""
        return self.models[self.now]

    @property
    def vp_stage(self) -> int | None:
        """Megatron's number of the current chunk; None without virtual pipelines."""
        return self.now if len(self.models) > 1 else None

    @property
    def computes_loss(self) -> bool:
        """Whether the current chunk is the last of the whole model."""
        return self.now == len(self.models) - 1 and parallel_state.is_pipeline_last_stage()

    @property
    def tied_within(self) -> bool:
        """Whether embedding and output layer are one tensor here, so that no message between stages is needed."""
        first, last = _part(self.models[0]), _part(self.models[-1])
        return first.pre_process and last.post_process and last.share_embeddings_and_output_weights

    @contextmanager
    def running(self, chunk: int) -> Iterator[None]:
        """Inside the block ``chunk`` is current."""
        with replaced(self, now=chunk), mirrored() if self._mirrored and chunk else nullcontext():
            yield


def _part(model: Any) -> Any:
    return get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
