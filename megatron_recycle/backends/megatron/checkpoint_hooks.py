"""The checkpoints of Megatron-LM's own training loop, once workers may be missing.

The loop's functions write them, asked by all workers that are left and again after a failure: what they find in
Megatron's modules are the living ones' groups and a folder beside the checkpoint's own, until it is whole.

Asynchronous ones (`--async-save`) are written beside training, and named once all of it is there. Stock prepares such a
checkpoint together, and hands out what is left to be done as a request: a function that writes this rank's files from a
copy, and others that all ranks call in the end. The first runs in a process of its own. Before each iteration all
workers tell each other how far they are, and when all have written, name the checkpoint together: a pass of its own
each time, whether there is anything to name or not, since a worker that comes in counts them. A checkpoint needs the
files of all who have prepared it: where one of them is lost, or another has come in, it is given up, and the one before
stays the newest. Nothing of Megatron is imported before one is written.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_recycle.backends.megatron.atomic_checkpoint import aside, place_of, remove_parts
from megatron_recycle.backends.megatron.final_checkpoint import LastCheckpoint, first_failure, what_failed
from megatron_recycle.backends.patching import replaced
from megatron_recycle.backends.session import Session
from megatron_recycle.errors import GenerationOver
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.saving import Save, Written

if TYPE_CHECKING:  # which imports Megatron
    from megatron_recycle.backends.megatron.groups import Kept

_OF_GROUP = "recycle_group"
_WRITERS = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_LOOK_SECONDS = 0.1


class LoopSaves:
    """What stands in place of the loop's `save_checkpoint` and `maybe_finalize_async_save`.

    Args:
        loop: `megatron.training.training`, with the functions that are stock's.
        stock: `megatron.training.checkpointing`.
        session: of the job.
        kept: Megatron's groups.
        last: writes a last checkpoint, and has to know of others; None: there is no such thing.

    Attributes:
        saved: iterations that this worker has seen saved.
    """

    def __init__(self, loop: Any, stock: Any, session: Session, kept: Kept, last: LastCheckpoint | None) -> None:
        self.saved: set[int] = set()
        self._loop = loop
        self._stock = stock
        self._save = loop.save_checkpoint
        self._session = session
        self._kept, self._last = kept, last
        self._background = Background(session.live, session.is_logging_rank, session.worker.give_up_checkpoint)

    def save(self, iteration: int, *given: Any, **keywords: Any) -> None:
        """As stock's `save_checkpoint`."""
        if self._loop.get_args().async_save:
            self.finish(blocking=True)
        passing = bool(keywords.get("non_persistent_ckpt", False))

        def clear() -> None:
            self._background.drop()
            remove_parts(place_of(folder_of(self._loop.get_args(), passing, self._stock), iteration))

        self._session.save(f"the checkpoint of iteration {iteration}",
                           lambda save: self._write(save, iteration, passing, given, keywords), clear,
                           otherwise=lambda: self._save(iteration, *given, **keywords))

    def finish(self, blocking: bool = False, terminate: bool = False) -> None:
        """As stock's `maybe_finalize_async_save`."""
        def finish(save: Save) -> bool:
            self._background.finish(save, partial(self._give_name, save), blocking)
            return False

        if self._loop.get_args().async_save:
            self._session.save("what is written beside training", finish, self._background.unwritten,
                               otherwise=lambda: None, ends=True)

    def _write(self, save: Save, iteration: int, passing: bool, given: Sequence[Any], keywords: dict[str, Any]) -> bool:
        """Whether there is a checkpoint then. ``passing``: one that the next one of its kind takes the place of."""
        arguments = self._loop.get_args()
        groups = save.generation.groups
        needs_all = _needs_all(arguments, passing) if groups.control.size < arguments.world_size else None
        if needs_all is not None:
            get_logger().error("megatron-recycle: no checkpoint of iteration %d: with %s it needs the workers that "
                               "are missing (%s); training goes on", iteration, needs_all,
                               ", ".join(self._session.missing()))
            return False
        folder, beside = folder_of(arguments, passing, self._stock), arguments.async_save and not passing
        self._background.drop()  # of a try that a failure has ended
        requests: list[Any] = []
        with (writing(save, self._kept, None if passing else self._last, folder, iteration),
              aside(self._stock, folder, iteration, save.name, save.whole),
              replaced(arguments, async_save=beside), replaced(self._stock, schedule_async_save=requests.append)):
            forget_old_groups([*given, *keywords.values()])
            # Newer loops name the groups, which have members that may be gone.
            self._save(iteration, *given, **{name: self._kept.now(value) for name, value in keywords.items()})
            for request in requests:
                written = Written(self._session.worker.standing.committed, save.facts)
                self._background.begin(iteration, written, folder, save.name, request)
        self.saved.add(iteration)
        return True

    def _give_name(self, save: Save, written: Unfinished) -> None:
        """Of a checkpoint that all have written."""
        with (writing(save, self._kept, self._last, written.folder, written.iteration),
              aside(self._stock, written.folder, written.iteration, written.name,
                    lambda place: save.whole(place, written.written))):
            for finish in written.request.finalize_fns:
                finish()


def folder_of(settings: Any, passing: bool, stock: Any) -> str:
    """Where a loop saves, by its ``settings``. ``passing``: a checkpoint that the next one of its kind takes the place
    of; ``stock``: the loop's module of checkpoints."""
    if not passing:
        return str(settings.save)
    return str(settings.non_persistent_global_ckpt_dir or os.path.join(
        settings.save, stock._NON_PERSISTENT_CKPT_SUBDIR))


@contextmanager
def writing(save: Save, kept: Kept, last: LastCheckpoint | None, folder: str, iteration: int) -> Iterator[None]:
    """A block in which the members of ``save``, who are all that Megatron sees, write or name a checkpoint, of which
    ``last`` is told. An error of Megatron's that is no Exception becomes one, if it is no failure of ``save``'s."""
    with (save.each_writes(str(place_of(folder, iteration))), kept.of_those_left(save.generation.groups),
          nullcontext() if last is None else last.saving(iteration)):
        try:
            yield
        except CheckpointException as error:
            save.check()
            if not error.failures:
                raise GenerationOver("another worker cannot write its part of the checkpoint") from error
            raise RuntimeError(what_failed(error)) from first_failure(error)


def _needs_all(arguments: Any, passing: bool) -> str | None:
    """The option with which no worker's part of a checkpoint is another one's; None: there is none."""
    if arguments.data_parallel_random_init:
        return "--data-parallel-random-init"
    return "--non-persistent-ckpt-type local" if passing and arguments.non_persistent_ckpt_type == "local" else None


def forget_old_groups(arguments: Iterable[Any]) -> None:
    """Megatron keeps how it saves, with the group that shares the writing, from one checkpoint to the next, among the
    ``arguments`` of its function: not with other members."""
    state: Any = sys.modules["megatron.core.parallel_state"]
    group = state.get_data_parallel_group(with_context_parallel=True)
    for context in (argument for argument in arguments if isinstance(argument, dict)):
        if context.get(_OF_GROUP) is not group:
            context.pop("save_strategy", None)
            context[_OF_GROUP] = group


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
        is_logging_rank: whether this worker says what is said once.
        forget: called with the iteration (the runtime's) of one that is given up.
    """

    def __init__(self, members: Callable[[], Collection[Worker]], is_logging_rank: Callable[[], bool],
                 forget: Callable[[int], None]) -> None:
        self._members, self._logs_now, self._forget = members, is_logging_rank, forget
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
        if why and self._logs_now():
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
