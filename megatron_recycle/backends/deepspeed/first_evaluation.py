"""An evaluation of a model whose stages have several chunks, before its job trains: nobody follows a plan yet, and
DeepSpeed's own schedule runs stages of one chunk only.

One micro-batch after the other goes through the chunks, with the losses that the runtime's evaluations have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_recycle.backends.deepspeed.running import Running
from megatron_recycle.runtime.comm.messages import HEADER_SIZE, decode_header, encode_header, meta_of, wire
from megatron_recycle.runtime.place import Place


def evaluate(engine: PipelineEngine, running: Running, place: Place, data: Iterator[Any] | None,
             microbatches: int) -> list[torch.Tensor]:
    """The losses of each pipeline's ``microbatches``, (microbatches,), on all workers, which call it together; data is
    read where the first chunk is.

    Raises StopIteration, on all of them, where it ends before.
    """
    batches: list[Any] | None = []
    if place.placement[0] == place.me.stage:
        batches = _taken(engine, data, microbatches)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, batches is None)
    if any(told):
        raise StopIteration
    with torch.no_grad():
        own = [_through(engine, running, place, batches[number] if batches else None)
               for number in range(microbatches)]
    dist.all_gather_object(told, (place.me.pipeline, own) if own[0] is not None else None)
    of = {pipeline: torch.stack(losses) for pipeline, losses in filter(None, told)}
    return [of[pipeline] for pipeline in range(place.grid.pipelines)]


def _taken(engine: PipelineEngine, data: Iterator[Any] | None, microbatches: int) -> list[Any] | None:
    """The next ``microbatches`` of ``data``; None if it has fewer."""
    found = []
    for _ in range(microbatches):
        try:
            batch = next(data)  # type: ignore[arg-type]  # None is an error as in stock
        except StopIteration:
            return None
        found.append(engine.batch_fn(batch) if engine.batch_fn else batch)
    return found


def _through(engine: PipelineEngine, running: Running, place: Place, batch: Any) -> torch.Tensor | None:
    """One micro-batch through this stage's chunks; its loss, where that is computed."""
    me, stages, loss = place.me.stage, place.placement, None
    made: tuple[torch.Tensor, ...] = ()
    for at, chunk in enumerate(place.chunks):
        inputs = None
        if chunk > 0:
            inputs = made if stages[chunk - 1] == me else _receive(engine, stages[chunk - 1])
        with running.chunk(at):
            forward = running.forward(inputs, batch if place.first(at) or place.last(at) else None)
        made = forward.outputs
        if place.last(at):
            assert forward.loss is not None
            loss = forward.loss.detach().cpu()
        elif stages[chunk + 1] != me:
            _send(engine, stages[chunk + 1], made)
    return loss


def _send(engine: PipelineEngine, stage: int, tensors: Sequence[torch.Tensor]) -> None:
    to = engine.grid.pp_group[stage]
    for tensor in (encode_header(meta_of(tensors)).to(engine.device), *tensors):
        dist.send(wire(tensor.detach().contiguous()), to)


def _receive(engine: PipelineEngine, stage: int) -> tuple[torch.Tensor, ...]:
    header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=engine.device)
    dist.recv(header, engine.grid.pp_group[stage])
    tensors = tuple(torch.empty(shape, dtype=dtype, device=engine.device) for dtype, shape in decode_header(header))
    for tensor in tensors:
        dist.recv(wire(tensor), engine.grid.pp_group[stage])
    return tensors
