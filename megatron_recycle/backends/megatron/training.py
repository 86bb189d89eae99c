"""Megatron-LM's own training loop (`megatron.training`, not in the pip package), from its set-up on.

A job loads a checkpoint once, at its start. A joiner that loaded a newer one would be ahead of the job: in data, in the
learning rate's schedule, in its loop. So a joiner loads nothing. It begins where the job began, as the set-up record
says, passes through the job's past iterations, and gets its parameters from its peers.

In stock the last rank writes the log line and curves, and all ranks write checkpoints. Workers may be missing here, so
these functions are rebound in the loop's module. `backends.megatron.options` treats its options.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_recycle.backends.checkpoint_files import started_again
from megatron_recycle.backends.megatron import restore
from megatron_recycle.backends.megatron.atomic_checkpoint import aside
from megatron_recycle.backends.megatron.checkpoint_hooks import LoopSaves
from megatron_recycle.backends.megatron.final_checkpoint import LastCheckpoint, beginning_of, remember
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
from megatron_recycle.backends.megatron.skipped_iterations import Gaps, PassedOver
from megatron_recycle.backends.megatron.version import is_supported
from megatron_recycle.backends.megatron.writers import Writers
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.patching import replace, replaced
from megatron_recycle.backends.scalars import Scalars
from megatron_recycle.backends.session import Session
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.standalone import is_joining
from megatron_recycle.runtime.setup_record import SetUp

if TYPE_CHECKING:  # it imports Megatron
    from megatron_recycle.backends.megatron.groups import Kept

LOOP = "megatron.training.training"
CHECKPOINTS = "megatron.training.checkpointing"
UTILITIES = "megatron.training.utils"
MEANS = "average_losses_across_data_parallel_group"
_PLAIN = (bool, int, float, str, type(None))

_ALIKE = (
    "train_iters", "train_samples", "global_batch_size", "micro_batch_size", "seq_length", "seed", "split", "mock_data",
    "tokenizer_type", "eval_interval", "eval_iters", "exit_interval", "lr", "min_lr", "decoupled_lr",
    "decoupled_min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_style",
    "lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_warmup_init", "lr_warmup_fraction", "lr_warmup_iters",
    "lr_warmup_samples", "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
    "clip_grad", "optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum",
    "attention_dropout", "hidden_dropout", "calculate_per_token_loss", "reset_position_ids", "reset_attention_mask",
    "eod_mask_loss",
)
"""Arguments that decide the results of an iteration. Not here: the model's, which its parameters show, and paths, which
may differ by host."""
_BEGINNING = {
    "iteration": "the loop's first iteration", "consumed_train_samples": "training samples consumed before it",
    "consumed_valid_samples": "validation samples consumed before it",
}


def loop_in_use() -> Any:
    """Megatron-LM's module, if its loop trains; None: another loop does, which may have imported it."""
    loop: Any = sys.modules.get(LOOP)
    if loop is not None:
        with suppress(AssertionError):  # it has no arguments
            loop.get_args()
            return loop
    return None


# ---- until training begins


def install(options: Options) -> None:
    """Rebind the set-up functions of Megatron-LM's loop, right after its import; again: with other options. Unsupported
    versions stay as they are: they are refused when their arguments are read."""
    if not is_supported():
        return
    loop: Any = sys.modules[LOOP]
    replace(loop, "train", partial(remember, loop))
    replace(loop, "dummy_train_step", partial(_pass_over, loop))
    setup = options.setup
    if setup is None:
        return
    replace(loop, "load_checkpoint", partial(_load, loop, setup))
    keep_timers_apart(setup)
    if is_joining():
        # These write the job's past again, or count this process' own start.
        loop.write_args_to_tensorboard = lambda: None
        one_logger: Any = loop.one_logger_utils
        loop.get_one_logger = one_logger.get_one_logger = lambda: None


