"""The checkpoints of Megatron-LM's own training loop, once workers may be missing.

The loop's functions write them, called by all live workers, and again after a failure. In Megatron's modules they find
the live workers' groups, and a folder beside the checkpoint's own until it is whole.

Asynchronous checkpoints (`--async-save`) are written beside training, and named once complete. Stock prepares such a
checkpoint collectively, and returns the remaining work as a request: a function that writes this rank's files from a
copy, and others that all ranks call in the end. The first runs in a process of its own. Before each iteration all
workers exchange their progress; when all have written, they name the checkpoint together. This is one pass each time,
even if there is nothing to name, since a joiner counts passes. A checkpoint needs the files of all workers that
prepared it: if one is lost, or another comes in, it is given up, and the one before stays the newest. Nothing of
Megatron is imported before one is written.
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

if TYPE_CHECKING:  # it imports Megatron
    from megatron_recycle.backends.megatron.groups import Kept

_OF_GROUP = "recycle_group"
_WRITERS = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_LOOK_SECONDS = 0.1


class LoopSaves:
    """Replacements of the loop's `save_checkpoint` and `maybe_finalize_async_save`.

    Args:
        loop: `megatron.training.training`, with stock's functions.
        stock: `megatron.training.checkpointing`.
        session: of the job.
        kept: Megatron's groups.
        last: writes a last checkpoint, and must know of the others; None: not supported.

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
        """Write a checkpoint; returns whether it exists then. ``passing``: replaced by the next of its kind."""
        arguments = self._loop.get_args()
        groups = save.generation.groups
        needs_all = _needs_all(arguments, passing) if groups.control.size < arguments.world_size else None
        if needs_all is not None:
            get_logger().error("megatron-recycle: no checkpoint of iteration %d: with %s it needs the workers that "
                               "are missing (%s); training goes on", iteration, needs_all,
                               ", ".join(self._session.missing()))
            return False
        folder, beside = folder_of(arguments, passing, self._stock), arguments.async_save and not passing
        self._background.drop()  # left by a try that a failure has ended
        requests: list[Any] = []
        with (writing(save, self._kept, None if passing else self._last, folder, iteration),
              aside(self._stock, folder, iteration, save.name, save.whole),
              replaced(arguments, async_save=beside), replaced(self._stock, schedule_async_save=requests.append)):
            forget_old_groups([*given, *keywords.values()])
            # Newer loops pass groups, whose members may be dead.
            self._save(iteration, *given, **{name: self._kept.now(value) for name, value in keywords.items()})
            for request in requests:
                written = Written(self._session.worker.standing.committed, save.facts)
                self._background.begin(iteration, written, folder, save.name, request)
        self.saved.add(iteration)
        return True

    def _give_name(self, save: Save, written: Unfinished) -> None:
        """Name a checkpoint that all workers have written."""
        with (writing(save, self._kept, self._last, written.folder, written.iteration),
              aside(self._stock, written.folder, written.iteration, written.name,
                    lambda place: save.whole(place, written.written))):
            for finish in written.request.finalize_fns:
                finish()


def folder_of(settings: Any, passing: bool, stock: Any) -> str:
    """The folder that a loop saves to, by its ``settings``. ``passing``: a non-persistent checkpoint, replaced by the
    next of its kind; ``stock``: the loop's module of checkpoints."""
    if not passing:
        return str(settings.save)
    return str(settings.non_persistent_global_ckpt_dir or os.path.join(
        settings.save, stock._NON_PERSISTENT_CKPT_SUBDIR))


@contextmanager
def writing(save: Save, kept: Kept, last: LastCheckpoint | None, folder: str, iteration: int) -> Iterator[None]:
    """A block in which ``save``'s members, the only ones that Megatron sees, write or name a checkpoint; ``last`` is
    notified. A CheckpointException, which is no Exception, becomes one, unless ``save`` has failed."""
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
    """The option that makes each worker's part of a checkpoint unique to it; None: no such option is set."""
    if arguments.data_parallel_random_init:
        return "--data-parallel-random-init"
    return "--non-persistent-ckpt-type local" if passing and arguments.non_persistent_ckpt_type == "local" else None


def forget_old_groups(arguments: Iterable[Any]) -> None:
    """Drop saving strategies made for other members: Megatron caches them, with the group that shares the writing,
    among the ``arguments`` of its function from one checkpoint to the next."""
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
        iteration: by the loop's count.
        written: the runtime's facts about it.
        members: the workers that have prepared it.
        folder: where the loop saves.
        name: of the try, unique.
        request: Megatron's.
        writer: Megatron's, with the writing process.
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
        members: gives the live workers.
        is_logging_rank: whether this worker is the logging rank.
        forget: called with the (runtime's) iteration of a checkpoint that is given up.
    """

    def __init__(self, members: Callable[[], Collection[Worker]], is_logging_rank: Callable[[], bool],
                 forget: Callable[[int], None]) -> None:
        self._members, self._is_logging_rank, self._forget = members, is_logging_rank, forget
        self._now: Unfinished | None = None
        self._naming: Unfinished | None = None

    def begin(self, iteration: int, written: Written, folder: str, name: str, request: Any) -> None:
        """Write this rank's files of ``request`` beside training; other arguments as in `Unfinished`. No other write is
        pending."""
        self._naming = None
        self._now = Unfinished(iteration, written, self._members(), folder, name, request, _started(request))

    def finish(self, save: Save, name: Callable[[Unfinished], None], wait: bool) -> None:
        """Name the checkpoint, if all workers have written it. All members of ``save`` call this together.

        Args:
            name: carries that out; called on all.
            wait: for workers that are still writing.

        Raises GenerationOver, and the errors of ``name``.
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
        self._now, self._naming = None, now  # its results can be asked for only once
        now.writer.close()
        try:
            name(now)
        except GenerationOver:
            get_logger().error("megatron-recycle: the checkpoint of iteration %d was about to get its name when "
                               "others failed: unless it has it, it is given up; training goes on", now.iteration)
            raise
        self._naming = None

    def unwritten(self) -> None:
        """Forget the checkpoint that was being named: all workers know that a part of it could not be written."""
        now, self._naming = self._naming, None
        if now is not None:
            self._forget(now.written.iteration)
            remove_parts(place_of(now.folder, now.iteration))

    def drop(self, reason: str = "") -> None:
        """Give up the pending checkpoint. ``reason``: for the log; without it no line is logged."""
        now, self._now = self._now, None
        if now is None:
            return
        if (process := now.writer.process) is not None:
            process.kill()
            process.join()
        if (module := sys.modules.get(_WRITERS)) is not None:
            module._results_queue = None  # type: ignore[attr-defined] # may hold results of the killed process
        self._forget(now.written.iteration)
        if reason and self._is_logging_rank():
            remove_parts(place_of(now.folder, now.iteration))
            get_logger().error("megatron-recycle: the checkpoint of iteration %d, which was being written beside "
                               "training, is given up: %s. The one before stays the newest; training goes on",
                               now.iteration, reason)


def _started(request: Any) -> Any:
    """Megatron's object that runs ``request`` in a process of its own."""
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

    writer = TemporalAsyncCaller()
    writer.schedule_async_call(request)
    return writer
