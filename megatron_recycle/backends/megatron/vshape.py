"""V-shaped stages (`chunks: 2`): Megatron builds two chunks on each stage, and the second half of them goes up again.

Megatron places the chunks of a virtual pipeline by (stage, number within it), and gives stage s of S the chunks s and S
+ s. Chunk 2S-1-s, which it has in a V, is the second chunk of stage S-1-s to Megatron: so Megatron sees that stage
while the second chunk is built, runs or looks up its layers' numbers. The first stage then has the model's first chunk
and its last one.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import transformer_block, transformer_layer
from megatron.core.utils import unwrap_model

from megatron_recycle.backends.patching import rebind, replace, replaced
from megatron_recycle.errors import UnsupportedError

CHUNKS = 2
_CHECKPOINTS = "megatron.training.checkpointing"


class Mirror:
    """The pipeline's group as second chunks see it: the last stage is the first. Only its rank and size."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        """As `torch.distributed.ProcessGroup`'s, and so is `size`."""
        return int(self._group.size() - 1 - self._group.rank())

    def size(self) -> int:
        return int(self._group.size())


def mirrored() -> AbstractContextManager[None]:
    """Inside the block Megatron sees the stage that would have this second chunk if chunks were interleaved."""
    rank = Mirror(parallel_state.get_pipeline_model_parallel_group()).rank()
    return replaced(parallel_state, _MPU_PIPELINE_MODEL_PARALLEL_RANK=rank)


def install() -> None:
    """Build models this way from now on, once Megatron has its groups. Raises UnsupportedError if there are not two
    chunks on each stage."""
    size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if size != CHUNKS:
        raise UnsupportedError(
            f"chunks {CHUNKS} (--recycle-chunks) wants a script that builds two chunks on each stage, as for "
            "Megatron's virtual pipelines: give initialize_model_parallel() and the model's configuration "
            f"virtual_pipeline_model_parallel_size={CHUNKS} (here it is {size}), or leave chunks out")
    first: list[GPTModel] = []
    replace(GPTModel, "__init__", functools.partial(_built, first))
    replace(GPTModel, "setup_embeddings_and_output_layer", functools.partial(_tied, first))
    replace(DistributedOptimizer, "sharded_state_dict", _by_parameter)
    if (stock := sys.modules.get(_CHECKPOINTS)) is not None:
        replace(stock, "_load_base_checkpoint", _sharded)
    # Megatron's functions that tell stages apart identify a chunk by its number within the stage (``vp_stage``).
    rebind("megatron.core.parallel_state", "is_pipeline_last_stage", _is_last)
    rebind(transformer_layer.__name__, "get_transformer_layer_offset", _of_chunk)
    rebind(transformer_block.__name__, "get_num_layers_to_build", _of_chunk)


def wrong(models: Sequence[Any]) -> list[str]:
    """Faults of the ``models`` of a worker, which should be chunks of a V."""
    parts = [unwrap_model(model) for model in models]
    placed = [isinstance(part, GPTModel) and isinstance(part.pg_collection.pp, Mirror) == (number == 1)
              for number, part in enumerate(parts)]
    return [] if all(placed) and len(placed) == CHUNKS else [
        f"chunks {CHUNKS} with models ({', '.join(type(part).__name__ for part in parts)}) that were not built as its "
        "chunks: they are to be two GPTModels of a worker, built after megatron_recycle.enable() and "
        "initialize_model_parallel(); or leave chunks out"]


def _is_last(stock: Callable[..., bool], ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """The loss is on the stage that is last for second chunks, in its second chunk."""
    with mirrored():
        return stock(ignore_virtual, vp_stage)


def _of_chunk(stock: Callable[..., int], config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Core looks up a layout of pipelines by the stage itself, whatever ``pp_rank`` says."""
    if vp_stage != 1:
        return stock(config, vp_stage, pp_rank)
    with mirrored():
        return stock(config, vp_stage, parallel_state.get_pipeline_model_parallel_rank())


def _built(first: list[GPTModel], stock: Callable[..., None], self: GPTModel, *args: Any, **keywords: Any) -> None:
    """Build a model as the chunk ``vp_stage``; Megatron's own scripts find the first and last one by group."""
    given = inspect.signature(stock).bind(self, *args, **keywords)
    chunk = given.arguments.get("vp_stage")
    if chunk not in range(CHUNKS):
        raise UnsupportedError(f"chunks {CHUNKS}: a GPTModel is built with vp_stage={chunk}: give it 0 or 1, the "
                               "number of the chunk within its stage")
    begins = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
    ends = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
    given.arguments.update(pre_process=begins, post_process=ends)
    if begins:
        first[:] = [self]
    if chunk == 0:
        stock(*given.args, **given.kwargs)
        return
    groups = copy.copy(given.arguments.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups())
    groups.pp = Mirror(parallel_state.get_pipeline_model_parallel_group())
    given.arguments["pg_collection"] = groups
    with mirrored():
        stock(*given.args, **given.kwargs)


def _tied(first: list[GPTModel], stock: Callable[..., None], self: GPTModel) -> None:
    """An output layer that shares the embedding's weight is on the embedding's stage: it gets no weight of its own, and
    needs no other rank."""
    if not self.share_embeddings_and_output_weights:
        stock(self)
    elif self.pre_process:
        self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
    else:
        del self.output_layer.weight
        self.output_layer.register_parameter("weight", None)
        if not first:
            raise UnsupportedError(f"chunks {CHUNKS}: build a stage's chunk 0 before its chunk 1, whose output layer "
                                   "shares the embedding's weight")
        embedding, = first
        own: Any = self
        own.shared_embedding_or_output_weight = embedding.shared_embedding_or_output_weight
        # Checkpoints save it with the embedding.
        own.tie_embeddings_and_output_weights_state_dict = lambda *args, **keywords: None


def _by_parameter(stock: Callable[..., Any], self: Any, *args: Any, **keywords: Any) -> Any:
    """Refuse state saved by its place in buffers: stages of another shape would load other layers' unnoticed."""
    given = inspect.signature(stock).bind(self, *args, **keywords).arguments
    kind = (given.get("metadata") or {}).get("distrib_optim_sharding_type", "fully_sharded_model_space")
    if kind not in self.checkpoint_fully_reshardable_formats:
        raise UnsupportedError(
            f"chunks {CHUNKS} with an optimizer's state that is saved by its place in buffers ({kind}): write the "
            "checkpoint with --dist-ckpt-optim-fully-reshardable, or go on from it with --no-load-optim")
    return stock(self, *args, **keywords)


def _sharded(stock: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Refuse checkpoints with a file per stage, which numbers the layers of each from 0."""
    found = stock(*args, **keywords)
    kind = found[-1]
    if kind is not None and kind.name != "GLOBAL":
        raise UnsupportedError(
            f"chunks {CHUNKS} with a checkpoint in --load of a file for each stage ({kind.name.lower()}): which layers "
            "are in it depends on the stages of the job that wrote it. Convert it to --ckpt-format torch_dist "
            "(--ckpt-convert-format torch_dist, without --recycle), or leave chunks out")
    return found
