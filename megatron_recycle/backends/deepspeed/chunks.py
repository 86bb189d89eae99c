"""Which layers of a pipeline model are whose, where each stage has two chunks of them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import PipelineModule

from megatron_recycle.backends.patching import replaced
from megatron_recycle.errors import UnsupportedError


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


class ChunkedModule(PipelineModule):
    """A `PipelineModule` whose stage has several chunks: a base of the script's own class, see `become_chunked`."""

    recycle_chunks: Chunks
    _local_start: int

    def stage_owner(self, layer_idx: int) -> int:
        return self.recycle_chunks.stage_of(layer_idx)

    def forward(self, forward_input: Any) -> Any:
        """Raises UnsupportedError unless one chunk is chosen: between two chunks are other stages."""
        if len(self.forward_funcs) == len(self.recycle_chunks.layers(self.stage_id)):
            raise UnsupportedError("a stage with two chunks cannot be called as a whole: the layers between them are "
                                   "on other stages. Use engine.train_batch() and engine.eval_batch()")
        return super().forward(forward_input)

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        with self._counting(local_layer_idx):
            path: str = super().ckpt_layer_path(ckpt_dir, local_layer_idx)
        return path

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        with self._counting(local_layer_idx):
            paths: list[str] = super().ckpt_layer_path_list(ckpt_dir, local_layer_idx)
        return paths

    def _counting(self, place: int) -> AbstractContextManager[None]:
        """Inside the block the stage's layer at ``place`` has its own number for stock."""
        return replaced(self, _local_start=self.recycle_chunks.layers(self.stage_id)[place] - place)


def become_chunked(module: PipelineModule, chunks: Chunks) -> None:
    """Let ``module``, whose layers are those of its stage's ``chunks`` one behind the other, answer as such; it stays
    of the class that the script has given it, and keeps its name, by which DeepSpeed knows some."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (ChunkedModule, kind), {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__})
    module.recycle_chunks = chunks


def chunks_of(module: PipelineModule) -> Chunks | None:
    """How ``module``'s layers are cut; None: one chunk per stage, as DeepSpeed does."""
    found: Chunks | None = getattr(module, "recycle_chunks", None)
    return found
