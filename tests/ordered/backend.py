"""How the runtime speaks to the ordered backend."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron_recycle.runtime.comm.backend import Backend, Work


class Ordered(Backend):
    """As NCCL's object, without streams."""

    ordered, host, quick = True, False, False

    def wait(self, work: Work, limit: timedelta | None, closed: Callable[[], bool], read: bool) -> None:
        work.wait()

    def abort(self, group: Any) -> None:
        group.abort()

    def begin_batch(self, group: Any) -> None:
        group._start_coalescing()

    def end_batch(self, group: Any) -> Work | None:
        work: Work | None = group._end_coalescing()
        return work
