"""Backwards that may defer weight gradients: the runtime's own, and checkpoints inside it.

While the runtime's backward runs, others may run inside it: of a checkpoint that recomputes layers, and of the user's
code, which takes gradients in a recomputed forward (force fields, gradient penalties) or in a function of its own
(reversible layers). The user's code looks at the gradients that it requests, so they have to be there. Autograd calls
each backward a graph task and numbers them, which tells them apart, whatever called them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch.autograd import graph

Queue = TypeVar("Queue")

_CHECKPOINTS = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing",
                "megatron.core.tensor_parallel.random", "megatron.mpu.random", "transformer_engine.pytorch.distributed",
                "fairscale.nn.checkpoint.checkpoint_activations")
"""Modules whose functions leave the gradients of parameters in ``.grad`` and look at those of their inputs only."""


def task_now() -> int:
    """The number of the graph task that this thread runs, or -1."""
    return torch._C._current_graph_task_id()


class Deferral(Generic[Queue]):
    """The queue of the runtime's backward, for the backwards that may use it."""

    def __init__(self) -> None:
        self._queue: Queue | None = None
        self._own: dict[int, bool] = {}
        """Known graph tasks, and whether they may defer."""

    @contextmanager
    def into(self, queue: Queue | None, roots: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside the block the backward from ``roots``, and checkpoints in it, may defer into ``queue``."""
        # Runs first in a graph task, before any layer calls `queue_for`.
        hooks = [] if queue is None else [root.register_hook(self._begun) for root in roots if root.requires_grad]
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None
            self._own.clear()
            for hook in hooks:
                hook.remove()

    def queue_for(self, made_in: int) -> Queue | None:
        """The queue for the weight gradient of a layer whose backward runs now; None: compute it at once.

        ``made_in``: the graph task in which its forward ran (`task_now`).
        """
        if self._queue is None:
            return None
        now = task_now()
        own = self._own.get(now)
        if own is None:
            own = self._own[now] = self._own.get(made_in, False) and _run_by_checkpoint()
        return self._queue if own else None

    def _begun(self, gradient: torch.Tensor) -> None:
        if not self._own:  # else it is a backward of the user's that goes through the same place
            self._own[task_now()] = True


def _run_by_checkpoint() -> bool:
    """Whether the innermost backward of this thread was called by the backward of a checkpoint."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not graph._engine_run_backward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    caller = frame and frame.f_back and frame.f_back.f_back  # past torch.autograd.backward
    return (caller is not None and caller.f_code.co_name == "backward"
            and caller.f_globals.get("__name__") in _CHECKPOINTS)
