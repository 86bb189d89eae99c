"""How a process comes into a running job, and how it is asked to go."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.membership import Agent

JOIN = "RECYCLE_JOIN"
"""Variable that is 1 in the environment of a process that is to join a running job."""


def is_joining() -> bool:
    return os.environ.get(JOIN) == "1"


def stand_alone() -> None:
    """Let this process build its model and its engine without peers, who are in the middle of training.

    torch's default group becomes one that talks to nobody; the script's own `init_process_group()` then does nothing.
    Needs RANK and WORLD_SIZE in the environment.
    """
    if dist.is_initialized():
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    dist.init_process_group = _already_there


def _already_there(*args: Any, **keywords: Any) -> None:
    """In place of `torch.distributed.init_process_group`."""


def backend_for(device: torch.device) -> str:
    """Backend of the training's groups: that of the default group, or, where that is a stand-in, the usual one."""
    backend = dist.get_backend()
    if backend != "fake":
        return backend
    return "nccl" if device.type == "cuda" else "gloo"


def leave_on_sigterm(agent: Agent) -> None:
    """SIGTERM (a pre-emption, a spot notice) makes this worker leave the job at the next boundary.

    A second one, or one when the job is over or has not begun, ends the process at once. Left alone where the script
    has a handler of its own, and where another launcher than ours ends the siblings of a dead worker.
    """
    ours = "RECYCLE_COORDINATOR" in os.environ and threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def asked(number: int, frame: object) -> None:
        # Nothing here may take a lock: the thread that is interrupted may hold it.
        if agent.leaving or agent.ended is not None or agent.generation == 0:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            agent.leave()

    signal.signal(signal.SIGTERM, asked)
