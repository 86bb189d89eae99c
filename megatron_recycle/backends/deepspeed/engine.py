"""DeepSpeed: a `PipelineEngine` whose training schedule is a plan and whose iterations survive failures.

`install` makes `deepspeed.initialize()` return :class:`RecyclePipelineEngine`. The engine keeps stock's outside
(train_batch, its log lines, timers, monitors, learning-rate schedule, counters) and hands the inside of an iteration to
the runtime. The arithmetic is stock's, operation by operation: results without failures have stock's bits.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_recycle.backends.checkpoint_files import started_again
from megatron_recycle.backends.deepspeed.checkpoints import Checkpoints
from megatron_recycle.backends.deepspeed.config import (
    keep_batch,
    read_config,
    say_before_compiling,
    with_config,
)
from megatron_recycle.backends.deepspeed.edit_refusals import (
    check_data,
    refuse_another,
    refuse_other_sizes,
    settle_when_asked,
    sizes,
)
from megatron_recycle.backends.deepspeed.evaluation_data import Taken
from megatron_recycle.backends.deepspeed.evaluation_passes import Evaluations
from megatron_recycle.backends.deepspeed.iterators import compare_iterators, iterator_source, take_iterator
from megatron_recycle.backends.deepspeed.monitors import Event, Monitors, name_run
from megatron_recycle.backends.deepspeed.relayout import lay_out
from megatron_recycle.backends.deepspeed.stage import DeepSpeedStage
from megatron_recycle.backends.deepspeed.support import check_supported, torch_optimizer
from megatron_recycle.backends.deepspeed.timers import Timers
from megatron_recycle.backends.deepspeed.topology import check_not_too_late, place, place_of
from megatron_recycle.backends.deepspeed.wrapping import WrappingEngine
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.patching import replace, replaced
from megatron_recycle.backends.scalars import Scalars
from megatron_recycle.backends.session import Session
from megatron_recycle.backends.tries import Try
from megatron_recycle.config import RecycleConfig
from megatron_recycle.environment import Launched
from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.compute.accumulate import Layout
from megatron_recycle.runtime.compute.apex_kernel import fused_kernel
from megatron_recycle.runtime.compute.data import DatasetSource, DataSource, FactorySource, Mapped
from megatron_recycle.runtime.compute.loader_passes import watch_loaders
from megatron_recycle.runtime.compute.split import Splitter


def warn_of_no_pipeline(model: Any) -> None:
    """Warn at the start, on one rank, that an engine without pipeline stages has no protection."""
    launched = Launched.read()
    if launched.by_recycle_run and not launched.rank:
        get_logger().warning(
            "megatron-recycle: %s is no deepspeed.PipelineModule, and nothing protects its engine: the first worker "
            "that fails ends the job. What would help: build it as a PipelineModule, or save checkpoints often and "
            "let Slurm or torchrun start the job again", type(model).__name__)


def install(options: Options) -> None:
    """Wrap `deepspeed.initialize` so that pipeline models get our engine; again: with other options."""
    # DeepSpeed compiles a shared-memory helper at the first initialisation on CPU (most of a minute) that only
    # its inference kernels use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def initialize(stock: Callable[..., Any], args: Any = None, model: Any = None, *rest: Any, **keywords: Any) -> Any:
        given = dict(inspect.signature(stock).bind_partial(args, model, *rest, **keywords).arguments)
        config = read_config(given)
        settings = options.resolve(config)
        if not settings.enabled:
            options.stay_off()
            return stock(args, model, *rest, **keywords)
        if not isinstance(model, deepspeed.PipelineModule):
            warn_of_no_pipeline(model)
            return stock(args, model, *rest, **keywords)
        check_not_too_late(settings)
        name_run(config)
        say_before_compiling(config, given.get("optimizer"))
        if settings.chunks > 1:
            given["optimizer"], given["model_parameters"] = lay_out(
                model, given.get("optimizer"), given.get("model_parameters"), options.setup)
        if (microbatches := Launched.read().microbatches) is not None:
            given = with_config(given, keep_batch(config, microbatches, model.topology().get_dim("data")))
        changed = settings.chunks > 1 or microbatches is not None
        # The name that stock initialize() looks up when it builds the engine of a PipelineModule.
        with replaced(deepspeed, PipelineEngine=partial(RecyclePipelineEngine, settings, options)):
            return stock(**given) if changed else stock(args, model, *rest, **keywords)

    watch_loaders()
    place(options)
    replace(deepspeed, "initialize", initialize)


class RecyclePipelineEngine(WrappingEngine):
    """`PipelineEngine` that goes on training when workers fail.

    A difference that a user can see: `train_batch()` takes an iterator only over a torch DataLoader.
    """

    def __init__(self, settings: RecycleConfig, options: Options, *args: Any, **keywords: Any) -> None:
        self._dataset = keywords.get("training_data")
        self._given: Any = None  # an iterator that the script has set for the next train_batch()
        self._loss_stage: int | None = None
        super().__init__(settings.state_copies, *args, **keywords)
        check_supported(self)
        # Activations travel whole: stock would cut them over tensor-parallel ranks, and join them on arrival.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        if self.wall_clock_breakdown():
            self.timers: Any = Timers()
        self._options = options
        self._stage = DeepSpeedStage(self, self.sharded or self.masters, settings, is_logging_rank=self.is_logging_rank)
        layout = Layout(self._stage.parameters, self._stage.gradient_dtype)
        self._splitter = Splitter(self.module, fused_kernel(layout.dtype, layout.device))
        place = place_of(self)
        self._loss_stage = place.loss_stage
        self._seconds = 0.0  # of training since the last log line
        self._started_with = sizes(self)
        self.session = Session(place, settings, options, self.device)
        self.monitor: Monitors = Monitors(self.monitor, self.is_logging_rank, lambda: self.session.busy)
        self._scalars = Scalars(self.session)
        self._evaluations = Evaluations(self, self.session, self._stage)
        self._checkpoints = Checkpoints(self, settings.emergency_checkpoint)
        if place.me.pipeline == 0:
            get_logger().info("megatron-recycle: stage %d: %s", place.me.stage, self._splitter.describe())
        # Readers of the state, and loaders of another one, need the committed state.
        settle_when_asked(self.module, torch_optimizer(self), self.settle)

    def is_last_stage(self) -> bool:
        """Whether this worker computes the loss, and so gets labels and gives losses and logits. With two chunks per
        stage that is the first stage, which has the last layers too."""
        return super().is_last_stage() if self._loss_stage is None else self.stage_id == self._loss_stage

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self.num_stages - 1 if self._loss_stage is None else self._loss_stage)

    # ---- training

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """As stock, with the data taken from ``data_iter``, `training_data` or the factory given to `enable(data=...)`.

        Raises:
            DataError: none of them was given, or the iterator cannot be read for other workers (see `LoaderSource`).
            SystemExit: the job cannot go on; the message says why and what to do.
        """
        with self.session.call():
            return self._train_batch(data_iter)

    def _train_batch(self, data_iter: Any) -> torch.Tensor:
        given = self._take_given(data_iter)
        first = not self.session.started
        if first:
            self._source = self._data_source(given is not None)
            self.session.start(self._stage, self._splitter, self._source, first=self.global_steps,
                               number=self.global_samples // (self.micro_batch_size * self.grid.data_parallel_size),
                               save_last=lambda groups, _: self._checkpoints.write_last(groups),
                               restore=lambda _, place, name: self._load(Try(Path(place), name).found),
                               folder=lambda: self._checkpoints.folder)
            if isinstance(self.timers, Timers):
                self.session.worker.site.meters.watch.beside = self.timers.beside
        if given is not None:
            take_iterator(self._plain, given, self.session.grids.number(self.session.iteration + 1))
        if first:
            compare_iterators(self._plain, self.session, self._options.setup)
        begin = time.monotonic()
        loss = self._train_iteration()
        self._seconds += time.monotonic() - begin
        self._log_as_rank_zero(loss)
        return loss

    def _take_given(self, data_iter: Any) -> Any:
        """The iterator that the script has set for the next iteration, if any."""
        given, self._given = data_iter if data_iter is not None else self._given, None
        return given

    def _train_iteration(self) -> torch.Tensor:
        """Train the iteration that the script asks for. If the job had done it before this worker came in, return at
        once with its loss."""
        passed = self.session.begin()
        self.session.follow(self.micro_batches)
        if passed:
            self._loss = self.session.train()
            return self._aggregate_total_loss()
        refuse_other_sizes(self, self._started_with)
        check_data(self, self.session.generators, self._plain, self._source,
                   self.session.grids.number(self.session.iteration))
        loss = super().train_batch()
        if self.monitor.enabled:
            self.monitor.write(self._numbers(loss))
        return loss

    def _numbers(self, loss: torch.Tensor) -> list[Event]:
        """The numbers of an iteration for stock's monitors, and the job's state."""
        found = {"lr": self.get_lr()[0], "train_loss": loss.mean().item()}
        if self.fp16_enabled():
            found["loss_scale"] = self._get_optimizer_loss_scale()
        found = {f"Train/Samples/{name}": value for name, value in found.items() if value is not None}
        return [(name, value, self.global_samples) for name, value in {**found, **self._scalars()}.items()]

    def _build_data_iter(self, dataset: Any) -> None:
        """Stock starts loader processes here; batches are read by place instead."""

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        if isinstance(pipe_schedule, deepspeed.runtime.pipe.schedule.TrainSchedule):
            self._loss = self.session.train()
        else:
            super()._exec_schedule(pipe_schedule)

    def _aggregate_total_loss(self) -> torch.Tensor:
        return torch.tensor(self._loss, dtype=torch.float32, device=self.device)

    def clip_fp32_gradients(self) -> None:
        """The gradients are clipped already when the step begins (`DeepSpeedStage.step`)."""

    def settle(self) -> None:
        """Wait until the last iteration is committed: with staggered steps it may still be undone before."""
        if self.session.in_script:
            self.session.settle()

    def get_global_grad_norm(self) -> float | None:
        """As stock: in 16 bits the last iteration's norm, after waiting for its verdict; None in fp32."""
        self.settle()
        verdict = self.session.worker.standing.verdict if self.session.started else None
        if (self.masters is None and self.sharded is None) or verdict is None:
            return super().get_global_grad_norm()
        return math.sqrt(self._stage.passed if self.session.catches_up else sum(verdict.norm_squares))

    # ---- changes while a job runs, allowed and refused

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As stock: from the next iteration on each pipeline has more or fewer micro-batches. Call it on all ranks
        before the same iteration. Raises ValueError as stock, UnsupportedError with another policy than reroute."""
        super().set_train_batch_size(train_batch_size)
        if not self.session.started:
            self.session.iteration = self.global_steps - 1
        self.session.resize(self.micro_batches)
        self._started_with = sizes(self)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Accepts the number in force. Raises UnsupportedError for another."""
        name = "train_micro_batch_size_per_gpu"
        refuse_another(name, micro_batch_size, self._started_with[name])

    def reset_activation_shape(self) -> None:
        """As stock: from the next iteration on samples may be longer or shorter. Call it on all ranks before the same
        iteration."""
        super().reset_activation_shape()
        if self.session.in_script:
            self.session.reshape("reset_activation_shape()")

    def set_dataloader(self, loader: Any) -> None:
        """As stock: the next `train_batch()` begins a pass over ``loader``."""
        self.training_dataloader = loader
        self._given = iter(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """As stock: the next `train_batch()` reads ``iterator``; used by `eval_batch()` as well."""
        if self.session.busy:
            super().set_dataiterator(iterator)
        else:
            self._given = iterator

    def _data_source(self, iterator: bool) -> DataSource:
        """The source of micro-batches. The function of `set_batch_fn` is part of it, so that first and last stage read
        the same data, also if it draws random numbers."""
        self._plain = self._plain_source(iterator)
        return Mapped(self._plain, lambda: self.batch_fn, self.session.seeds("batch_fn"))

    def _plain_source(self, iterator: bool) -> DataSource:
        """``iterator``: whether the script has given one."""
        seeds = self.session.seeds()
        if self._options.data is not None:
            return FactorySource(self._options.data, seeds)
        if iterator or self._dataset is None:
            return iterator_source(self, iterator, self.session.place, seeds)
        source = DatasetSource(self._dataset, self.grid.data_parallel_size, self.micro_batch_size, self.collate_fn,
                               self.dataloader_drop_last(), seeds)
        if source.short is not None and self.num_stages > 1 and self.global_rank == 0:
            get_logger().warning("megatron-recycle: iteration %d cannot be trained: %s",
                                 source.short // self.micro_batches, source.describe_short())
        return source

    def is_logging_rank(self) -> bool:
        """Whether this is the logging rank: the first live worker's first part, unless it passes over an iteration that
        is already done."""
        return self.session.is_logging_rank() and self.session.place.part == 0 and not self.session.catches_up

    def _log_as_rank_zero(self, loss: torch.Tensor) -> None:
        """Stock logs on rank 0 only; once that is dead, the first live worker prints the same line."""
        lines = self.timers.lines() if isinstance(self.timers, Timers) else []
        if lines and self.is_logging_rank():
            print(*lines, sep="\n", flush=True)
        every = self.steps_per_print()
        if every is None or self.global_steps % every:
            return
        elapsed, self._seconds = self._seconds / every, 0.0
        if self.global_rank == 0 or not self.is_logging_rank():
            return
        print(f"steps: {self.global_steps} loss: {loss:0.4f} iter time (s): {elapsed:0.3f} "
              f"samples/sec: {self.train_batch_size() / elapsed:0.3f}")

    # ---- calls of all ranks together, between iterations

    def eval_batch(self, *args: Any, **keywords: Any) -> Any:
        """As stock, also while workers are missing, and through failures; micro-batches may have another shape than
        before. The mean has the same bits for any set of live workers (see `evaluation_data`).

        NaN, with an error line, where no live worker can read a pipeline's micro-batches, and, while a worker is
        missing, without ``compute_loss``. With ``return_logits`` each worker of the last stage has the logits of its
        own pipeline's last micro-batch, as in stock; None, with an error line, where another worker has run it as a
        guest. The iterator advances all the same: otherwise first and last stage would go on at different places of it.
        """
        bound = inspect.signature(PipelineEngine.eval_batch).bind(self, *args, **keywords)
        bound.apply_defaults()
        given = bound.arguments
        wanted = self.micro_batches if given["num_micro_batches"] is None else given["num_micro_batches"]
        if self.session.in_script and given["compute_loss"] and given["reduce_output"] in (None, "avg"):
            return self._evaluations.run(given["data_iter"], wanted, given["reduce_output"], given["bcast_loss"],
                                         given["return_logits"])
        reads = self.is_first_stage() or self.is_last_stage()
        data = Taken(given["data_iter"], wanted if reads else 0)
        if given["data_iter"] is not None:
            given["data_iter"] = data

        def evaluate() -> Any:
            if self.session.place.placement:
                return self._evaluations.run_first(wanted, given)
            self.reset_activation_shape()  # stages send each other the shape with the first message
            return PipelineEngine.eval_batch(*bound.args, **bound.kwargs)

        loss = torch.tensor(torch.nan, device=self.device)
        result = self.session.together("eval_batch()", evaluate, (loss, None) if given["return_logits"] else loss)
        data.finish()
        if self.monitor.enabled and not self.session.catches_up:
            loss = result[0] if given.get("return_logits") else result
            if isinstance(loss, torch.Tensor):
                self.monitor.write([("Train/Samples/eval_loss", loss.mean().item(), self.global_samples)])
        return result

    def save_checkpoint(self, save_dir: Any, tag: Any = None, *args: Any, **keywords: Any) -> Any:
        """As stock, also while workers are missing, and through failures. True, once ``latest`` names it; False, with
        an error line, where it cannot be written (a full disk). Raises SystemExit there with ``on_failed_save: end``.
        """
        stock, checkpoints = partial(super().save_checkpoint, save_dir, tag, *args, **keywords), self._checkpoints
        if not save_dir:
            return stock()  # raises
        checkpoints.seen(save_dir)
        done = self.session.save("save_checkpoint()",
                                 lambda save: checkpoints.write(save, save_dir, tag, *args, **keywords),
                                 clear=checkpoints.clear, otherwise=stock)
        if done and not self.session.catches_up:
            checkpoints.saved(tag)
        return done

    def checkpoint_due(self) -> bool:
        """Whether the script should write a checkpoint now to lose least time at the failure rate of `mtbf`. All ranks
        call this together and get the same answer. Raises ConfigError without `mtbf`."""
        if self.session.settings.mtbf is None:
            raise ConfigError("checkpoint_due() goes by how often the job fails: give mtbf (--recycle-mtbf SECONDS)")
        started = self.session.started
        due = torch.tensor([int(started and self.session.worker.site.meters.checkpoints.due)], device=self.device)
        dist.broadcast(due, 0)
        return bool(due.item())

    def load_checkpoint(self, load_dir: Any, tag: Any = None, *args: Any, **keywords: Any) -> Any:
        """As stock, also between two iterations, and while workers are missing: every worker reads its own stage's
        files. Micro-batches are read on from training's current place."""
        self.settle()
        own = False  # whether this job has written the checkpoint
        if started_again() and not self.session.started and tag is None:
            written = self._checkpoints.readable(load_dir)
            universal = self.load_universal_checkpoint()
            own = universal and written is not None and self._checkpoints.is_later_than_universal(load_dir, written)
            tag = written if own or not universal else None
        with replaced(self, goes_back=own):
            return self._load_stock(load_dir, tag, *args, **keywords)

    def _load(self, place: Path) -> None:
        """Load the checkpoint at ``place`` in a recovery. Raises RecycleError, and stock's errors."""
        if place.exists() and (reason := self._checkpoints.unreadable(place.parent, place.name)) is not None:
            raise RecycleError(reason)
        with replaced(self, goes_back=True):
            found = self._load_stock(str(place.parent), tag=place.name)
        if found[0] is None:
            raise RecycleError(f"the checkpoint in {place} is not to be found any more, or not on this host: keep "
                               "checkpoints on a file system that all hosts share")
        self._stage.native.begin_anew()  # some of the loading processes are new

    def _load_stock(self, *args: Any, **keywords: Any) -> Any:
        found = super().load_checkpoint(*args, **keywords)
        self._checkpoints.loaded()
        bound = inspect.signature(PipelineEngine.load_checkpoint).bind(self, *args, **keywords).arguments
        if self.masters is not None and found[0] is not None and not bound.get("load_optimizer_states", True):
            self.masters.refresh_fp32_params()  # stock leaves them at their initial values
        return found

