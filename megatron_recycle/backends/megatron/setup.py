"""Megatron-LM's own script until training begins, at the job's start and in a process that joins later.

A job goes on from a checkpoint once, when it starts. Newer ones have been written since, and a process that joined from
one of them would be ahead of the job: in data, in the learning rate's schedule, in its loop. So one that joins loads
nothing. It begins where the job began, as the setup's record tells, passes through the iterations that the job has
behind it, and gets its parameters from its peers.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from megatron_recycle.backends.megatron import back
from megatron_recycle.backends.megatron.last import remember
from megatron_recycle.backends.megatron.training import CHECKPOINTS, LOOP, loop_in_use
from megatron_recycle.backends.megatron.version import is_supported
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.readable import started_again
from megatron_recycle.backends.replacing import replace, replaced
from megatron_recycle.runtime.comm.standalone import is_joining
from megatron_recycle.runtime.setup_record import SetUp

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
"""Arguments that decide what an iteration computes, beside the model's, which its parameters show, and paths, which
hosts may have of their own."""
_BEGINNING = {
    "iteration": "the loop's first iteration", "consumed_train_samples": "training samples consumed before it",
    "consumed_valid_samples": "validation samples consumed before it",
}


def install(options: Options) -> None:
    """Rebind what Megatron-LM's loop, which has just been imported, sets itself up with; again: with other options.
    Not in a version that is not supported: it is refused when its arguments are read."""
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
        # These write the past, or count this process' own start.
        loop.write_args_to_tensorboard = lambda: None
        one_logger: Any = loop.one_logger_utils
        loop.get_one_logger = one_logger.get_one_logger = lambda: None


def settings() -> dict[str, Any]:
    """The Megatron-LM arguments that all workers must have alike, by the names of its flags; to be asked when the first
    iteration begins. Empty if its loop is not loaded."""
    if (loop := loop_in_use()) is None:
        return {}
    arguments = vars(loop.get_args())
    flags = {f"--{name.replace('_', '-')}": arguments.get(name) for name in _ALIKE}
    return {**flags, **{words: arguments.get(name) for name, words in _BEGINNING.items()}}


def keep_timers_apart(setup: SetUp) -> None:
    """How long others took for their set-up is no news for one that joins, and too much to keep for many ranks."""
    def apart(stock: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        with setup.apart():
            return stock(*arguments, **keywords)

    replace(sys.modules["megatron.core.timers"].Timers, "_get_elapsed_time_all_ranks", apart)


def _pass_over(loop: Any, stock: Callable[..., None], data_iterator: Any) -> None:
    """In place of `dummy_train_step`, which reads an iteration's data and trains nothing."""
    schedule = loop.get_forward_backward_func()
    if hasattr(schedule, "pass_over"):
        schedule.pass_over(loop.get_num_microbatches())
    else:
        stock(data_iterator)


def _load(loop: Any, setup: SetUp, stock: Callable[..., Any], ddp_model: Any, optimizer: Any, opt_param_scheduler: Any,
          *rest: Any, **keywords: Any) -> tuple[int, Any]:
    """In place of `load_checkpoint`."""
    arguments = loop.get_args()
    before = plain(vars(arguments))

    def load() -> tuple[int, Any]:
        chosen = back.readable(sys.modules[CHECKPOINTS], arguments) if started_again() else None
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
    """``load()`` a checkpoint at the job's start, and note what that has changed beside the model and the optimizer's
    state; one that joins changes that alone. Returns what ``load`` did: the iteration, and operations so far.

    Args:
        noted: gives what it has changed of the loop's own.
        take: changes that in one that joins.
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
