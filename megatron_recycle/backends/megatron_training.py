"""Megatron-LM's own training loop (`megatron.training`, not in the pip package), once workers may be missing.

Its log line is written by the last rank, its date lines wait for all ranks, its checkpoints need every worker:
these are rebound in the loop's module. Options whose collectives would wait for a dead rank are refused.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron_recycle.errors import TransportAborted, UnsupportedError
from megatron_recycle.observe.log import get_logger

LOOP = "megatron.training.training"

_REFUSED = {
    "exit_signal_handler": "leave --exit-signal-handler out",
    "exit_duration_in_mins": "leave --exit-duration-in-mins out",
    "log_params_norm": "leave --log-params-norm out",
    "check_weight_hash_across_dp_replicas_interval": "leave --check-weight-hash-across-dp-replicas-interval out",
    "adlr_autoresume": "leave --adlr-autoresume out",
    "log_straggler": "leave --log-straggler out",
    "rampup_batch_size": "leave --rampup-batch-size out",
    "decrease_batch_size_if_needed": "leave --decrease-batch-size-if-needed out",
    "full_validation": "leave --full-validation out",
    "save_wgrads_interval": "leave --save-wgrads-interval out",
    "save_dgrads_interval": "leave --save-dgrads-interval out",
    "qk_clip": "leave --qk-clip out",
    "log_max_attention_logit": "leave --log-max-attention-logit out",
    "perform_rl_step": "leave --perform-rl-step out",
    "inprocess_restart": "leave --inprocess-restart out",
    "enable_ft_package": "leave --enable-ft-package out",
    "async_save": "leave --async-save out: the end of such a save is agreed upon in later iterations, by all ranks",
    "log_progress": "leave --log-progress out",
    "log_energy": "leave --log-energy out",
    "distributed_timeout_seconds_after_init": "leave --distributed-timeout-seconds-after-init out; see "
                                              "--recycle-transport-timeout",
    "iterations_to_skip": "leave --iterations-to-skip out: data is read by the iterations that are trained",
    "dsa_indexer_loss_coeff": "leave --dsa-indexer-loss-coeff out",
}
"""Option -> remedy, for what asks all ranks for something outside an iteration."""


class Schedule(Protocol):
    """What the loop's replacements ask of the plugin's schedule."""

    def speaks(self) -> bool:
        """Whether this worker writes the log line."""

    def log_part(self) -> str:
        """The plugin's part of it."""

    def catches_up(self) -> bool:
        """Whether the loop is at an iteration that the job had done before this worker came in."""

    def settle(self) -> None:
        """Wait until the last step is final."""

    def comes_of_failure(self, error: RuntimeError) -> bool:
        """Whether an operation over all ranks failed since one of them is gone."""

    def attached(self) -> AbstractContextManager[None]:
        """Inside the block Megatron's groups span all workers. Raises TransportAborted, or as torch does."""

    def missing(self) -> list[str]:
        """Workers that are not there any more."""


def check_arguments() -> None:
    """Raises UnsupportedError listing what Megatron-LM's arguments ask for that would wait for a dead rank."""
    if LOOP not in sys.modules:
        return
    arguments = sys.modules[LOOP].get_args()
    found = [f"{name}: {remedy}" for name, remedy in _REFUSED.items() if getattr(arguments, name, None)]
    if arguments.rerun_mode != "disabled":
        found.append(f"rerun_mode {arguments.rerun_mode}: give --rerun-mode disabled")
    if arguments.dataloader_type != "single":
        found.append(f"dataloader_type {arguments.dataloader_type}: give --dataloader-type single")
    if found:
        raise UnsupportedError("megatron-recycle does not support these of Megatron-LM's options yet:\n- "
                               + "\n- ".join(found))


def backend() -> str | None:
    """The process groups' backend that Megatron-LM's arguments ask for; None if its loop is not loaded."""
    return None if LOOP not in sys.modules else str(sys.modules[LOOP].get_args().distributed_backend)


def take_over(schedule: Schedule) -> None:
    """Rebind the loop's names, if it is loaded."""
    loop: Any = sys.modules.get(LOOP)
    if loop is None:
        return
    save = loop.save_checkpoint

    def print_rank_last(message: str) -> None:
        if schedule.speaks():
            print(f"{message}{schedule.log_part()}" if " iteration " in message and message.endswith("|") else message,
                  flush=True)

    def print_datetime(string: str, override_timestamp: float | None = None) -> None:
        now = loop.datetime.now() if override_timestamp is None else loop.datetime.fromtimestamp(override_timestamp)
        loop.print_rank_0(f"[{string}] datetime: {now:%Y-%m-%d %H:%M:%S} ")

    def save_checkpoint(iteration: int, *arguments: Any, **keywords: Any) -> Any:
        if schedule.catches_up():
            return None  # the others have
        schedule.settle()
        missing = schedule.missing()
        if missing:
            get_logger().error("megatron-recycle: no checkpoint of iteration %d: it needs the workers that are missing "
                               "(%s); training goes on", iteration, ", ".join(missing))
            return None
        try:
            with schedule.attached():
                return save(iteration, *arguments, **keywords)
        except (RuntimeError, TransportAborted) as error:
            if isinstance(error, RuntimeError) and not schedule.comes_of_failure(error):
                raise
            get_logger().error("megatron-recycle: the checkpoint of iteration %d was cut short by a failure (%s): what "
                               "it wrote is not complete; training goes on", iteration, error)
            return None

    # Its group has one member by now, and the gradient norm may not be known yet.
    loop.reduce_max_stat_across_model_parallel_group = lambda stat: stat
    loop.print_rank_last, loop.print_datetime, loop.save_checkpoint = print_rank_last, print_datetime, save_checkpoint
