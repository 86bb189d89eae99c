"""DeepSpeed: a `PipelineEngine` whose training schedule is a plan and whose iterations survive failures.

`install` makes `deepspeed.initialize()` return :class:`RecyclePipelineEngine`. The engine keeps stock's
outside (train_batch, its log lines, timers, monitors, learning-rate schedule, counters) and hands the
inside of an iteration to the runtime; the arithmetic is stock's, operation by operation, so that results
without failures have stock's bits.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import logging
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec
from torch import nn

from megatron_recycle.backends.buffers import check_unchanged
from megatron_recycle.backends.deepspeed_support import check_supported
from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import DataError, JobEnded, UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.coming import backend_for
from megatron_recycle.runtime.data import Batch, DatasetSource, DataSource, FactorySource
from megatron_recycle.runtime.groups import Groups
from megatron_recycle.runtime.link import connect
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.reduce import Averaging
from megatron_recycle.runtime.split import Splitter
from megatron_recycle.runtime.stage import Forward, Tie, fingerprint
from megatron_recycle.runtime.worker import StageWorker

_STOCK = "recycle_stock_initialize"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "losses", "_step_applied")
"""What `_take_model_step` changes besides tensors."""


def install(options: Options) -> None:
    """Wrap `deepspeed.initialize` so that pipeline models get our engine; again: with other options."""
    stock = getattr(deepspeed.initialize, _STOCK, deepspeed.initialize)
    # DeepSpeed compiles a shared-memory helper at the first initialisation on CPU (most of a minute) that only
    # its inference kernels use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    @functools.wraps(stock)
    def initialize(args: Any = None, model: Any = None, *rest: Any, **keywords: Any) -> Any:
        settings = options.resolve(_read_config(args, keywords))
        if not settings.enabled or not isinstance(model, deepspeed.PipelineModule):
            return stock(args, model, *rest, **keywords)
        engine_class = functools.partial(RecyclePipelineEngine, settings, options)
        # The name that stock initialize() looks up when it builds the engine of a PipelineModule.
        plain, deepspeed.PipelineEngine = deepspeed.PipelineEngine, engine_class
        try:
            return stock(args, model, *rest, **keywords)
        finally:
            deepspeed.PipelineEngine = plain

    setattr(initialize, _STOCK, stock)
    deepspeed.initialize = initialize


def _read_config(args: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The DeepSpeed configuration as `deepspeed.initialize` would find it; {} if there is none to read."""
    config = keywords.get("config") or keywords.get("config_params") or getattr(args, "deepspeed_config", None)
    if isinstance(config, (str, Path)):
        path = Path(config)
        return json.loads(path.read_text()) if path.is_file() else {}
    return config if isinstance(config, Mapping) else {}


