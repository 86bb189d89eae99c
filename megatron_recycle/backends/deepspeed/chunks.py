"""The assignment of a pipeline model's layers to stages with two chunks each."""

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
    """Bounds of the stages in DeepSpeed's cut of the list, with one chunk per stage."""

    def ranges(self, stage: int) -> tuple[range, ...]:
        """The layers of each chunk of ``stage``, in the model's order."""
        return tuple(range(*self.parts[chunk:chunk + 2])
                     for chunk, owner in enumerate(self.placement) if owner == stage)

    def layers(self, stage: int) -> tuple[int, ...]:
        """The layers of all chunks of ``stage``, one chunk after the other."""
        return tuple(layer for one in self.ranges(stage) for layer in one)

    def stage_of(self, layer: int) -> int:
        """The stage that holds ``layer``."""
        return next(stage for chunk, stage in enumerate(self.placement) if layer < self.parts[chunk + 1])

    def stock_stage_of(self, layer: int) -> int:
        """The stage that DeepSpeed built ``layer`` on."""
        return next(stage for stage, end in enumerate(self.stock[1:]) if layer < end)


def v_placement(stages: int) -> tuple[int, ...]:
    """Down through the stages, then up again."""
    return (*range(stages), *reversed(range(stages)))


class ChunkedModule(PipelineModule):
    """A `PipelineModule` whose stage has several chunks: a base of the script's own class, see `become_chunked`."""

    recycle_chunks: Chunks
    _local_start: int

    def stage_owner(self, layer_idx: int) -> int:
        return self.recycle_chunks.stage_of(layer_idx)

    def forward(self, forward_input: Any) -> Any:
        """Raises UnsupportedError unless one chunk is chosen: other stages lie between two chunks."""
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
        """Inside the block stock sees the number in the model of the stage's layer at ``place``."""
        return replaced(self, _local_start=self.recycle_chunks.layers(self.stage_id)[place] - place)


def become_chunked(module: PipelineModule, chunks: Chunks) -> None:
    """Turn ``module``, which has the layers of its stage's ``chunks`` one after the other, into a `ChunkedModule`. It
    stays an instance of the script's class, and keeps its name, by which DeepSpeed knows some classes."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (ChunkedModule, kind), {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__})
    module.recycle_chunks = chunks


def chunks_of(module: PipelineModule) -> Chunks | None:
    """The cut of ``module``'s layers; None: DeepSpeed's, one chunk per stage."""
    found: Chunks | None = getattr(module, "recycle_chunks", None)
    return found
