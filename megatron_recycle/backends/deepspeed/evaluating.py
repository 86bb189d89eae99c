"""The evaluations of one engine: passes of the runtime over the script's micro-batches, and what stock returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_recycle.backends.deepspeed.evaluation import (
    EvaluationData,
    MappedEvaluation,
    by_pipeline,
    filled,
    mean,
    unknown,
)
from megatron_recycle.backends.deepspeed.first_evaluation import evaluate
from megatron_recycle.backends.deepspeed.stage import DeepSpeedStage
from megatron_recycle.backends.replacing import replaced
from megatron_recycle.backends.session import Session
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.evaluation import passes


class Evaluations:
    """What `eval_batch()` does, one evaluation after another.

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
        """The mean loss of so many ``microbatches`` of each pipeline; without ``reduce`` this pipeline's, one by one.
        Not ``everywhere``: on the last stage only. With ``logits`` beside those of this pipeline's last micro-batch."""
        outputs: list[Any] = []  # of that micro-batch; several where a failure had it made again

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
        """As `run`, where stages have several chunks, before training begins: with all workers. ``given`` are the
        script's arguments. Raises UnsupportedError."""
        if not (given["compute_loss"] and given["reduce_output"] in (None, "avg")):
            raise UnsupportedError("eval_batch(compute_loss=False), and reduce_output other than avg and None, run in "
                                   "DeepSpeed's own schedule, whose stages have one chunk: with chunks 2 ask for "
                                   "return_logits=True, which gives outputs as well, or leave chunks out")
        engine, running = self._engine, self._stage.running
        outputs: list[Any] = []
        engine.module.eval()
        with replaced(running, evaluated=outputs.append):
            of_pipelines = evaluate(engine, running, self._session.place, given["data_iter"], microbatches)
        value = self._told(of_pipelines, given["reduce_output"], given["bcast_loss"])
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
        if past := session.catches_up:  # then the table is of the last pass that the others have made
            tables = [filled(table, grid) for table in tables]
        if data.ended or (not past and not data.failed and any(map(unknown, tables))):
            raise StopIteration
        if any(map(unknown, tables)):
            why = data.failed or "the job did that before this worker came in"
            get_logger().error("megatron-recycle: eval_batch() has no value: %s; training goes on", why)
            of_pipelines = [torch.full((microbatches,), torch.nan)] * grid.pipelines
        else:
            of_pipelines = by_pipeline(tables, grid, microbatches)
        if reduce is not None and engine.monitor.enabled and not past:
            engine.monitor.write([("Train/Samples/eval_loss", mean(of_pipelines).item(), engine.global_samples)])
        return self._told(of_pipelines, reduce, everywhere)

    def _told(self, of_pipelines: Sequence[torch.Tensor], reduce: str | None, everywhere: bool) -> Any:
        """What stock returns of the losses of each pipeline."""
        engine, session = self._engine, self._session
        last = engine.is_last_stage()
        if reduce is None:
            return [*of_pipelines[session.place.me.pipeline].to(engine.device).unbind()] if last else None
        value = mean(of_pipelines).to(engine.device)
        if not everywhere and not engine.monitor.enabled:
            return value if last else None
        return value.float() if last else value.float().view(1)  # as stock broadcasts it
