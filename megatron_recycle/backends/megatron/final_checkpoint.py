"""The last checkpoint of a job that cannot go on, which stock Megatron-LM loads as any other.

The loop's own `save_checkpoint` writes it, and sees the live workers only: so the first of each stage writes that
stage, and a worker that is lost meanwhile frees the others. A checkpoint holds counters beside model and optimizer
(samples read, the scheduler's steps). Each worker's loop has its own count, which may be an iteration ahead or behind,
or far behind in a joiner: so counters are computed anew, from the job's beginning.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_recycle.backends.megatron.atomic_checkpoint import TRACKER, place_of, remove_parts
from megatron_recycle.backends.megatron.skipped_iterations import Gaps, PassedOver
from megatron_recycle.errors import RecycleError, SaveError
from megatron_recycle.observe.disk import unwritten
from megatron_recycle.runtime.comm.handles import Groups, is_broken
from megatron_recycle.runtime.comm.reduction import count

_BEGINNING = "recycle_beginning"


@dataclass(frozen=True)
class Beginning:
    """The objects that the loop trains, and its counters when it began."""

    parts: Mapping[str, Any]
    """Arguments of Megatron-LM's `train`, by name."""
    iteration: int
    samples: int
    validation_samples: int
    operations: float
    steps: int
    """Steps of the learning rate's scheduler, in samples."""


