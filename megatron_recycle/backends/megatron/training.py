"""Megatron-LM's own training loop (`megatron.training`, not in the pip package), once workers may be missing.

Its log line is written by the last rank, its checkpoints are written by all of them: these are rebound in the loop's
module. `backends.megatron.options` treats its options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException

from megatron_recycle.backends.megatron import back
from megatron_recycle.backends.megatron.aside import aside
from megatron_recycle.backends.megatron.background import Background, Unfinished
from megatron_recycle.backends.megatron.last import LastCheckpoint, what_failed
from megatron_recycle.backends.megatron.options import ALL_AT_ONCE, ANYWHERE, OF_THE_LOOP, apply, message, v_shaped
from megatron_recycle.backends.session import Session
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.saving import Save, Written

LOOP = "megatron.training.training"
CHECKPOINTS = "megatron.training.checkpointing"
_OF_GROUP = "recycle_group"


class PluginSchedule(Protocol):
    """The plugin's schedule, as the loop's replacements need it."""

    def speaks(self) -> bool:
        """Whether this worker writes the log line."""

    def log_part(self) -> str:
        """The plugin's part of it."""

    def among_peers(self, groups: Groups) -> AbstractContextManager[None]:
        """Inside the block ``groups`` are Megatron's for data parallelism."""

    def alone(self) -> AbstractContextManager[None]:
        """Inside the block Megatron's groups have this worker for their only member."""

    def saving(self, iteration: int) -> AbstractContextManager[None]:
        """A block in which the loop saves ``iteration`` for good."""


def check_arguments(arguments: Any, chunks: int = 1) -> list[str]:
    """Judge Megatron-LM's ``arguments`` and set some of them otherwise; returns the lines on those. ``chunks``: of each
    stage, that the plugin is to make.

    Raises UnsupportedError listing all that cannot be kept right.
    """
    beside = () if getattr(arguments, "ckpt_format", None) == "torch_dist" else (ALL_AT_ONCE,)
    refused, changed = apply((*ANYWHERE, *OF_THE_LOOP, *beside), [arguments])
    if chunks > 1:
        more, others = v_shaped(arguments)
        refused, changed = refused + more, changed + others
    if refused:
        raise UnsupportedError(message(refused))
    return changed


def told() -> list[str]:
    """The lines that the loop's user has read by now (`check_arguments`) and that another look at the same options
    would bring again: those of options that are off under this plugin and keep their value."""
    if LOOP not in sys.modules:
        return []
    return apply(ANYWHERE, [SimpleNamespace(**vars(sys.modules[LOOP].get_args()))])[1]


def keep_batch(arguments: Any, microbatches: int | None) -> list[str]:
    """Keep the global batch of a job that was started again with another number of pipelines, where the script leaves
    it to Megatron (one micro-batch for each); returns the line on that. ``microbatches``: of an iteration; None: it was
    not started again."""
    if microbatches is None or (wanted := microbatches * arguments.micro_batch_size) == arguments.global_batch_size:
        return []
    before, arguments.global_batch_size = arguments.global_batch_size, wanted
    return [f"global_batch_size is {wanted} and not {before}: the job was started again, and keeps its batch"]


