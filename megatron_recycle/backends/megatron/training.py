"""Megatron-LM's own training loop (`megatron.training`, not in the pip package), once workers may be missing.

Its log line and curves are written by the last rank, its checkpoints by all of them: these are rebound in the loop's
module. `backends.megatron.options` treats its options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_recycle.backends.megatron import back
from megatron_recycle.backends.megatron.aside import aside
from megatron_recycle.backends.megatron.last import LastCheckpoint, beginning_of
from megatron_recycle.backends.megatron.options import (
    ALL_AT_ONCE,
    ANYWHERE,
    BY_CORE,
    OF_THE_LOOP,
    apply,
    message,
    other_evaluations,
    v_shaped,
    with_history,
)
from megatron_recycle.backends.megatron.passed import Gaps, PassedOver
from megatron_recycle.backends.megatron.saves import LoopSaves
from megatron_recycle.backends.megatron.writers import Writers
from megatron_recycle.backends.replacing import replaced
from megatron_recycle.backends.scalars import Scalars
from megatron_recycle.backends.session import Session
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.handles import Groups

if TYPE_CHECKING:  # which imports Megatron
    from megatron_recycle.backends.megatron.groups import Kept

LOOP = "megatron.training.training"
CHECKPOINTS = "megatron.training.checkpointing"
UTILITIES = "megatron.training.utils"
MEANS = "average_losses_across_data_parallel_group"


def loop_in_use() -> Any:
    """Megatron-LM's module, if it is its loop that trains; None: it is another, which may have imported it."""
    loop: Any = sys.modules.get(LOOP)
    if loop is not None:
        with suppress(AssertionError):  # it has been given no arguments
            loop.get_args()
            return loop
    return None


def check_arguments(arguments: Any, chunks: int = 1) -> list[str]:
    """Judge Megatron-LM's ``arguments`` and set some of them otherwise; returns the lines on those. ``chunks``: of each
    stage, that the plugin is to make.

    Raises UnsupportedError listing all that cannot be kept right.
    """
    beside = () if getattr(arguments, "ckpt_format", None) == "torch_dist" else (ALL_AT_ONCE,)
    writes = (BY_CORE,) if getattr(arguments, "async_save", False) else ()
    refused, changed = apply((*ANYWHERE, *OF_THE_LOOP, *beside, *writes), [arguments])
    refused += other_evaluations(arguments) + with_history(arguments)
    if chunks > 1:
        more, others = v_shaped(arguments)
        refused, changed = refused + more, changed + others
    if refused:
        raise UnsupportedError(message(refused))
    return changed


def told() -> list[str]:
    """The lines that the loop's user has read by now (`check_arguments`) and that another look at the same options
    would bring again: those of options that are off under this plugin and keep their value."""
    if (loop := loop_in_use()) is None:
        return []
    return apply(ANYWHERE, [SimpleNamespace(**vars(loop.get_args()))])[1]


def keep_batch(arguments: Any, microbatches: int | None) -> list[str]:
    """Keep the global batch of a job that was started again with another number of pipelines, where the script leaves
    it to Megatron (one micro-batch for each); returns the line on that. ``microbatches``: of an iteration; None: it was
    not started again."""
    if microbatches is None or (wanted := microbatches * arguments.micro_batch_size) == arguments.global_batch_size:
        return []
    before, arguments.global_batch_size = arguments.global_batch_size, wanted
    if getattr(arguments, "eval_global_batch_size", None) == before:  # which core 0.18 takes from it
        arguments.eval_global_batch_size = wanted
    return [f"global_batch_size is {wanted} and not {before}: the job was started again, and keeps its batch"]