class RecyclePipelineEngine(PipelineEngine):
    """`PipelineEngine` that goes on training when workers fail.

    Differences a user can see: `train_batch()` takes no bare iterator (see DataError's message), and while a
    worker is missing `eval_batch()` and `save_checkpoint()` are refused.
    """

    def __init__(self, settings: RecycleConfig, options: Options, *args: Any, **keywords: Any) -> None:
        self._dataset = keywords.get("training_data")
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        """fp32 master weight of each bf16 parameter; empty in fp32."""
        super().__init__(*args, **keywords)
        check_supported(self)
        self._recycle = settings
        self._options = options
        self._stage = DeepSpeedStage(self)
        self._splitter = Splitter(self.module)
        place = _place(self)
        if self.global_rank == 0:
            get_logger().info(settings.describe())
        self._at = place
        self._worker: StageWorker | None = None
        self._seconds = 0.0  # of training since the last log line
        self._asked = 0  # the iteration that the script asks for next
        self._agent = connect(place, settings, options.embed, self._abort_transport)
        atexit.register(self._finish)
        if place.me.pipeline == 0:
            get_logger().info("megatron-recycle: stage %d: %s", place.me.stage, self._splitter.describe())
        # Whoever asks for the state wants it as it stays.
        self.module.register_state_dict_pre_hook(lambda *_: self.settle())
        self.optimizer.register_state_dict_pre_hook(lambda *_: self.settle())

    # ---- training

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """As stock, with the data taken from `training_data` or the factory given to `enable(data=...)`.

        Raises:
            DataError: a bare iterator was given, or none of the above was.
            SystemExit: the job cannot go on; the message says why and what to do.
        """
        if data_iter is not None and self._options.data is None:
            raise DataError(
                "train_batch(data_iter) takes a bare iterator, which cannot give a dead worker's micro-batches to "
                "another worker. Give the dataset to deepspeed.initialize(training_data=...) and call train_batch(), "
                "or call megatron_recycle.enable(data=factory) with factory(pipeline) -> an iterator that gives "
                "that pipeline's micro-batches in the same order each time it is called")
        if self._worker is None:
            self._worker = StageWorker(place=self._at, stage=self._stage, splitter=self._splitter,
                                       data=self._data_source(), agent=self._agent, config=self._recycle,
                                       observer=self._options.observer)
        begin = time.monotonic()
        try:
            loss = self._train_iteration(self._worker)
        except JobEnded as end:
            get_logger().log(logging.ERROR if end.status else logging.INFO, "megatron-recycle: %s", end)
            raise SystemExit(end.status) from None
        self._seconds += time.monotonic() - begin
        self._log_as_rank_zero(self._worker, loss)
        return loss

    def _train_iteration(self, worker: StageWorker) -> torch.Tensor:
        """The iteration that the script asks for. One that the job had done before this worker came in is over at
        once, with the last known loss, so that the script's loop ends where the others' do."""
        if worker.generation == 0:
            self._asked = self.global_steps
        worker.begin(self._asked)
        if worker.has_done(self._asked):
            self._loss = worker.train(self._asked)
            loss = self._aggregate_total_loss()
        else:
            loss = super().train_batch()
        self._asked += 1
        return loss

    def _abort_transport(self, generation: int) -> None:
        """In the agent's thread."""
        if self._worker is not None:
            self._worker.abort(generation)

    def _finish(self) -> None:
        """At the end of the process: if the script ended well, stand by until all others have ended too."""
        failed = getattr(sys, "last_type", None) is not None or self._agent.ended is not None
        if self._worker is None:
            self._agent.close()
            return
        try:
            if not failed:
                self._worker.finish()
        except JobEnded as end:
            get_logger().error("megatron-recycle: %s", end)
        finally:
            self._worker.close()

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        """fp32 master weights and moments whole on every peer: stock's BF16_Optimizer spreads them over the
        data-parallel ranks, so that a dead worker takes a part of them along."""
        self._masters = {}
        for group in optimizer.param_groups:
            self._masters.update({parameter: nn.Parameter(parameter.detach().float()) for parameter in group["params"]})
            group["params"] = [self._masters[parameter] for parameter in group["params"]]
        return optimizer

    def _build_data_iter(self, dataset: Any) -> None:
        """Stock starts loader processes here; batches are read by place instead."""

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        if isinstance(pipe_schedule, deepspeed.runtime.pipe.schedule.TrainSchedule):
            assert self._worker is not None
            self._loss = self._worker.train(self._asked)
        else:
            super()._exec_schedule(pipe_schedule)

    def _aggregate_total_loss(self) -> torch.Tensor:
        return torch.tensor(self._loss, dtype=torch.float32, device=self.device)

    def clip_fp32_gradients(self) -> None:
        """The gradients are clipped already when the step begins (`DeepSpeedStage.step`)."""

    def settle(self) -> None:
        """Wait until the last iteration is committed: with staggered steps it may still be undone before."""
        if self._worker is not None:
            self._worker.settle()

    def _data_source(self) -> DataSource:
        if self._options.data is not None:
            return FactorySource(self._options.data)
        if self._dataset is None:
            raise DataError("there is no training data: give a dataset to deepspeed.initialize(training_data=...), or "
                            "call megatron_recycle.enable(data=factory) with factory(pipeline) -> iterator")
        return DatasetSource(self._dataset, self.grid.data_parallel_size, self.micro_batch_size, self.collate_fn,
                             self.dataloader_drop_last())

    def _log_as_rank_zero(self, worker: StageWorker, loss: torch.Tensor) -> None:
        """Stock logs on rank 0 only; once that is gone the first live worker prints the same line."""
        every = self.steps_per_print()
        if every is None or self.global_steps % every:
            return
        elapsed, self._seconds = self._seconds / every, 0.0
        if self.global_rank == 0 or worker.live()[0] != self._at.me:
            return
        print(f"steps: {self.global_steps} loss: {loss:0.4f} iter time (s): {elapsed:0.3f} "
              f"samples/sec: {self.train_batch_size() / elapsed:0.3f}")

    # ---- what is not supported while a worker is missing

    def eval_batch(self, *args: Any, **keywords: Any) -> Any:
        self.settle()
        self._refuse_when_degraded("eval_batch()", "evaluate before the failure, or from a checkpoint in another job")
        return super().eval_batch(*args, **keywords)

    def save_checkpoint(self, *args: Any, **keywords: Any) -> Any:
        self.settle()
        self._refuse_when_degraded("save_checkpoint()", "save with all workers alive")
        return super().save_checkpoint(*args, **keywords)

    def load_checkpoint(self, *args: Any, **keywords: Any) -> Any:
        if self._worker is not None:
            raise UnsupportedError("load_checkpoint() after the first train_batch() is not supported: iterations are "
                                   "counted from where training began. Load before training, or start a new job")
        if self._masters:
            raise UnsupportedError("load_checkpoint() in bf16 is not supported yet: the checkpoint has no fp32 master "
                                   "weights, and the first step would go back to the initial ones. Use fp32, or load "
                                   "weights into the model before deepspeed.initialize()")
        return super().load_checkpoint(*args, **keywords)

    def _refuse_when_degraded(self, what: str, remedy: str) -> None:
        missing = set(self._at.grid.workers()) - set(self._worker.live()) if self._worker else None
        if missing:
            raise UnsupportedError(f"{what} while workers are missing ({', '.join(map(str, sorted(missing)))}) is not "
                                   f"supported yet; {remedy}")


