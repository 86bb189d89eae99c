"""Megatron-LM's asynchronous checkpoints (`--async-save`): written beside training, and named once all of it is there.

Stock prepares such a checkpoint together, and hands out what is left to be done as a request: a function that writes
this rank's files from a copy, and others that all ranks call in the end. The first runs in a process of its own.
Before each iteration all workers tell each other how far they are, and when all have written, name the checkpoint
together: a pass of its own each time, whether there is anything to name or not, since a worker that comes in counts
them. A checkpoint needs the files of all who have prepared it: where one of them is lost, or another has come in, it
is given up, and the one before stays the newest. Nothing of Megatron is imported before one is written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from megatron_recycle.backends.megatron.aside import place_of, remove_parts
from megatron_recycle.errors import GenerationOver
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.saving import Save, Written

_WRITERS = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        iteration: the one that the loop counts.
        written: what the runtime knows of it.
        members: those who have prepared it.
        folder: where the loop saves.
        name: of the try, which no other has.
        request: Megatron's.
        writer: Megatron's, which has the process.
    """

    iteration: int
    written: Written
    members: Collection[Worker]
    folder: str
    name: str
    request: Any
    writer: Any

    @property
    def busy(self) -> bool:
        """Whether this rank's files are still being written."""
        return self.writer.process is not None and self.writer.process.is_alive()


class Background:
    """The checkpoint that is being written, if there is one.

    Args:
        members: gives the workers that are left.
        speaks: whether this worker says what is said once.
        forget: called with the iteration (the runtime's) of one that is given up.
    """

    def __init__(self, members: Callable[[], Collection[Worker]], speaks: Callable[[], bool],
                 forget: Callable[[int], None]) -> None:
        self._members, self._speaks, self._forget = members, speaks, forget
        self._now: Unfinished | None = None
        self._naming: Unfinished | None = None

    def begin(self, iteration: int, written: Written, folder: str, name: str, request: Any) -> None:
        """Write this rank's files of ``request`` beside training; the rest is as in `Unfinished`. There is no other
        one."""
        self._naming = None
        self._now = Unfinished(iteration, written, self._members(), folder, name, request, _started(request))

    def finish(self, save: Save, name: Callable[[Unfinished], None], wait: bool) -> None:
        """Name the checkpoint, if all have written it; by all members of ``save`` together.

        Args:
            name: carries that out; called on all.
            wait: for those that still write.

        Raises GenerationOver, and what ``name`` raises.
        """
        now, groups = self._now, save.generation.groups
        mine = now is not None and now.members == groups.members
        while True:
            have, busy = count(groups.control, mine, now is not None and now.busy)
            if now is None or have < groups.control.size:
                self.drop("workers have gone or come since it was begun")
                return
            if not busy:
                break
            if not wait:
                return
            save.check()
            time.sleep(_LOOK_SECONDS)
        self._now, self._naming = None, now  # what it has written can be asked for once
        now.writer.close()
        try:
            name(now)
        except GenerationOver:
            get_logger().error("megatron-recycle: the checkpoint of iteration %d was about to get its name when "
                               "others failed: unless it has it, it is given up; training goes on", now.iteration)
            raise
        self._naming = None

    def unwritten(self) -> None:
        """All know that a part of the one that was about to get its name could not be written."""
        now, self._naming = self._naming, None
        if now is not None:
            self._forget(now.written.iteration)
            remove_parts(place_of(now.folder, now.iteration))

    def drop(self, why: str = "") -> None:
        """Give up what is being written. ``why``: for the log, which has nothing without."""
        now, self._now = self._now, None
        if now is None:
            return
        if (process := now.writer.process) is not None:
            process.kill()
            process.join()
        if (module := sys.modules.get(_WRITERS)) is not None:
            module._results_queue = None  # type: ignore[attr-defined] # may hold what that process has told
        self._forget(now.written.iteration)
        if why and self._speaks():
            remove_parts(place_of(now.folder, now.iteration))
            get_logger().error("megatron-recycle: the checkpoint of iteration %d, which was being written beside "
                               "training, is given up: %s. The one before stays the newest; training goes on",
                               now.iteration, why)


def _started(request: Any) -> Any:
    """Megatron's object that carries ``request`` out in a process of its own."""
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

    writer = TemporalAsyncCaller()
    writer.schedule_async_call(request)
    return writer
