"""Megatron-Core: a forward-backward function whose schedule is a plan and whose iterations survive failures.

`get_forward_backward_func()` returns a :class:`RecycleSchedule` (see `hook`). The training loop around it stays
Megatron's: it calls the function, then `optimizer.step()`. The runtime steps inside the former, since recovery must
know of steps; the latter returns the result.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_recycle.backends.megatron import bridge, te
from megatron_recycle.backends.megatron import groups as megatron_groups
from megatron_recycle.backends.megatron import training as megatron_training
from megatron_recycle.backends.megatron.chunks import placement
from megatron_recycle.backends.megatron.data import NoData, Shifted, source_of
from megatron_recycle.backends.megatron.final_checkpoint import LastCheckpoint
from megatron_recycle.backends.megatron.lazy_scalar import LazyScalar
from megatron_recycle.backends.megatron.script import unwrapped
from megatron_recycle.backends.megatron.skipped_iterations import Gaps
from megatron_recycle.backends.megatron.split import MegatronSplitter
from megatron_recycle.backends.megatron.stage import MegatronStage
from megatron_recycle.backends.megatron.support import (
    check_call,
    check_caller,
    check_supported,
    optimizer_of,
    overflows_earlier,
)
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.scalars import Scalars
from megatron_recycle.backends.session import Session
from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.membership import Verdict
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.admit import refuse_itself
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.sharded_reduction import Cuts
from megatron_recycle.runtime.comm.standalone import backend_for
from megatron_recycle.runtime.compute.data import DataSource, FactorySource
from megatron_recycle.runtime.evaluation import passes
from megatron_recycle.runtime.place import Place


class RecycleSchedule:
    """The result of `get_forward_backward_func()`, with the call signature of core's own schedules."""

    def __init__(self, settings: RecycleConfig, options: Options) -> None:
        self._settings = settings
        self._options = options
        self.session: Session
        """This process's part in the job, from the first call on."""
        self.splitter: MegatronSplitter | None = None
        """The splitter, which defers weight gradients; also from the first call on."""
        self._stage: MegatronStage
        self._kept: megatron_groups.Kept
        self._last: LastCheckpoint | None
        self._back: Callable[[str, str], int] | None
        self._microbatches = 0
        self._loop: Any = bridge if bridge.trains() else megatron_training
        """The backend of the training loop around."""
        self._late: tuple[LazyScalar, ...] = ()
        self._spoke = False
        self._gaps = Gaps()
        self._data = Shifted(NoData(), self._gaps.before)  # evaluation may come first
        self._evaluated: dict[int, tuple[Any, DataSource, int]] = {}
        """By identity of an evaluation iterator: the iterator, the source of its micro-batches, and how many of each
        pipeline are read."""

    def __call__(self, *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int,
                 forward_only: bool = False, **keywords: Any) -> list[dict[str, torch.Tensor]]:
        """Run one iteration up to and including its step; returns the reports of the loss functions.

        On the loss stage that is one entry per micro-batch of the whole global batch that has run, elsewhere nothing.

        Raises:
            UnsupportedError: at the first call, if something about the job cannot be kept correct.
            DataError: the data iterator cannot give other pipelines' micro-batches.
            SystemExit: the job cannot go on; the message says why and what to do.
        """
        if not self._microbatches:
            check_caller(sys._getframe())
            self._start(model if isinstance(model, list) else [model], self._loop.largest(num_microbatches))
        check_call(keywords)
        own_data = self._options.data is not None and not forward_only  # the iterator is not looked at
        given = None if own_data else data_iterator
        self._stage.script.calls(model, given, forward_only)
        self._stage.forward_step = forward_step_func
        with self.session.call(), self._kept.alone():
            reports = (self._evaluate(data_iterator, num_microbatches) if forward_only
                       else self._train(data_iterator, num_microbatches))
        if not forward_only:
            self._stage.script.made_step()
        self.is_logging_rank()  # notes a new logging rank: a script may log without this check
        place = self.session.place
        return self._stage.reports(reports, forward_only) if place.me.stage == place.loss_stage else []

    def _train(self, data_iterator: Any, microbatches: int) -> torch.Tensor:
        session, stepper = self.session, self.session.worker.stepper
        if session.iteration < 0:
            session.generators.adopt("forward_step_func", self._stage.forward_step)
            seeds = session.seeds()
            self._data.source = (source_of(data_iterator, session.place.part, seeds) if self._options.data is None
                                 else FactorySource(self._options.data, seeds))
        session.resize(microbatches)
        self._stage.microbatches = microbatches
        if session.begin():
            session.follow(microbatches)
            session.train()
            self._stage.rates.note(session.iteration)  # training may go back behind it
            self._stage.rates.forget(session.worker.final)
            return self._passed()
        session.follow(microbatches)
        iteration = session.iteration
        if (odd := self._stage.rates.set(iteration)) is not None:
            refuse_itself(session.worker.site, f"{odd}; give it the job's schedule, which must not depend on when it "
                                               "is started")
        session.train()
        if session.catches_up:
            return self._passed()  # a part that stood still without another part for a while
        self._stage.rates.forget(session.worker.final)
        for late in self._late:
            late.settle()  # it is known now, and might not be later
        scaling = self._stage.scaling
        if scaling.scales:  # the script's rates and the next loss scale depend on an overflow
            session.settle()
        self._late = tuple(LazyScalar(partial(find, iteration)) for find in (self._norm, self._zeros))
        # Plain numbers where they are known: always, except with staggered steps.
        norm, zeros = map(float, self._late) if stepper.held is None else self._late
        self._stage.result = self._stage.told(norm, zeros, iteration in scaling.skipped)
        reports = stepper.last.reports if stepper.held is None else stepper.held.reports
        assert reports is not None
        return reports

    def _passed(self) -> torch.Tensor:
        """The reports of an iteration that the job had done before this worker came in; its result is the others'."""
        norm, zeros, reports = self._stage.passed
        left_out = self._stage.scaling.scales and math.isnan(norm)
        if left_out:
            self._stage.scaling.skip(self.session.iteration)
        self._stage.result = self._stage.told(norm, zeros, left_out)
        return reports

    def _norm(self, iteration: int) -> float:
        return self._stage.norm(self._verdict(iteration).norm_squares)

    def _zeros(self, iteration: int) -> float:
        return self._verdict(iteration).zeros

    def _verdict(self, iteration: int) -> Verdict:
        """The verdict on one of the last two iterations, after waiting for other stages if need be. The last verdict if
        this worker was not there."""
        standing = self.session.worker.standing
        if standing.committed < iteration:
            self.session.settle()
        latest = standing.verdict
        assert latest is not None
        return next((verdict for verdict in standing.verdicts if verdict.iteration == iteration), latest)

    def settle(self) -> None:
        """Wait until the last iteration is committed: with staggered steps it may still be undone before."""
        if self._microbatches:
            self.session.settle()

    def _evaluate(self, data_iterator: Any, microbatches: int) -> torch.Tensor:
        """Forwards of the next ``microbatches`` of each pipeline, any number of them."""
        place, iterator = self.session.place, unwrapped(data_iterator)
        # The iterator is kept, so that its identity stays unique.
        _, source, first = self._evaluated.get(id(iterator)) or (
            None, source_of(iterator, place.part, self.session.seeds("evaluation data")), 0)
        self._evaluated[id(iterator)] = (iterator, source, first + microbatches)
        tables = [self.session.evaluate(Shifted(source, lambda number: first), number, microbatches)
                  for number in range(passes(place.grid, microbatches))]
        for pipeline in range(place.grid.pipelines):
            source.forget(pipeline, first + microbatches)
        return torch.cat(tables)

    def _number(self, iteration: int) -> int:
        """The number of ``iteration``'s first micro-batch."""
        return self.session.grids.number(iteration)

    def _go_back(self, groups: Groups, place: str, name: str) -> None:
        """As `Restore`."""
        assert self._back is not None
        distributed = self._stage.distributed
        loads = nullcontext() if distributed is None else distributed.going_back()
        with self._kept.of_those_left(groups), loads:
            self._stage.rates.steps = self._back(place, name)
            self._stage.scaling.go_back(self._stage.rates.steps)

    @contextmanager
    def _among_those_left(self, groups: Groups) -> Iterator[None]:
        with self.session.worker.among_those_left(), self._kept.of_those_left(groups):
            yield

    def pass_over(self, microbatches: int) -> None:
        """Note that the loop trains nothing with the next ``microbatches`` of each pipeline."""
        self._gaps.add(self._number(self.session.iteration + 1) if self._microbatches else 0, microbatches)

    def is_logging_rank(self) -> bool:
        """Whether this worker writes the log line: the last live worker that computes the loss, by its last part.
        Iterations before it came in are logged already.

        Before its first line it reports its place in the output to the launcher, which shows lines from there on.
        """
        session, place = self.session, self.session.place
        before, self._spoke = self._spoke, (
            not session.catches_up and session.is_logging_rank(-1) and place.part == place.parts - 1)
        if self._spoke and not before:
            sys.stdout.flush()
            session.agent.logs_from(os.fstat(1).st_size)
        return self._spoke

    def log_part(self) -> str:
        """This plugin's part of Megatron's log line: live workers, and stages of micro-batches that run as guests in
        each iteration."""
        away = Scalars(self.session).rerouted()
        return f" live: {len(self.session.live())}/{len(self.session.place.ranks)} | rerouted: {away} |"

    def _shards(self) -> tuple[Cuts, Groups]:
        """The holders of the optimizer's shards, and the groups of the live workers."""
        worker = self.session.worker
        assert worker.cuts is not None
        return worker.cuts, worker.current_groups()

    def _start(self, models: list[Any], microbatches: int) -> None:
        config = get_model_config(models[0])
        optimizer = optimizer_of(config)
        changed = check_supported(models, config, optimizer, self._settings.chunks)
        changed += overflows_earlier(models, optimizer, self._settings.reduction)
        v_shaped = self._settings.chunks > 1
        self._kept = megatron_groups.Kept(models, self._loop.collections())
        place = _place(microbatches, self._loop.backend(), placement(_stages(), len(models), v_shaped))
        if not bridge.trains():
            megatron_training.tell_validations()
        lends = self._settings.lend_layers if self._settings.lend == "auto" and _stages() > 1 else 0
        self._stage = MegatronStage(models, optimizer, microbatches, self._loop.settings(), lends, v_shaped)
        self._last = self._loop.last_checkpoint(
            self._settings.emergency_checkpoint, self._among_those_left, self._number, self._gaps,
            lambda: self._stage.scaling.skipped)
        self._back = self._loop.way_back()
        if self._settings.on_leave == "checkpoint" and self._last is not None and self._last.folder is None:
            raise UnsupportedError("on_leave checkpoint has nowhere to save: give --save DIR, or "
                                   "--recycle-emergency-checkpoint DIR")
        self.session = Session(place, self._settings, self._options, self._stage.device)
        if self.session.rank == 0:
            known = self._loop.told()
            for line in (line for line in changed if line not in known):
                get_logger().info("megatron-recycle: %s", line)
        self.splitter = te.splitter_for(models, self._settings.split_backward)
        self.session.start(self._stage, self.splitter, self._data,
                           save_last=None if self._last is None else self._last.write,
                           restore=None if self._back is None else self._go_back,
                           folder=lambda: None if self._last is None else self._last.folder)
        if self._stage.distributed is not None:
            self._stage.distributed.where = self._shards
        self._kept.detach(place.backend)
        megatron_groups.adapt_timers(self._kept, self.is_logging_rank)
        self._loop.take_over(self.session, self._kept, self._last, self.is_logging_rank, self.log_part)
        self._microbatches = microbatches


def _stages() -> int:
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def _place(microbatches: int, backend: str | None, placement: tuple[int, ...]) -> Place:
    """This process's position, and the ranks of all positions, as all ranks announce them (to a joiner: as at the
    start). ``backend``: wanted by the loop; ``placement``: of the model's chunks."""
    stages, pipelines = _stages(), parallel_state.get_data_parallel_world_size()
    me = Worker(parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    part = parallel_state.get_tensor_model_parallel_rank()
    own_position = torch.tensor([*me, part], dtype=torch.int64, device=torch.cuda.current_device())
    positions = [torch.empty_like(own_position) for _ in range(dist.get_world_size())]
    dist.all_gather(positions, own_position)
    rank_of = {tuple(position.tolist()): rank for rank, position in enumerate(positions)}
    ranks = {Worker(pipeline, stage): tuple(rank_of[pipeline, stage, index] for index in range(
        parallel_state.get_tensor_model_parallel_world_size())) for pipeline, stage, _ in rank_of}
    return Place(me=me, part=part, ranks=ranks, grid=Grid(stages, (microbatches,) * pipelines),
                 backend=backend or backend_for(own_position.device), placement=placement)
