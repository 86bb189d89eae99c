"""TensorBoard and Weights & Biases of Megatron-LM's loop, which go on when the rank that writes them dies.

Stock opens both on the last rank. Here the logging rank writes them; a new one opens the same folder and the same run.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_recycle.backends.patching import replaced
from megatron_recycle.environment import Launched
from megatron_recycle.observe.log import get_logger

VARIABLES = "megatron.training.global_vars"
_OPENED_BY = {"tensorboard_writer": "tensorboard_dir", "wandb_writer": "wandb_project"}
"""Megatron-LM's name of a writer -> the argument that opens one."""


def name_run(arguments: Any) -> None:
    """Before Megatron-LM opens a run of Weights & Biases, name it, so that the next writer goes on in the same run.
    Have it write every second instead of every 15, since unwritten data dies with its process."""
    folder = Launched.read().run_dir
    if folder and getattr(arguments, "wandb_project", ""):
        os.environ.setdefault("WANDB_RUN_ID", Path(folder).name)
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")


def unopened(arguments: Any) -> AbstractContextManager[None]:
    """A block in which Megatron-LM opens no writer, for a joiner: another worker still writes the same run."""
    return replaced(arguments, **{name: None for name in _OPENED_BY.values() if hasattr(arguments, name)})


class Writers:
    """Gives the loop its writers, on the current logging rank.

    Args:
        arguments: gives Megatron-LM's arguments.
        writes: whether this worker is the logging rank.
    """

    def __init__(self, arguments: Callable[[], Any], writes: Callable[[], bool]) -> None:
        self._arguments = arguments
        self._writes = writes
        self._failed: set[str] = set()

    def tensorboard(self) -> Any:
        """Replacement of `get_tensorboard_writer`."""
        return self._writer("tensorboard_writer")

    def wandb(self) -> Any:
        """Replacement of `get_wandb_writer`."""
        return self._writer("wandb_writer")

    def write(self, scalars: Callable[[], Mapping[str, float]], iteration: int) -> None:
        """Write these numbers of ``iteration`` beside the loop's own, and flush all of it to disk."""
        every = self._arguments().tensorboard_log_interval
        board, wandb = self.tensorboard(), self.wandb()
        if board is None and wandb is None:
            return
        values = scalars() if iteration % every == 0 else {}
        if board is not None:
            for name, value in values.items():
                board.add_scalar(name, value, iteration)
            board.flush()  # by default every two minutes: that data would die with the process
        if wandb is not None and values:
            wandb.log(dict(values), iteration)

    def _writer(self, name: str) -> Any:
        if not self._writes():
            return None
        variables: Any = sys.modules[VARIABLES]
        found = getattr(variables, f"get_{name}")()
        arguments = self._arguments()
        if found is None and getattr(arguments, _OPENED_BY[name], None) and name not in self._failed:
            try:
                getattr(variables, f"_set_{name}")(SimpleNamespace(**{**vars(arguments),
                                                                      "rank": arguments.world_size - 1}))
            except Exception as error:  # noqa: BLE001  (a curve is no reason to end a job)
                get_logger().warning("megatron-recycle: the %s cannot be opened on the worker that is to write now; "
                                     "training goes on without: %r", name.replace("_", " "), error)
            found = getattr(variables, f"get_{name}")()
            if found is None:
                self._failed.add(name)
        return found
