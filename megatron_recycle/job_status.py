"""Job state that a script may query, and job events for its callbacks.

A backend's session reports the state (`report`). Events are the difference between two reports (`changes`), delivered
at the end of the script's call to the engine in which they happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.observe.log import get_logger

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The job, as one process knows it.

    Attributes:
        worker: its position, "d:s" (pipeline and stage, from 0).
        rank: its global rank.
        generation: number of the membership, from 1; each failure and each worker that joins raises it.
        iteration: the last iteration that the script has asked for, from 0; -1 before the first.
        committed: the last iteration that counts on all workers despite any later failure; -1 for none.
        live: positions that have a worker, in the order of their ranks.
        missing: positions that have none.
        last_copies: stages with one worker left, in a job of several pipelines.
        lives: process ("d:s", with tensor parallelism its part, "d:s.p") -> a text unique to each process that ever
            takes that position.
    """

    worker: str
    rank: int
    generation: int
    iteration: int
    committed: int
    live: tuple[str, ...]
    missing: tuple[str, ...] = ()
    last_copies: tuple[int, ...] = ()
    lives: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def degraded(self) -> bool:
        """Whether some position has no worker, so that other workers do its work."""
        return bool(self.missing)

    @property
    def is_logging_rank(self) -> bool:
        """Whether this is the logging rank: the first of the live workers, for output that is wanted once per job. With
        tensor parallelism, all of its parts."""
        return self.live[:1] == (self.worker,)


Report = Callable[[], JobStatus]
Callback = Callable[[Event], None]


def changes(before: JobStatus, after: JobStatus, t: float) -> Iterator[dict[str, Any]]:
    """Events between two reports, in the words of `recycle watch`; ``t`` is the Unix time in seconds."""
    common = {"t": t, "generation": after.generation, "iteration": after.iteration, "live": len(after.live),
              "of": len(after.live) + len(after.missing)}
    replaced = {name.partition(".")[0] for name, life in before.lives.items() if after.lives.get(name, life) != life}
    lost = [name for name in (*after.live, *after.missing)
            if name in replaced or (name in after.missing and name not in before.missing)]
    joined = [name for name in after.live if name in replaced or name in before.missing]
    if lost:
        yield {"event": "lost", **common, "workers": lost}
    if joined:
        yield {"event": "joined", **common, "workers": joined}
    if after.generation > before.generation > 0 or lost or joined:
        yield {"event": "resumed", **common, "workers": list(after.live)}
    if fewer := [stage for stage in after.last_copies if stage not in before.last_copies]:
        yield {"event": "last_copy", **common, "stages": fewer,
               "workers": [name for name in after.live if int(name.partition(":")[2]) in fewer]}
    if before.missing and not after.missing:
        yield {"event": "whole", **common, "workers": list(after.live)}


class Telling:
    """Callbacks of one process's script, and the state last reported to them."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self._callbacks: list[Callback] = []
        self._last: JobStatus | None = None
        self._ended = False

    def reported_by(self, report: Report) -> None:
        """Use ``report`` for the job's state from now on."""
        self._report, self._last, self._ended = report, None, False

    def status(self) -> JobStatus | None:
        """The job's state; None: this process is in no job, or not yet."""
        return None if self._report is None else self._report()

    def add(self, callback: Callback) -> None:
        """Register ``callback``. Raises TypeError if it cannot be called."""
        if not callable(callback):
            raise TypeError(f"on_event({callback!r}): give a function that takes one event, a dict")
        self._callbacks.append(callback)

    def tell(self) -> None:
        """Call all callbacks with the events since the last time."""
        if self._report is None or not self._callbacks:
            return
        after, before = self._report(), self._last
        self._last = after
        if before is not None and after != before:
            for event in changes(before, after, time.time()):
                self._call(event)

    def end(self, status: int, message: str) -> None:
        """End the job for this process, with this exit status."""
        if not self._ended:
            self._ended = True
            self._call({"event": "ended", "t": time.time(), "status": status, "message": message})

    def _call(self, event: dict[str, Any]) -> None:
        for callback in self._callbacks:
            try:
                callback(dict(event))
            except Exception:  # noqa: BLE001  (training does not depend on it)
                get_logger().exception("megatron-recycle: a callback of on_event() has failed at %r; training goes on",
                                       event["event"])


HERE = Telling()
"""This process's."""