class DeepSpeedStage:
    """The runtime's view of the engine (`runtime.stage.Stage`)."""

    averaging: Averaging = "after"
    report_width = 0

    def __init__(self, engine: RecyclePipelineEngine) -> None:
        self._engine = engine
        self.device = engine.device
        self.parameters: Sequence[nn.Parameter] = [
            parameter for parameter in engine.module.parameters() if parameter.requires_grad and parameter.numel()]
        self._stepped: Sequence[nn.Parameter] = [engine._masters.get(parameter, parameter)
                                                 for parameter in self.parameters]
        self.gradient_dtype = torch.float32 if engine._masters else None
        self.model = f"{fingerprint(self.parameters)}, optimizer {type(engine.optimizer).__name__}"
        self.tied_stages = _tied_stages(engine.module)
        self.ties = _ties(engine)
        self._checked_buffers = False

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        engine = self._engine
        if batch is not None and engine.batch_fn:
            batch = engine.batch_fn(batch)
        if inputs is None:
            assert batch is not None
            inputs = self._load(batch[0])
        single = inputs[0] if len(inputs) == 1 else inputs
        if self._checked_buffers:
            outputs = engine.module(single)
        else:
            self._checked_buffers = True
            outputs = check_unchanged(engine.module, lambda: engine.module(single))
        if not engine.is_last_stage():
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return Forward((inputs, outputs), outputs, None)
        assert batch is not None
        loss = engine.module.loss_fn(outputs, self._labels(batch[1])) if engine.module.loss_fn else outputs
        if not isinstance(loss, torch.Tensor) or engine.module.get_additional_losses() is not None:
            raise UnsupportedError("a loss of several tensors is not supported yet; return one scalar from loss_fn")
        return Forward((inputs, (loss,)), (), loss)

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        engine = self._engine
        inputs, outputs = forward.saved
        engine._running_engine_backward = True  # keeps DeepSpeed's hooks for direct .backward() calls quiet
        try:
            if engine.is_last_stage():
                (outputs[0] / engine.gradient_accumulation_steps()).backward()
            else:
                floating = [tensor for tensor in outputs if tensor.is_floating_point()]
                pairs = [(tensor, gradient) for tensor, gradient in zip(floating, gradients, strict=True)
                         if tensor.requires_grad]
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        finally:
            engine._running_engine_backward = False
        return [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                for tensor in inputs if tensor.is_floating_point()]

    def norm_square(self, gradients: Sequence[torch.Tensor]) -> float:
        """Stock's way of counting: in fp32 model-parallel rank 0 only, which in a pipeline is the first stage; in
        bf16 all stages, a tied parameter once."""
        engine = self._engine
        if engine.gradient_clipping() <= 0.0:
            return 0.0
        everywhere = engine._recycle.clip_norm == "global" or bool(engine._masters)
        if not everywhere and engine.grid.get_model_parallel_rank() != 0:
            return 0.0
        norms = [gradient.detach().float().norm(2.0) for parameter, gradient in zip(self.parameters, gradients)
                 if not (everywhere and getattr(parameter, "ds_pipe_replicated", False))]
        return torch.stack(norms).pow(2.0).sum().float().item() if norms else 0.0

    def coefficient(self, norm_squares: Sequence[float], weight: float) -> float:
        """Stock's clipping (`clip_grad_norm_`), operation by operation."""
        engine = self._engine
        if engine.gradient_clipping() <= 0.0:
            return 1.0
        total = torch.zeros(1)
        for value in norm_squares:
            total += value
        # Stock averages the norm over data-parallel ranks, which all have the same one.
        pipelines = engine.grid.data_parallel_size
        scaled = total.pow(1.0 / 2.0) * 1.0 / float(pipelines)
        norm = scaled.clone()
        for _ in range(pipelines - 1):
            norm += scaled
        limit = torch.tensor([float(engine.gradient_clipping())])
        return torch.min(torch.tensor([1.0]), limit / (norm + 1e-6)).item()

    def step(self, gradients: Sequence[torch.Tensor], coefficient: float) -> None:
        for parameter, gradient in zip(self._stepped, gradients, strict=True):
            parameter.grad = gradient if coefficient == 1.0 else gradient.mul_(coefficient)
        self._engine._exec_optimizer_step()
        for parameter, master in self._engine._masters.items():
            parameter.data.copy_(master.data)

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {f"parameter {index}": parameter.data for index, parameter in enumerate(self.parameters)}
        if self._engine._masters:
            tensors.update({f"master {index}": master.data for index, master in enumerate(self._stepped)})
        for index, parameter in enumerate(self._stepped):
            for key, value in self._engine.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key} {index}"] = value
        return tensors

    def fixed(self) -> dict[str, torch.Tensor]:
        trained = set(map(id, self.parameters))
        frozen = {f"frozen {name}": parameter.data for name, parameter in self._engine.module.named_parameters()
                  if id(parameter) not in trained}
        return {**frozen, **{f"buffer {name}": value for name, value in self._engine.module.named_buffers()}}

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Any) -> None:
        self.reset_state(tensors.keys())
        own = {**self.state(), **self.fixed()}
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in own:
                    own[name].copy_(tensor)
                else:  # the optimizer makes its state at the first step
                    key, index = name.rsplit(" ", 1)
                    self._engine.optimizer.state[self._stepped[int(index)]][key] = tensor
        self.set_counters(counters)

    def reset_state(self, names: Collection[str]) -> None:
        for index, parameter in enumerate(self._stepped):
            kept = self._engine.optimizer.state.get(parameter, {})
            for key in [key for key in kept if isinstance(kept[key], torch.Tensor) and f"{key} {index}" not in names]:
                del kept[key]
            if not kept:
                self._engine.optimizer.state.pop(parameter, None)

    def counters(self) -> Any:
        engine = self._engine
        numbers = [{key: value for key, value in engine.optimizer.state.get(parameter, {}).items()
                    if not isinstance(value, torch.Tensor)} for parameter in self._stepped]
        groups = [{key: value for key, value in group.items() if key != "params"}
                  for group in engine.optimizer.param_groups]
        schedule = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
        return copy.deepcopy((numbers, groups, schedule, {name: getattr(engine, name) for name in _COUNTERS}))

    def set_counters(self, counters: Any) -> None:
        engine = self._engine
        numbers, groups, schedule, values = copy.deepcopy(counters)
        for parameter, own in zip(self._stepped, numbers, strict=True):
            if own:
                engine.optimizer.state[parameter].update(own)
        for group, own in zip(engine.optimizer.param_groups, groups, strict=True):
            group.update(own)
        if schedule is not None:
            engine.lr_scheduler.load_state_dict(schedule)
        for name, value in values.items():
            setattr(engine, name, value)

    def regroup(self, groups: Groups) -> None:
        """Every handle that DeepSpeed keeps and may use during training or after it."""
        engine, grid = self._engine, self._engine.grid
        grid.dp_proc_group = engine.data_parallel_group = engine.seq_data_parallel_group = groups.stage
        grid.ds_model_proc_group = grid.pp_proc_group = groups.pipeline
        engine.module.world_group = groups.world

    def _load(self, data: Any) -> tuple[torch.Tensor, ...]:
        """First-stage inputs as stock prepares them."""
        tensors = [data] if torch.is_tensor(data) else list(data)
        loaded = [tensor.clone().detach().to(self.device) for tensor in tensors]
        if self._engine._reentrant_activation_checkpointing():
            for tensor in loaded:
                tensor.requires_grad = tensor.is_floating_point()
        return tuple(loaded)

    def _labels(self, data: Any) -> Any:
        if torch.is_tensor(data):
            return data.to(self.device)
        return tuple(tensor.to(self.device).detach() for tensor in data)