def largest(microbatches: int) -> int:
    """The micro-batches of a pipeline in the largest iteration of a job that begins with ``microbatches``: with
    --rampup-batch-size those of the last ones, and of evaluations."""
    if LOOP not in sys.modules:
        return microbatches
    arguments = sys.modules[LOOP].get_args()
    if arguments.rampup_batch_size is None:
        return microbatches
    return int(arguments.global_batch_size // (arguments.micro_batch_size * arguments.data_parallel_size))


def backend() -> str | None:
    """The process groups' backend that Megatron-LM's arguments ask for; None if its loop is not loaded."""
    return None if LOOP not in sys.modules else str(sys.modules[LOOP].get_args().distributed_backend)


def last_checkpoint(wanted: str | None,
                    among: Callable[[Groups], AbstractContextManager[None]],
                    microbatches: Callable[[int], int]) -> LastCheckpoint | None:
    """The writer of a last checkpoint with the loop's own functions, if it is the loop that trains; before `take_over`.
    The arguments are those of `LastCheckpoint`."""
    loop: Any = sys.modules.get(LOOP)
    beginning = getattr(getattr(loop, "train", None), "beginning", None)
    return None if beginning is None else LastCheckpoint(
        loop, beginning, wanted, among, lambda folder, iteration: aside(
            sys.modules[CHECKPOINTS], folder, iteration, "last", lambda place: None), microbatches)


def way_back() -> Callable[[str, str], int] | None:
    """Loads one of the loop's own checkpoints of this job into what it trains (`back.load`), and returns how many steps
    the job had made by then; before `take_over`. None: they do not hold all that training needs, or another loop
    trains."""
    loop: Any = sys.modules.get(LOOP)
    beginning = getattr(getattr(loop, "train", None), "beginning", None)
    if beginning is None or not back.possible(loop.get_args()):
        return None
    return lambda place, name: back.load(
        loop, sys.modules[CHECKPOINTS], beginning, place, name) - int(beginning.iteration)


def _folder(arguments: Any, passing: bool) -> str:
    """Where the loop saves; ``passing``: a checkpoint that the next one of its kind takes the place of."""
    if not passing:
        return str(arguments.save)
    own = arguments.non_persistent_global_ckpt_dir
    return str(own or os.path.join(arguments.save, sys.modules[CHECKPOINTS]._NON_PERSISTENT_CKPT_SUBDIR))


def _needs_all(arguments: Any, passing: bool) -> str | None:
    """The option with which no worker's part of a checkpoint is another one's; None: there is none."""
    if arguments.data_parallel_random_init:
        return "--data-parallel-random-init"
    return "--non-persistent-ckpt-type local" if passing and arguments.non_persistent_ckpt_type == "local" else None


def _forget_old_groups(loop: Any, arguments: Sequence[Any]) -> None:
    """Megatron keeps how it saves, with the group that shares the writing, from one checkpoint to the next: not with
    other members."""
    group = loop.mpu.get_data_parallel_group(with_context_parallel=True)
    for context in (argument for argument in arguments if isinstance(argument, dict)):
        if context.get(_OF_GROUP) is not group:
            context.pop("save_strategy", None)
            context[_OF_GROUP] = group


@contextmanager
def _failures_named(save: Save) -> Iterator[None]:
    """A block in which an error of Megatron's that is no Exception becomes one, if it is no failure of ``save``'s."""
    try:
        yield
    except CheckpointException as error:
        save.check()
        raise RuntimeError(what_failed(error) or str(error)) from error


@contextmanager
def _set(arguments: Any, async_save: bool) -> Iterator[None]:
    """Inside the block a checkpoint is written beside training, or not."""
    before, arguments.async_save = arguments.async_save, async_save
    try:
        yield
    finally:
        arguments.async_save = before


def muted(writer: Callable[[], Any], when: Callable[[], bool]) -> Callable[[], Any]:
    """In place of a function that gives a writer of logs, or None: None ``when`` there is nothing to be written."""
    return lambda: None if when() else writer()


def _pass_over(loop: Any, log: Callable[[], Any]) -> None:
    """``log`` adds up an iteration's numbers for the line of its interval, which was written before this worker came
    in, or is still to be."""
    arguments = loop.get_args()
    every, arguments.log_interval = arguments.log_interval, sys.maxsize
    try:
        log()
    finally:
        arguments.log_interval = every


def take_over(session: Session, schedule: PluginSchedule) -> None:
    """Rebind the loop's names, if it is loaded."""
    loop: Any = sys.modules.get(LOOP)
    if loop is None:
        return
    stock: Any = sys.modules[CHECKPOINTS]
    stock_save = loop.save_checkpoint
    report = loop.compute_throughputs_and_append_to_progress_log
    saved: set[int] = set()

    def print_rank_last(message: str) -> None:
        if schedule.speaks():
            print(f"{message}{schedule.log_part()}" if " iteration " in message and message.endswith("|") else message,
                  flush=True)

    background = Background(session.live, session.speaks)

    @contextmanager
    def saving(save: Save, folder: str, iteration: int, passing: bool, name: str,
               whole: Callable[[str], None]) -> Iterator[None]:
        with (schedule.among_peers(save.generation.groups), nullcontext() if passing else schedule.saving(iteration),
              _failures_named(save), aside(stock, folder, iteration, name, whole)):
            yield

    def save_checkpoint(iteration: int, *given: Any, **keywords: Any) -> None:
        arguments, passing = loop.get_args(), bool(keywords.get("non_persistent_ckpt", False))
        folder, beside = _folder(arguments, passing), arguments.async_save and not passing

        def write(save: Save) -> bool:
            groups = save.generation.groups
            needs_all = _needs_all(arguments, passing) if groups.control.size < arguments.world_size else None
            if needs_all is not None:
                get_logger().error("megatron-recycle: no checkpoint of iteration %d: with %s it needs the workers that "
                                   "are missing (%s); training goes on", iteration, needs_all,
                                   ", ".join(session.missing()))
                return False
            background.drop()  # of a try that a failure has ended
            with (saving(save, folder, iteration, passing, save.name, save.whole),
                  _set(arguments, async_save=beside), background.collecting(stock) as requests):
                _forget_old_groups(loop, [*given, *keywords.values()])
                stock_save(iteration, *given, **keywords)
                for request in requests:
                    written = Written(session.worker.standing.committed, save.facts)
                    background.begin(iteration, written, folder, save.name, request)
            saved.add(iteration)
            return True

        if arguments.async_save:
            maybe_finalize_async_save(blocking=True)
        session.save(f"the checkpoint of iteration {iteration}", write,
                     otherwise=lambda: stock_save(iteration, *given, **keywords))

    def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
        def finish(save: Save) -> bool:
            background.finish(save, partial(give_name, save), blocking)
            return False

        if loop.get_args().async_save:
            session.save("what is written beside training", finish, otherwise=lambda: None)

    def give_name(save: Save, written: Unfinished) -> None:
        """Of a checkpoint that all have written."""
        with saving(save, written.folder, written.iteration, False, written.name,
                    lambda place: save.whole(place, written.written)):
            for finish in written.request.finalize_fns:
                finish()

    def compute_throughputs_and_append_to_progress_log(iteration: int, operations: Any) -> None:
        if iteration in saved:  # else there is no such checkpoint
            report(iteration, operations)

    log = loop.training_log

    def training_log(losses: Any, totals: Any, rate: Any, iteration: int, scale: Any, report_memory: bool,
                     *arguments: Any, **keywords: Any) -> bool:
        if session.catches_up:
            if "is_first_iteration" in keywords:
                keywords["is_first_iteration"] = False
            _pass_over(loop, lambda: log(losses, totals, rate, iteration, scale, report_memory, *arguments, **keywords))
            if iteration % loop.get_args().log_interval == 0:
                totals.clear()
            loop.get_timers()("interval-time").elapsed(reset=True)
            return report_memory
        return bool(log(losses, totals, rate, iteration, scale, report_memory, *arguments, **keywords))

    loop.training_log = training_log
    for name in ("get_tensorboard_writer", "get_wandb_writer"):
        setattr(loop, name, muted(getattr(loop, name), lambda: session.catches_up))
    step = loop.train_step

    def train_step(*arguments: Any, **keywords: Any) -> Any:
        with schedule.alone():  # all that it asks others for is known here, and stages need not wait for each other
            return step(*arguments, **keywords)

    loop.train_step = train_step
    # All stages have the same, and the gradient norm may not be known yet.
    loop.reduce_max_stat_across_model_parallel_group = lambda stat: stat
    loop.print_rank_last, loop.save_checkpoint = print_rank_last, save_checkpoint
    loop.maybe_finalize_async_save = maybe_finalize_async_save
    loop.compute_throughputs_and_append_to_progress_log = compute_throughputs_and_append_to_progress_log
