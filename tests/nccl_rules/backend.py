"""How the runtime speaks to the ordered backend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from megatron_recycle.runtime.comm.backend import Backend, Work
from megatron_recycle.runtime.comm.cancellation import Wait


class Ordered(Backend):
    """As NCCL's object, without streams."""

    ordered, host, quick, lazy = True, False, False, True

    def wait(self, work: Work, limit: timedelta | None, wait: Wait, read: bool) -> None:
        wait.aside(work.wait)

    def abort(self, group: Any) -> None:
        group.abort()

    def connect(self, group: Any) -> None:
        group.connect()

    def begin_batch(self, group: Any) -> None:
        group._start_coalescing()

    def end_batch(self, group: Any) -> Work | None:
        work: Work | None = group._end_coalescing()
        return work