def settings() -> dict[str, Any]:
    """The Megatron-LM arguments that all workers must have alike, by flag. Call it when the first iteration begins.
    Empty if its loop is not loaded."""
    if (loop := loop_in_use()) is None:
        return {}
    arguments = vars(loop.get_args())
    flags = {f"--{name.replace('_', '-')}": arguments.get(name) for name in _ALIKE}
    return {**flags, **{words: arguments.get(name) for name, words in _BEGINNING.items()}}


def keep_timers_apart(setup: SetUp) -> None:
    """Keep the other ranks' set-up times out of the record: useless to a joiner, and too large with many ranks."""
    def apart(stock: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        with setup.apart():
            return stock(*arguments, **keywords)

    replace(sys.modules["megatron.core.timers"].Timers, "_get_elapsed_time_all_ranks", apart)


def _pass_over(loop: Any, stock: Callable[..., None], data_iterator: Any) -> None:
    """Replacement of `dummy_train_step`, which reads an iteration's data and trains nothing."""
    schedule = loop.get_forward_backward_func()
    if hasattr(schedule, "pass_over"):
        schedule.pass_over(loop.get_num_microbatches())
    else:
        stock(data_iterator)


def _load(loop: Any, setup: SetUp, stock: Callable[..., Any], ddp_model: Any, optimizer: Any, opt_param_scheduler: Any,
          *rest: Any, **keywords: Any) -> tuple[int, Any]:
    """Replacement of `load_checkpoint`."""
    arguments = loop.get_args()
    before = plain(vars(arguments))

    def load() -> tuple[int, Any]:
        chosen = restore.readable(sys.modules[CHECKPOINTS], arguments) if started_again() else None
        with nullcontext() if chosen is None else replaced(arguments, ckpt_step=chosen):
            found: tuple[int, Any] = stock(ddp_model, optimizer, opt_param_scheduler, *rest, **keywords)
        return found

    def changed() -> dict[str, Any]:
        return {name: value for name, value in plain(vars(arguments)).items()
                if name not in before or before[name] != value}

    def take(noted: Mapping[str, Any]) -> None:
        vars(arguments).update(noted)
        loop.update_num_microbatches(consumed_samples=arguments.consumed_train_samples, verbose=False)

    return load_once(setup, optimizer, opt_param_scheduler, load, changed, take)


def load_once(setup: SetUp, optimizer: Any, scheduler: Any, load: Callable[[], tuple[int, Any]],
              noted: Callable[[], dict[str, Any]], take: Callable[[Mapping[str, Any]], None]) -> tuple[int, Any]:
    """``load()`` a checkpoint at the job's start, and record its changes beside the model and the optimizer's state. A
    joiner makes these changes only. Returns the result of ``load``: the iteration, and operations so far.

    Args:
        noted: gives the changes to the loop's own state.
        take: makes these changes in a joiner.
    """
    def run() -> dict[str, Any]:
        before = _state(scheduler)
        with setup.apart():
            iteration, operations = load()
        after = _state(scheduler)
        return {"iteration": int(iteration), "operations": operations, "noted": noted(),
                "schedule": None if after == before else after,
                "groups": [] if optimizer is None else [plain(group) for group in optimizer.param_groups]}

    found = setup.note("load_checkpoint", run)
    if is_joining():
        take(found["noted"])
        for group, values in zip([] if optimizer is None else optimizer.param_groups, found["groups"], strict=True):
            group.update(values)
        if found["schedule"] is not None:
            scheduler.load_state_dict(found["schedule"])
    return found["iteration"], found["operations"]


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of ``values`` that JSON can hold."""
    return {name: value for name, value in values.items()
            if isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(one, _PLAIN) for one in value))}


def _state(scheduler: Any) -> dict[str, Any] | None:
    return None if scheduler is None else plain(scheduler.state_dict())


def check_arguments(arguments: Any, chunks: int = 1) -> list[str]:
    """Judge Megatron-LM's ``arguments`` and change some of them; returns a line for each change. ``chunks``: chunks per
    stage that the plugin is to make.

    Raises UnsupportedError listing all unsupported arguments.
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
    """Lines on options that are off under this plugin and keep their value: the user has read them (`check_arguments`),
    and another check of the same options would repeat them."""
    if (loop := loop_in_use()) is None:
        return []
    return apply(ANYWHERE, [SimpleNamespace(**vars(loop.get_args()))])[1]


def keep_batch(arguments: Any, microbatches: int | None) -> list[str]:
    """Keep the global batch of a job started again with another number of pipelines, where the script leaves it to
    Megatron (one micro-batch each); returns the line on that. ``microbatches``: of an iteration; None: not started
    again."""
    if microbatches is None or (wanted := microbatches * arguments.micro_batch_size) == arguments.global_batch_size:
        return []
    before, arguments.global_batch_size = arguments.global_batch_size, wanted
    if getattr(arguments, "eval_global_batch_size", None) == before:  # core 0.18 copies the global batch size
        arguments.eval_global_batch_size = wanted
    return [f"global_batch_size is {wanted} and not {before}: the job was started again, and keeps its batch"]


# ---- the schedule's queries to its loop


def largest(microbatches: int) -> int:
    """The micro-batches of a pipeline in the largest iteration of a job that begins with ``microbatches``. With
    --rampup-batch-size the last iterations, and evaluations, are the largest."""
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
    """The writer of a last checkpoint by the loop's own functions; None if another loop trains. Call it before
    `take_over`. Arguments as those of `LastCheckpoint`."""
    loop = loop_in_use()
    beginning = beginning_of(loop)
    return None if beginning is None else LastCheckpoint(
        loop, beginning, wanted, among, lambda folder, iteration: aside(
            sys.modules[CHECKPOINTS], folder, iteration, "last", lambda place: None), microbatches, gaps, skipped)


def tell_validations() -> None:
    """Broadcast the length of ``--full-validation`` from the loop's first rank at the start. Stock does so before each
    evaluation, when that rank may be dead."""
    loop: Any = sys.modules.get(LOOP)
    if loop is None or not loop.get_args().full_validation:
        return
    arguments = loop.get_args()
    own = arguments.eval_iters if isinstance(arguments.eval_iters, list) else [arguments.eval_iters]
    lengths = torch.tensor([one or 0 for one in own], dtype=torch.long, device=torch.cuda.current_device())
    dist.broadcast(lengths, 0)
    arguments.eval_iters = lengths.tolist() if arguments.multiple_validation_sets else int(lengths[0])
    evaluate = loop.evaluate_and_print_results

    def evaluate_and_print_results(*given: Any, **keywords: Any) -> Any:
        with replaced(arguments, full_validation=False):  # the flag's only remaining effect is that broadcast
            return evaluate(*given, **keywords)

    loop.evaluate_and_print_results = evaluate_and_print_results


def way_back() -> Callable[[str, str], int] | None:
    """The loader of this job's own checkpoints into the trained model (`restore.load`); it returns the job's steps by
    then. Call it before `take_over`. None: checkpoints lack state that training needs, or another loop trains."""
    loop = loop_in_use()
    beginning = beginning_of(loop)
    if beginning is None or not restore.possible(loop.get_args()):
        return None
    passed = PassedOver(loop.get_args().iterations_to_skip, int(beginning.iteration))
    return lambda place, name: passed.trained(restore.load(loop, sys.modules[CHECKPOINTS], beginning, place, name))


def collections() -> tuple[Any, ...]:
    """The process-group collections that the loop keeps beside the models'."""
    return ()


def _log_of_training(loop: Any, session: Session, writers: Writers) -> Callable[..., bool]:
    """Replacement of the loop's `training_log`: writes nothing about iterations that other workers have logged, and
    adds the job's own numbers to the loop's."""
    log, scalars = loop.training_log, Scalars(session)

    def training_log(losses: Any, totals: Any, rate: Any, iteration: int, scale: Any, report_memory: bool,
                     *arguments: Any, **keywords: Any) -> bool:
        if session.catches_up:
            if "is_first_iteration" in keywords:
                keywords["is_first_iteration"] = False
            # Adds an iteration's numbers to its interval's line, which was written before this worker came in or is
            # still to come.
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


def print_line(message: str, is_logging_rank: Callable[[], bool], part: Callable[[], str]) -> None:
    """Replacement of a loop's `print_rank_last`: the logging rank prints, and adds the plugin's ``part`` to log
    lines."""
    if is_logging_rank():
        of_iteration = " iteration " in message and message.rstrip().endswith("|")
        print(f"{message}{part()}" if of_iteration else message, flush=True)


def take_over(session: Session, kept: Kept, last: LastCheckpoint | None, is_logging_rank: Callable[[], bool],
              part: Callable[[], str]) -> None:
    """Rebind the loop's names, if it is loaded.

    Args:
        kept: Megatron's groups.
        last: writes a last checkpoint, if that is possible.
        is_logging_rank: whether this worker writes the log line.
        part: gives the plugin's part of it.
    """
    loop = loop_in_use()
    if loop is None:
        return
    saves = LoopSaves(loop, sys.modules[CHECKPOINTS], session, kept, last)
    report, step = loop.compute_throughputs_and_append_to_progress_log, loop.train_step

    def compute_throughputs_and_append_to_progress_log(iteration: int, operations: Any) -> None:
        if iteration in saves.saved:  # else the checkpoint does not exist
            report(iteration, operations)

    def train_step(*arguments: Any, **keywords: Any) -> Any:
        with kept.alone():  # all answers of other ranks are known here, so that stages need not wait for each other
            return step(*arguments, **keywords)

    writers = Writers(loop.get_args, is_logging_rank)
    loop.get_tensorboard_writer, loop.get_wandb_writer = writers.tensorboard, writers.wandb
    loop.is_last_rank = is_logging_rank
    # The value is the same on all stages, and the gradient norm may not be known yet.
    loop.reduce_max_stat_across_model_parallel_group = lambda stat, group=None: stat
    loop.training_log = _log_of_training(loop, session, writers)
    report_own_losses()
    loop.train_step, loop.print_rank_last = train_step, partial(print_line, is_logging_rank=is_logging_rank, part=part)
    loop.save_checkpoint, loop.maybe_finalize_async_save = saves.save, saves.finish
    loop.compute_throughputs_and_append_to_progress_log = compute_throughputs_and_append_to_progress_log


class _Reported(torch.autograd.Function):
    """Numbers that are right to report, but wrong in a gradient."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError(f"what {MEANS}() returns is part of the loss: here it is this micro-batch's own mean, "
                               "which may be reported and no more. Leave it out of what is trained")


def own_losses(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The losses of one micro-batch, as one tensor (number of losses), for reports. Their gradient raises
    UnsupportedError."""
    numbers = torch.cat([loss.detach().clone().view(1) for loss in losses])
    made: torch.Tensor = _Reported.apply(numbers.requires_grad_())
    return made


def report_own_losses() -> None:
    """Report losses that a script averages over all pipelines, as pretrain_bert.py does: replace Megatron-LM's function
    by `own_losses`, wherever a script has imported it.

    A micro-batch may run on any worker at any time, so no other worker has a loss to average with then. Each
    micro-batch reports its own. The loop averages reports over the global batch, which gives the mean of these means.
    """
    stock = getattr(sys.modules.get(UTILITIES), MEANS, None)
    for module in list(sys.modules.values()):
        if stock is not None and getattr(module, "__dict__", {}).get(MEANS) is stock:
            setattr(module, MEANS, own_losses)
