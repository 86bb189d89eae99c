"""Megatron-LM's own training loop (`megatron.training`, not in the pip package), once workers may be missing.

Its log line is written by the last rank, its date lines wait for all ranks, its checkpoints need every worker: these
are rebound in the loop's module. `backends.megatron.options` treats its options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from megatron_recycle.backends.megatron.last import LastCheckpoint
from megatron_recycle.backends.megatron.options import ANYWHERE, OF_THE_LOOP, apply, message
from megatron_recycle.backends.session import Session
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.handles import Groups

LOOP = "megatron.training.training"


class PluginSchedule(Protocol):
    """The plugin's schedule, as the loop's replacements need it."""

    def speaks(self) -> bool:
        """Whether this worker writes the log line."""

    def log_part(self) -> str:
        """The plugin's part of it."""

    def attached(self) -> AbstractContextManager[None]:
        """Inside the block Megatron's groups span all workers. Raises GenerationOver, or as torch does."""

    def saving(self, iteration: int) -> AbstractContextManager[None]:
        """A block in which the loop saves ``iteration`` for good."""


def check_arguments(arguments: Any) -> list[str]:
    """Judge Megatron-LM's ``arguments`` and set some of them otherwise; returns the lines on those.

    Raises UnsupportedError listing all that cannot be kept right.
    """
    refused, changed = apply((*ANYWHERE, *OF_THE_LOOP), [arguments])
    if refused:
        raise UnsupportedError(message(refused))
    return changed


def keep_batch(arguments: Any, microbatches: int | None) -> list[str]:
    """Keep the global batch of a job that was started again with another number of pipelines, where the script leaves
    it to Megatron (one micro-batch for each); returns the line on that. ``microbatches``: of an iteration; None: it was
    not started again."""
    if microbatches is None or (wanted := microbatches * arguments.micro_batch_size) == arguments.global_batch_size:
        return []
    before, arguments.global_batch_size = arguments.global_batch_size, wanted
    return [f"global_batch_size is {wanted} and not {before}: the job was started again, and keeps its batch"]


def backend() -> str | None:
    """The process groups' backend that Megatron-LM's arguments ask for; None if its loop is not loaded."""
    return None if LOOP not in sys.modules else str(sys.modules[LOOP].get_args().distributed_backend)


def last_checkpoint(wanted: str | None,
                    among: Callable[[Groups], AbstractContextManager[None]]) -> LastCheckpoint | None:
    """The writer of a last checkpoint with the loop's own functions, if it is the loop that trains; before `take_over`.
    The arguments are those of `LastCheckpoint`."""
    loop: Any = sys.modules.get(LOOP)
    beginning = getattr(getattr(loop, "train", None), "beginning", None)
    return None if beginning is None else LastCheckpoint(loop, beginning, wanted, among)


def _forget_old_groups(loop: Any, arguments: Sequence[Any]) -> None:
    """Megatron keeps how it saves, with the group that shares the writing, from one checkpoint to the next: without a
    group that has become another one since."""
    group = loop.mpu.get_data_parallel_group(with_context_parallel=True)
    for context in (argument for argument in arguments if isinstance(argument, dict)):
        if getattr(context.get("save_strategy"), "parallelization_group", group) is not group:
            del context["save_strategy"]


def muted(writer: Callable[[], Any], when: Callable[[], bool]) -> Callable[[], Any]:
    """In place of a function that gives a writer of logs, or None: None ``when`` there is nothing to be written."""
    return lambda: None if when() else writer()


def take_over(session: Session, schedule: PluginSchedule) -> None:
    """Rebind the loop's names, if it is loaded."""
    loop: Any = sys.modules.get(LOOP)
    if loop is None:
        return
    save = loop.save_checkpoint
    append, report = loop.append_to_progress_log, loop.compute_throughputs_and_append_to_progress_log
    saved: set[int] = set()

    def print_rank_last(message: str) -> None:
        if schedule.speaks():
            print(f"{message}{schedule.log_part()}" if " iteration " in message and message.endswith("|") else message,
                  flush=True)

    def print_datetime(string: str, override_timestamp: float | None = None) -> None:
        now = loop.datetime.now() if override_timestamp is None else loop.datetime.fromtimestamp(override_timestamp)
        loop.print_rank_0(f"[{string}] datetime: {now:%Y-%m-%d %H:%M:%S} ")

    def save_checkpoint(iteration: int, *arguments: Any, **keywords: Any) -> Any:
        if session.catches_up:
            return None  # the others have

        def write() -> Any:
            passing = keywords.get("non_persistent_ckpt", False)
            with schedule.attached(), nullcontext() if passing else schedule.saving(iteration):
                _forget_old_groups(loop, [*arguments, *keywords.values()])
                written = save(iteration, *arguments, **keywords)
            saved.add(iteration)
            return written

        return session.together(
            f"the checkpoint of iteration {iteration}", write, None,
            without=f"no checkpoint of iteration {iteration}: it needs the workers that are missing")

    def append_to_progress_log(string: str, barrier: bool = True) -> None:
        append(string, barrier=False)  # one rank writes; nothing is gained by waiting for the others

    def compute_throughputs_and_append_to_progress_log(iteration: int, operations: Any) -> None:
        if iteration in saved:  # else there is no such checkpoint
            report(iteration, operations)

    log = loop.training_log

    def training_log(losses: Any, totals: Any, rate: Any, iteration: int, scale: Any, report_memory: bool,
                     *arguments: Any, **keywords: Any) -> bool:
        if session.catches_up:
            loop.get_timers()("interval-time").elapsed(reset=True)
            return report_memory  # its numbers are those of a later iteration
        return bool(log(losses, totals, rate, iteration, scale, report_memory, *arguments, **keywords))

    loop.training_log = training_log
    for name in ("get_tensorboard_writer", "get_wandb_writer"):
        setattr(loop, name, muted(getattr(loop, name), lambda: session.catches_up))
    # Its group has one member by now, and the gradient norm may not be known yet.
    loop.reduce_max_stat_across_model_parallel_group = lambda stat: stat
    loop.print_rank_last, loop.print_datetime, loop.save_checkpoint = print_rank_last, print_datetime, save_checkpoint
    loop.append_to_progress_log = append_to_progress_log
    loop.compute_throughputs_and_append_to_progress_log = compute_throughputs_and_append_to_progress_log
