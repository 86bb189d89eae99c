"""Stages that hold several chunks of the model (V-shaped: the first half of the layers down the stages, the second half
up again)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

from torch import nn

from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.policy import POLICIES
from megatron_recycle.runtime.lent.layers import Lending
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.stage import Stage


class Chunked(Protocol):
    """What a stage with several chunks has besides.

    Attributes:
        chunks: its modules, in the order of the model's layers; `Stage.parameters` are those of one chunk behind those
            of the other. A parameter that several have (tied embeddings) is among those of the first.
        lendings: their layers, as `Stage.lending`, which is not looked at; (): none may be lent.
    """

    @property
    def chunks(self) -> Sequence[nn.Module]: ...

    @property
    def lendings(self) -> Sequence[Lending]: ...

    def running_chunk(self, chunk: int) -> AbstractContextManager[None]:
        """Inside the block forwards and backwards are those of this chunk, counted within the stage."""


def chunks_of(stage: Stage) -> Sequence[nn.Module]:
    """The chunks of ``stage``, which has several."""
    return cast(Chunked, stage).chunks


def running_chunk(stage: Stage, place: Place, chunk: int) -> AbstractContextManager[None]:
    """A block in which ``stage``, at ``place``, runs this chunk, counted within it."""
    return cast(Chunked, stage).running_chunk(chunk) if place.placement else nullcontext()


def lendings_of(stage: Stage, place: Place) -> Mapping[int, Lending | None]:
    """The layers of each chunk of ``stage``, at ``place``, for neighbours that may run some, by its number in the
    model."""
    if not place.placement:
        return {place.me.stage: stage.lending}
    own = cast(Chunked, stage).lendings
    return dict(zip(place.chunks, own, strict=True)) if own else dict.fromkeys(place.chunks)


def check_chunks(stage: Stage, place: Place, config: RecycleConfig) -> None:
    """Refuse what stages with several chunks cannot have yet. Raises UnsupportedError."""
    if not place.placement:
        if config.chunks > 1:
            raise UnsupportedError(f"chunks {config.chunks}, and this framework's stages have one each: leave it out, "
                                   "DeepSpeed's PipelineModule and Megatron's GPTModel are cut into V-shaped stages")
        return
    found = [what for what, there in {
        "moves of workers to other stages": config.moves,
        f"policy {config.policy}": not POLICIES[config.policy].reroutes}.items() if there]
    if found:
        raise UnsupportedError(f"stages with several chunks cannot have {' or '.join(found)} yet: leave that out, or "
                               "give each stage one chunk (Megatron: no virtual pipelines)")
