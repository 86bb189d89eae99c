"""The evaluations of one engine: passes of the runtime over the script's micro-batches, and stock's return values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_recycle.backends.deepspeed.evaluation_data import (
    EvaluationData,
    MappedEvaluation,
    by_pipeline,
    filled,
    mean,
    unknown,
)
from megatron_recycle.backends.deepspeed.running import Running
from megatron_recycle.backends.deepspeed.stage import DeepSpeedStage
from megatron_recycle.backends.patching import replaced
from megatron_recycle.backends.session import Session
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.evaluation import passes
from megatron_recycle.runtime.place import Place


class Evaluations:
    """Runs `eval_batch()`, one evaluation after another.

    Args:
        engine: DeepSpeed's.
        session: of its job.
        stage: of this worker.
    """

    def __init__(self, engine: PipelineEngine, session: Session, stage: DeepSpeedStage) -> None:
        self._engine = engine
        self._session = session
        self._stage = stage
        self._data = EvaluationData(session.place, session.seeds("evaluation data"))

    def run(self, iterator: Any, microbatches: int, reduce: str | None, everywhere: bool, logits: bool) -> Any:
        """The mean loss of ``microbatches`` of each pipeline; without ``reduce`` this pipeline's losses, one by one.
        Not ``everywhere``: on the last stage only. With ``logits`` also those of this pipeline's last micro-batch."""
        outputs: list[Any] = []  # of that micro-batch; several if a failure made it run again

        def seen(made: Any) -> None:
            if self._data.asked == (self._session.place.me.pipeline, microbatches - 1):
                outputs.append(made)

        with replaced(self._stage.running, evaluated=seen):
            value = self._evaluate(iterator, microbatches, reduce, everywhere)
        return (value, self._logits(outputs)) if logits else value

    def _logits(self, outputs: Sequence[Any]) -> Any:
        """The last of ``outputs``, on the last stage."""
        engine = self._engine
        if not engine.is_last_stage():
            return None
        if not outputs and not self._session.catches_up:
            get_logger().error("megatron-recycle: eval_batch(return_logits=True) has no logits on worker %s: another "
                               "one has run its pipeline's last micro-batch; training goes on",
                               self._session.place.name)
        return outputs[-1] if outputs else None

    def run_first(self, microbatches: int, given: Mapping[str, Any]) -> Any:
        """As `run`, where stages have several chunks, before training begins: needs all workers. ``given``: the
        script's arguments. Raises UnsupportedError."""
        if not (given["compute_loss"] and given["reduce_output"] in (None, "avg")):
            raise UnsupportedError("eval_batch(compute_loss=False), and reduce_output other than avg and None, run in "
                                   "DeepSpeed's own schedule, whose stages have one chunk: with chunks 2 ask for "
                                   "return_logits=True, which gives outputs as well, or leave chunks out")
        engine, running = self._engine, self._stage.running
        outputs: list[Any] = []
        engine.module.eval()
        with replaced(running, evaluated=outputs.append):
            of_pipelines = evaluate_first(engine, running, self._session.place, given["data_iter"], microbatches)
        value = self._stock_value(of_pipelines, given["reduce_output"], given["bcast_loss"])
        return (value, outputs[-1] if outputs else None) if given["return_logits"] else value

    def _evaluate(self, iterator: Any, microbatches: int, reduce: str | None, everywhere: bool) -> Any:
        engine, session, data = self._engine, self._session, self._data
        grid = session.place.grid
        engine.module.eval()
        with session.call():
            with session.generators.kept():
                data.begin(iterator, microbatches)
            source = MappedEvaluation(data, lambda: engine.batch_fn, session.seeds("evaluation batch_fn"))
            tables = [session.evaluate(source, number, microbatches) for number in range(passes(grid, microbatches))]
        if past := session.catches_up:  # then the table is of the other workers' last pass
            tables = [filled(table, grid) for table in tables]
        if data.ended or (not past and not data.failed and any(map(unknown, tables))):
            raise StopIteration
        if any(map(unknown, tables)):
            reason = data.failed or "the job did that before this worker came in"
            get_logger().error("megatron-recycle: eval_batch() has no value: %s; training goes on", reason)
            of_pipelines = [torch.full((microbatches,), torch.nan)] * grid.pipelines
        else:
            of_pipelines = by_pipeline(tables, grid, microbatches)
        if reduce is not None and engine.monitor.enabled and not past:
            engine.monitor.write([("Train/Samples/eval_loss", mean(of_pipelines).item(), engine.global_samples)])
        return self._stock_value(of_pipelines, reduce, everywhere)

    def _stock_value(self, of_pipelines: Sequence[torch.Tensor], reduce: str | None, everywhere: bool) -> Any:
        """Stock's return value for the losses of each pipeline."""
        engine, session = self._engine, self._session
        last = engine.is_last_stage()
        if reduce is None:
            return [*of_pipelines[session.place.me.pipeline].to(engine.device).unbind()] if last else None
        value = mean(of_pipelines).to(engine.device)
        if not everywhere and not engine.monitor.enabled:
            return value if last else None
        return value.float() if last else value.float().view(1)  # as stock broadcasts it


# ---- before training

# There is no plan yet, and DeepSpeed's own schedule runs only stages of one chunk: so micro-batches go through the
# chunks one by one, with the same losses as in the runtime's evaluations.


def evaluate_first(engine: PipelineEngine, running: Running, place: Place, data: Iterator[Any] | None,
                   microbatches: int) -> list[torch.Tensor]:
    """The losses of each pipeline's ``microbatches``, (microbatches,), on all workers, which call this together. The
    first chunk's stage reads the data.

    Raises StopIteration on all workers if the data ends before.
    """
    batches: list[Any] | None = []
    if place.placement[0] == place.me.stage:
        batches = _taken(engine, data, microbatches)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, batches is None)
    if any(gathered):
        raise StopIteration
    with torch.no_grad():
        own = [_through(engine, running, place, batches[number] if batches else None)
               for number in range(microbatches)]
    dist.all_gather_object(gathered, (place.me.pipeline, own) if own[0] is not None else None)
    of = {pipeline: torch.stack(losses) for pipeline, losses in filter(None, gathered)}
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
    """Run one micro-batch through this stage's chunks; returns its loss on the stage that computes it."""
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
    dist.send_object_list([[tensor.detach().cpu() for tensor in tensors]], engine.grid.pp_group[stage])


def _receive(engine: PipelineEngine, stage: int) -> tuple[torch.Tensor, ...]:
    message: list[Any] = [None]
    dist.recv_object_list(message, engine.grid.pp_group[stage])
    return tuple(tensor.to(engine.device) for tensor in message[0])