def remember(loop: Any, stock: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
    """Replacement of ``stock``, the `train` of Megatron-LM's module ``loop``: records the state for `beginning_of`."""
    parts, now = inspect.signature(stock).bind(*given, **keywords).arguments, loop.get_args()
    setattr(loop, _BEGINNING, Beginning(
        parts, now.iteration, now.consumed_train_samples, now.consumed_valid_samples,
        now.num_floating_point_operations_so_far, parts["opt_param_scheduler"].num_steps))
    return stock(*given, **keywords)


def beginning_of(loop: Any) -> Beginning | None:
    """The start of the training of Megatron-LM's module ``loop``; None: it has not begun, or no such module."""
    return getattr(loop, _BEGINNING, None)


class LastCheckpoint:
    """Knows where the loop saves, and saves there.

    Args:
        loop: Megatron-LM's module.
        beginning: of its training.
        wanted: the folder that the configuration names; None: the loop's own (``--save``).
        among: a block in which Megatron and torch see the live workers only.
        beside: a block in which stock writes the checkpoint of an iteration into a folder as in `atomic_checkpoint`.
        microbatches: of one pipeline that are trained with, before iteration n of this job.
        gaps: between those.
        skipped: gives iterations of this job whose step was left out (fp16), which the scheduler does not count.
    """

    def __init__(self, loop: Any, beginning: Beginning, wanted: str | None,
                 among: Callable[[Groups], AbstractContextManager[None]],
                 beside: Callable[[str, int], AbstractContextManager[None]],
                 microbatches: Callable[[int], int], gaps: Gaps,
                 skipped: Callable[[], Collection[int]] = frozenset) -> None:
        self._loop = loop
        self._begun = beginning
        self._wanted = wanted
        self._among = among
        self._beside = beside
        self._microbatches, self._gaps = microbatches, gaps
        self._passed = PassedOver(loop.get_args().iterations_to_skip, beginning.iteration)
        self._skipped = skipped
        self._stock_save: Callable[..., Any] = loop.save_checkpoint
        self._own: set[Path] = set()
        """Checkpoints that this job has written, or begun when they were not the newest one: whole once named the
        newest."""

    @property
    def folder(self) -> str | None:
        """The folder of a last checkpoint; None if no folder is known."""
        return self._wanted or self._loop.get_args().save

    @contextmanager
    def saving(self, iteration: int) -> Iterator[None]:
        """A block in which the loop saves to its own folder."""
        with self._writing(self._loop.get_args().save, iteration):
            yield

    def write(self, groups: Groups, committed: int) -> str:
        """Write this worker's part of the state after iteration ``committed`` (of this job, from 0), at the same time
        as all of ``groups``. Returns the checkpoint's folder, or nothing if another worker could not write its part.

        Raises RecycleError where no checkpoint is possible, SaveError where this worker cannot write, GenerationOver if
        another worker is lost before anything is written, and stock's other errors.
        """
        folder, iteration = self.folder, self._passed.after(committed + 1)
        if folder is None:
            raise RecycleError("nothing says where to; give --save DIR, or --recycle-emergency-checkpoint DIR")
        place = place_of(folder, iteration)
        mine, newest = count(groups.control, place in self._own, _newest(folder) == iteration)
        if newest and not mine:  # of an earlier job, and whole: it stays as it is
            raise RecycleError(f"{place} is there already, of an earlier job")
        if newest:
            return str(place)
        arguments = self._loop.get_args()
        if arguments.data_parallel_random_init and groups.control.size < arguments.world_size:
            raise RecycleError("with --data-parallel-random-init it needs all workers, and some are missing; "
                               f"{_to_go_back_to(folder)}")
        try:
            with self._among(groups), self._writing(folder, iteration), self._beside(folder, iteration):
                self._save(arguments, folder, iteration, committed + 1)
        except CheckpointException as error:  # a BaseException, but no Exception
            groups.abort()
            if not error.failures:
                return ""
            _raise_named(first_failure(error), place)
            raise RuntimeError(what_failed(error)) from error
        except BaseException as error:
            if isinstance(error, RuntimeError) and is_broken(error):
                return ""  # the coordinator knows of the failed worker
            groups.abort()  # the others wait for this worker
            _raise_named(error, place)
            raise
        return str(place)

    def _save(self, arguments: Any, folder: str, iteration: int, done: int) -> None:
        """Save; settings stay changed, since training ends here."""
        loop, begun, scheduler = self._loop, self._begun, self._begun.parts["opt_param_scheduler"]
        size = arguments.micro_batch_size * arguments.data_parallel_size
        arguments.save, arguments.curr_iteration, arguments.async_save = folder, iteration - 1, False
        samples, operations = self._rewind(scheduler, loop.get_rerun_state_machine(), size, done,
                                           lambda batch: loop.num_floating_point_operations(arguments, batch))
        passed = size * self._gaps.before(self._microbatches(done) - 1)  # without the gap that comes next
        arguments.consumed_train_samples = begun.samples + samples + passed
        arguments.consumed_valid_samples = begun.validation_samples + self._evaluated(arguments, done)
        self._stock_save(iteration, begun.parts["model"], begun.parts["optimizer"], scheduler, operations, {},
                         train_data_iterator=begun.parts["train_data_iterator"],
                         preprocess_common_state_dict_fn=loop.preprocess_common_state_dict)

    def _rewind(self, scheduler: Any, machine: Any, size: int, done: int,
                operations: Callable[[int], float]) -> tuple[int, float]:
        """Set the rates' ``scheduler`` to its state after ``done`` iterations, and the re-run ``machine`` to rest.
        Returns the samples trained with, and the floating-point operations so far.

        Args:
            size: samples of one micro-batch of all pipelines.
            operations: of an iteration with so many samples.
        """
        before = [size * self._microbatches(number) for number in range(done + 1)]
        scheduler.num_steps = self._begun.steps + before[done] - sum(
            before[number + 1] - before[number] for number in self._skipped() if number < done)
        scheduler.step(increment=0)
        machine.state = type(machine.state).NOT_RUNNING_YET  # otherwise it would save the iteration under way
        total = self._begun.operations
        for begin, end in pairwise(before):  # summed as in the loop
            total += operations(end - begin)
        return before[done], total

    def _evaluated(self, arguments: Any, done: int) -> int:
        """Samples that the evaluations up to the last of ``done`` iterations read, including the one after it."""
        if not (arguments.eval_interval and arguments.do_valid):
            return 0
        times = sum(self._passed.after(number) % arguments.eval_interval == 0 for number in range(1, done + 1))
        each = arguments.eval_iters
        return times * arguments.global_batch_size * (sum(each) if isinstance(each, list) else each)

    @contextmanager
    def _writing(self, folder: str, iteration: int) -> Iterator[None]:
        place = place_of(folder, iteration)
        if _newest(folder) != iteration:
            self._own.add(place)
        yield
        self._own.add(place)


def _raise_named(error: BaseException, place: Path) -> None:
    """Raises SaveError if ``error`` comes from writing files of the checkpoint ``place``."""
    if (reason := unwritten(error, place)) is not None:
        raise SaveError(reason, partial(remove_parts, place)) from error


def first_failure(error: CheckpointException) -> BaseException:
    """The error of the first rank that could not write; requires one."""
    return next(iter(error.failures.values()))[0]


def what_failed(error: CheckpointException) -> str:
    """The errors of all ranks that could not write, in one line."""
    return "; ".join(f"{type(failure).__name__}: {failure}" for failure, _ in error.failures.values())


def _newest(folder: str) -> int | None:
    """The iteration of the default checkpoint to load."""
    try:
        return int((Path(folder) / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def _to_go_back_to(folder: str) -> str:
    newest = _newest(folder)
    return f"{folder} has no other one" if newest is None else f"the newest one in {folder} is of iteration {newest}"
