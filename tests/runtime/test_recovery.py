"""Waiting for other workers ends when the job does."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron_recycle.errors import JobEnded, TransportAborted
from megatron_recycle.membership.agent import Ended
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.groups import meet
from megatron_recycle.runtime.recovery import await_stop
from megatron_recycle.runtime.worker import StageWorker


def worker(ended: Ended | None) -> Any:
    """In generation 2, the last that was announced."""
    made = SimpleNamespace(generation=2, agent=SimpleNamespace(stop_generation=2, ended=ended),
                           config=SimpleNamespace(heartbeat_timeout=0.1, heartbeat_interval=0.1, report_timeout=0.1))
    made.agent.hint = lambda generation, error: None
    made.interrupted = MethodType(StageWorker.interrupted, made)
    return made


def test_a_worker_that_waits_for_a_dead_one_to_connect_learns_that_the_job_has_ended():
    """The last copy of a stage that dies while the others rebuild: no generation follows, only the end."""
    over = worker(Ended(1, "stage 1 has lost its last worker"))
    with pytest.raises(TransportAborted) as aborted:
        meet(HashStore(), Worker(0, 0), [Worker(0, 0), Worker(0, 1)], over.interrupted)
    with pytest.raises(JobEnded, match="stage 1 has lost its last worker"):
        await_stop(over, aborted.value)


def test_an_error_that_nobody_declares_a_failure_for_is_raised():
    with pytest.raises(TransportAborted, match="broken"):
        await_stop(worker(None), TransportAborted("broken"))