def _tied_stages(module: deepspeed.PipelineModule) -> tuple[tuple[int, ...], ...]:
    """The stages of each tied layer that lives in several, the same on all workers."""
    stages: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(index))
    return tuple(tuple(sorted(stages[key])) for key in sorted(stages) if len(stages[key]) > 1)


def _ties(engine: PipelineEngine) -> list[Tie]:
    """This stage's copies of tied parameters, in the same order on all stages."""
    topology, module, found = engine.grid.topology(), engine.module, []
    for key, comm in sorted(module.tied_comms.items()):
        stages = tuple(sorted(topology.get_coord(rank).pipe for rank in comm["ranks"]))
        found += [Tie(module._recursive_getattr(module.tied_modules[key], name), stages)
                  for name in comm["weight_attr"] if len(stages) > 1]
    return found


def _place(engine: PipelineEngine) -> Place:
    grid, topology = engine.grid, engine.grid.topology()
    ranks = {Worker(pipeline, stage): (topology.get_rank(pipe=stage, data=pipeline),)
             for pipeline in range(grid.data_parallel_size) for stage in range(grid.pipe_parallel_size)}
    return Place(me=Worker(grid.get_data_parallel_id(), grid.get_stage_id()), ranks=ranks,
                 grid=Grid(grid.pipe_parallel_size, (engine.micro_batches,) * grid.data_parallel_size),
                 backend=backend_for(engine.device))