def largest(microbatches: int) -> int:
    """The micro-batches of a pipeline in the largest iteration of a job that begins with ``microbatches``: with
    --rampup-batch-size those of the last ones, and of evaluations."""
    if (loop := loop_in_use()) is None:
        return microbatches
    arguments = loop.get_args()
    if arguments.rampup_batch_size is None:
        return microbatches
    return int(arguments.global_batch_size // (arguments.micro_batch_size * arguments.data_parallel_size))


def backend() -> str | None:
    """The process groups' backend that Megatron-LM's arguments ask for; None if its loop is not loaded."""
    return None if (loop := loop_in_use()) is None else str(loop.get_args().distributed_backend)


def last_checkpoint(wanted: str | None,
                    among: Callable[[Groups], AbstractContextManager[None]],
                    microbatches: Callable[[int], int], gaps: Gaps,
                    skipped: Callable[[], Collection[int]]) -> LastCheckpoint | None:
    """The writer of a last checkpoint with the loop's own functions, if it is the loop that trains; before `take_over`.
    The arguments are those of `LastCheckpoint`."""
    loop = loop_in_use()
    beginning = beginning_of(loop)
    return None if beginning is None else LastCheckpoint(
        loop, beginning, wanted, among, lambda folder, iteration: aside(
            sys.modules[CHECKPOINTS], folder, iteration, "last", lambda place: None), microbatches, gaps, skipped)


def tell_validations() -> None:
    """Have all ranks know how long ``--full-validation`` takes, at the start, as the loop's first rank tells the others
    before each evaluation: later it may be gone."""
    loop: Any = sys.modules.get(LOOP)
    if loop is None or not loop.get_args().full_validation:
        return
    arguments = loop.get_args()
    own = arguments.eval_iters if isinstance(arguments.eval_iters, list) else [arguments.eval_iters]
    told = torch.tensor([one or 0 for one in own], dtype=torch.long, device=torch.cuda.current_device())
    dist.broadcast(told, 0)
    arguments.eval_iters = told.tolist() if arguments.multiple_validation_sets else int(told[0])
    evaluate = loop.evaluate_and_print_results

    def evaluate_and_print_results(*given: Any, **keywords: Any) -> Any:
        with replaced(arguments, full_validation=False):  # which is asked for that alone
            return evaluate(*given, **keywords)

    loop.evaluate_and_print_results = evaluate_and_print_results


def way_back() -> Callable[[str, str], int] | None:
    """Loads one of the loop's own checkpoints of this job into what it trains (`back.load`), and returns how many steps
    the job had made by then; before `take_over`. None: they do not hold all that training needs, or another loop
    trains."""
    loop = loop_in_use()
    beginning = beginning_of(loop)
    if beginning is None or not back.possible(loop.get_args()):
        return None
    passed = PassedOver(loop.get_args().iterations_to_skip, int(beginning.iteration))
    return lambda place, name: passed.trained(back.load(loop, sys.modules[CHECKPOINTS], beginning, place, name))


def collections() -> tuple[Any, ...]:
    """Of process groups, that the loop keeps beside the models'."""
    return ()


def _log_of_training(loop: Any, session: Session, writers: Writers) -> Callable[..., bool]:
    """In place of the loop's `training_log`: nothing is written of iterations that the others have had, and the job's
    own numbers with those of the loop."""
    log, scalars = loop.training_log, Scalars(session)

    def training_log(losses: Any, totals: Any, rate: Any, iteration: int, scale: Any, report_memory: bool,
                     *arguments: Any, **keywords: Any) -> bool:
        if session.catches_up:
            if "is_first_iteration" in keywords:
                keywords["is_first_iteration"] = False
            # Adds up an iteration's numbers for the line of its interval, which was written before this worker came in,
            # or is still to be.
            with replaced(loop.get_args(), log_interval=sys.maxsize):
                log(losses, totals, rate, iteration, scale, report_memory, *arguments, **keywords)
            if iteration % loop.get_args().log_interval == 0:
                totals.clear()
            loop.get_timers()("interval-time").elapsed(reset=True)
            return report_memory
        report_memory = bool(log(losses, totals, rate, iteration, scale, report_memory, *arguments, **keywords))
        writers.write(scalars, iteration)
        return report_memory

    return training_log


def print_line(message: str, speaks: Callable[[], bool], part: Callable[[], str]) -> None:
    """In place of a loop's `print_rank_last`: whoever ``speaks`` prints it, the log line with the plugin's ``part``."""
    if speaks():
        of_iteration = " iteration " in message and message.rstrip().endswith("|")
        print(f"{message}{part()}" if of_iteration else message, flush=True)


def take_over(session: Session, kept: Kept, last: LastCheckpoint | None, speaks: Callable[[], bool],
              part: Callable[[], str]) -> None:
    """Rebind the loop's names, if it is loaded.

    Args:
        kept: Megatron's groups.
        last: writes a last checkpoint, if that is possible.
        speaks: whether this worker writes the log line.
        part: gives the plugin's part of it.
    """
    loop = loop_in_use()
    if loop is None:
        return
    saves = LoopSaves(loop, sys.modules[CHECKPOINTS], session, kept, last)
    report, step = loop.compute_throughputs_and_append_to_progress_log, loop.train_step

    def compute_throughputs_and_append_to_progress_log(iteration: int, operations: Any) -> None:
        if iteration in saves.saved:  # else there is no such checkpoint
            report(iteration, operations)

    def train_step(*arguments: Any, **keywords: Any) -> Any:
        with kept.alone():  # all that it asks others for is known here, and stages need not wait for each other
            return step(*arguments, **keywords)

    writers = Writers(loop.get_args, speaks)
    loop.get_tensorboard_writer, loop.get_wandb_writer = writers.tensorboard, writers.wandb
    loop.is_last_rank = speaks
    # All stages have the same, and the gradient norm may not be known yet.
    loop.reduce_max_stat_across_model_parallel_group = lambda stat, group=None: stat
    loop.training_log = _log_of_training(loop, session, writers)
    report_own_losses()
    loop.train_step, loop.print_rank_last = train_step, partial(print_line, speaks=speaks, part=part)
    loop.save_checkpoint, loop.maybe_finalize_async_save = saves.save, saves.finish
    loop.compute_throughputs_and_append_to_progress_log = compute_throughputs_and_append_to_progress_log


class _Reported(torch.autograd.Function):
    """Numbers that are right to report, and would be wrong in a gradient."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError(f"what {MEANS}() returns is part of the loss: here it is this micro-batch's own mean, "
                               "which may be reported and no more. Leave it out of what is trained")


def own_losses(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of one micro-batch, as one tensor (number of losses), to be reported. Their gradient raises
    UnsupportedError."""
    numbers = torch.cat([loss.detach().clone().view(1) for loss in losses])
    made: torch.Tensor = _Reported.apply(numbers.requires_grad_())
    return made


def report_own_losses() -> None:
    """Losses that a script reports as means over all pipelines, as pretrain_bert.py does: put `own_losses` in the place
    of Megatron-LM's function, wherever a script has imported it.

    A micro-batch may run on any worker, and at any time, so that no other one has a loss to give just then. Each
    reports its own: the loop takes the mean over the whole global batch of what is reported, which is the mean of these
    means.
    """
    stock = getattr(sys.modules.get(UTILITIES), MEANS, None)
    for module in list(sys.modules.values()):
        if stock is not None and getattr(module, "__dict__", {}).get(MEANS) is stock:
            setattr(module, MEANS, own_losses)
