"""Which layers of a pipeline model are whose, where each stage has two chunks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import PipelineModule

_KEPT = "recycle_chunks"


@dataclass(frozen=True)
class Chunks:
    """A model's list of layers, cut into chunks."""

    parts: tuple[int, ...]
    """Bounds of the chunks in the list: chunk c has the layers parts[c] to parts[c + 1] - 1."""
    placement: tuple[int, ...]
    """The stage of each chunk."""
    stock: tuple[int, ...]
    """Bounds of the stages, as DeepSpeed has cut the list for one chunk per stage."""

    def ranges(self, stage: int) -> tuple[range, ...]:
        """The layers of each chunk of ``stage``, in the model's order."""
        return tuple(range(*self.parts[chunk:chunk + 2])
                     for chunk, owner in enumerate(self.placement) if owner == stage)

    def layers(self, stage: int) -> tuple[int, ...]:
        """Those of all chunks of ``stage``, one behind the other."""
        return tuple(layer for one in self.ranges(stage) for layer in one)

    def stage_of(self, layer: int) -> int:
        """The stage that holds ``layer``."""
        return next(stage for chunk, stage in enumerate(self.placement) if layer < self.parts[chunk + 1])

    def stock_stage_of(self, layer: int) -> int:
        """The stage that DeepSpeed had built ``layer`` on."""
        return next(stage for stage, end in enumerate(self.stock[1:]) if layer < end)


def v_placement(stages: int) -> tuple[int, ...]:
    """First down through the stages, then up again."""
    return (*range(stages), *reversed(range(stages)))


def chunks_of(module: PipelineModule) -> Chunks | None:
    """How ``module``'s layers are cut; None: one chunk per stage, as DeepSpeed does."""
    found: Chunks | None = getattr(module, _KEPT, None)
    return found


def cut(stock: Sequence[int], parts: Sequence[int]) -> Chunks:
    """A V of ``parts`` on the stages of ``stock``."""
    return Chunks(tuple(parts), v_placement(len(stock) - 1), tuple(stock))


def lay_out(module: PipelineModule, optimizer: Any, model_parameters: Any) -> tuple[Any, Any]:
    """Lay the layers of ``module``, which DeepSpeed has built for one chunk per stage, into a V of two; called by all
    ranks before the engine is built. Weights and buffers have the same bits as before.

    ``optimizer`` and ``model_parameters``, as `deepspeed.initialize` gets them, follow the layers: returned for the
    engine. Raises UnsupportedError, on all ranks alike, for what cannot be moved.
    """
    raise NotImplementedError
