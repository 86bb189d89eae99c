"""`eval_batch()` on any grid: forwards in the order of the plan, with each micro-batch's loss known to all workers.

A pipeline's micro-batches come from the script's iterators at its two ends, as in stock. Micro-batches that run
elsewhere are sent by a live end. If no end is left, the other pipelines' micro-batches are used where all of these are
equal, as with a plain list; otherwise copies of the iterator's loader read them (`LoaderSource`). Losses are added in
stock's order, from the first pipeline to the last: so the result has the same bits for any set of live workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_recycle.errors import DataError
from megatron_recycle.plan import Grid, Microbatch, Plan, Worker
from megatron_recycle.runtime.comm.comm import failing_ends
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.compute.data import Batch, Mapped, digest
from megatron_recycle.runtime.compute.loaders import LoaderSource
from megatron_recycle.runtime.compute.random_state import Seeds
from megatron_recycle.runtime.evaluation import losses
from megatron_recycle.runtime.place import Place


class EvaluationData:
    """The script's iterators of its evaluations, one after another.

    Args:
        place: of this worker, which reads the iterator if it is at an end of its pipeline. Parts other than the first
            may have none.
        seeds: random numbers for reading micro-batches.

    Attributes:
        ended: whether the iterator has ended before the evaluation.
        asked: pipeline and number of the last micro-batch asked for.
        failed: the reason why an evaluation was not possible; empty: an iterator has ended.
    """

    since = 0  # no recovery goes back behind a finished evaluation

    def __init__(self, place: Place, seeds: Seeds) -> None:
        self._me, self._grid, self._part = place.me, place.grid, place.part
        self._ends = 0, (len(place.placement) or place.grid.stages) - 1
        """The first chunk of the model and the last one."""
        self._reading = {0, place.loss_stage}
        """Their stages."""
        self._seeds = seeds
        self._reads = False
        self._iterator: Any = None
        self._source = LoaderSource(place.me.pipeline, seeds, anything=True)
        self._first = self._next = 0
        self.ended = False
        self.asked: tuple[int, int] | None = None
        self._shared: Mapping[Microbatch, Batch] = {}
        self._alike = False
        self.failed = ""

    def begin(self, iterator: Iterator[Any] | None, microbatches: int) -> None:
        """Begin an evaluation of ``microbatches`` per pipeline: takes them from ``iterator``, even if they are never
        used. Raises DataError where an iterator is needed and missing, and the iterator's errors."""
        self._first, self._next = self._next, self._next + microbatches
        self.ended, self._shared, self.failed = False, {}, ""
        self._reads = self._me.stage in self._reading and (iterator is not None or not self._part)
        if not self._reads:
            return
        if iterator is None:
            raise DataError("eval_batch() got no data iterator on the first or last stage of a pipeline")
        if iterator is not self._iterator:  # the same iterator goes on at its place
            self._iterator, self._source = iterator, LoaderSource(self._me.pipeline, self._seeds, anything=True)
            self._source.give(iterator, self._first)
        self._source.forget(self._me.pipeline, self._first)
        try:
            for number in range(self._first, self._next):
                self._source.batch(self._me.pipeline, number)
        except DataError as error:
            if not isinstance(error.__context__, StopIteration):
                raise
            self.ended, self._iterator = True, None

    def batch(self, pipeline: int, number: int) -> Batch:
        self.asked = pipeline, number
        if not self._reads:
            return None  # another part sends it to this one
        found = self._shared.get((pipeline, number))
        if found is not None:
            return found
        own = pipeline == self._me.pipeline or self._alike
        return self._source.batch(self._me.pipeline if own else pipeline, self._first + number)

    def forget(self, pipeline: int, before: int) -> None:
        pass  # done when the next evaluation begins

    def share(self, plan: Plan, microbatches: Sequence[Microbatch], number: int, groups: Groups) -> bool:
        """As `runtime.evaluation.Shared`."""
        (ended,) = count(groups.control, self.ended)
        if ended:
            return False
        route = plan.route()
        away = [(pipeline, microbatch) for pipeline, microbatch in microbatches
                if any(route[pipeline, microbatch, end].pipeline != pipeline for end in self._ends)]
        givers = {worker.pipeline: worker for worker in reversed(groups.members) if worker.stage in self._reading}
        messages = self._tell(away, givers, number, groups)
        self._shared = {place: batch for one in messages for place, batch in one.batches.items()}
        digests = {one.pipeline: one.digests for one in messages if one.digests}
        if len(digests) > 1:  # a single digest proves nothing: the flag stays
            self._alike = len(set(digests.values())) == 1
        orphans = [place for place in away if self._reads and place[0] not in givers and groups.me in (
            route[place[0], place[1], end] for end in self._ends)]
        try:
            if orphans and not self._alike:
                self._source.check(self._first, [digests[pipeline][0] if pipeline in digests else None
                                                 for pipeline in range(self._grid.pipelines)])
            for pipeline, microbatch in orphans:
                self.batch(pipeline, self._number(pipeline, microbatch, number))
        except DataError as error:
            self.failed = str(error)
        (failed,) = count(groups.control, bool(self.failed))
        if failed and not self.failed:
            self.failed = "another worker cannot read what it is to run, and says why"
        return not failed

    def _number(self, pipeline: int, microbatch: int, number: int) -> int:
        return number * self._grid.microbatches[pipeline] + microbatch

    def _tell(self, away: Sequence[Microbatch], givers: Mapping[int, Worker], number: int,
              groups: Groups) -> list[_Message]:
        """The messages of all workers on the micro-batches of their own pipelines."""
        own = [self._source.batch(self._me.pipeline, at)
               for at in range(self._first, self._next if self._reads else self._first)]
        own_message = _Message(self._me.pipeline, tuple(map(digest, own)), {
            (pipeline, at): own[at] for pipeline, at in (
                (pipeline, self._number(pipeline, microbatch, number)) for pipeline, microbatch in away
                if self._reads and givers.get(pipeline) == self._me)})
        messages: list[Any] = [None] * groups.control.size
        with failing_ends("micro-batches of the evaluation"):
            dist.all_gather_object(messages, own_message, group=groups.control.group)
        return messages


class _Message(NamedTuple):
    """A worker's message: checksums of all that it has read of its ``pipeline``, and its micro-batches that run
    elsewhere, by number in the evaluation."""

    pipeline: int
    digests: tuple[int, ...]
    batches: Mapping[Microbatch, Batch]


class MappedEvaluation(Mapped):
    """`EvaluationData` after the function given to DeepSpeed's `set_batch_fn`."""

    def __init__(self, data: EvaluationData, function: Callable[[], Callable[[Batch], Batch] | None],
                 seeds: Seeds) -> None:
        super().__init__(data, function, seeds)
        self.share = data.share


class Taken:
    """An iterator over the script's next micro-batches, of which an evaluation takes a known number.

    Args:
        data: the script's; None where it has none.
        count: micro-batches that a whole evaluation takes from it here.
    """

    def __init__(self, data: Iterator[Any] | None, count: int) -> None:
        self._data = data
        self._left = count if data is not None else 0

    def __iter__(self) -> Taken:
        return self

    def __next__(self) -> Any:
        assert self._data is not None
        found = next(self._data)
        self._left -= 1
        return found

    def finish(self) -> None:
        """Skip the micro-batches left over by an evaluation that was left out or cut short. If the data ends first, the
        next evaluation finds out, as in stock."""
        while self._left > 0:
            try:
                next(self)
            except StopIteration:
                return


def unknown(table: torch.Tensor) -> bool:
    """Whether a pass was not possible."""
    return bool(table[0, 1].isnan())


def filled(table: torch.Tensor, grid: Grid) -> torch.Tensor:
    """``table`` of a pass over fewer micro-batches than ``grid`` has. In place of those left out, it repeats each
    pipeline's others in turn: for a joiner, which does not know how many there were."""
    found = table.clone()
    for pipeline in range(grid.pipelines):
        own = [index for index, (of, _) in enumerate(grid.items()) if of == pipeline]
        had = [index for index in own if table[index].any()] or own
        for turn, index in enumerate(own):
            found[index] = table[had[turn % len(had)]]
    return found


def by_pipeline(tables: Sequence[torch.Tensor], grid: Grid, microbatches: int) -> list[torch.Tensor]:
    """The losses of each pipeline's ``microbatches``, (microbatches,), in their own type, from the tables of all
    `passes`."""
    rows: list[list[torch.Tensor]] = [[] for _ in range(grid.pipelines)]
    for table in tables:
        for (pipeline, _), row in zip(grid.items(), table, strict=True):
            rows[pipeline].append(row)
    return [losses(torch.stack(own[:microbatches])) for own in rows]


def mean(of_pipelines: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stock's mean, operation by operation: over the micro-batches, then over the pipelines."""
    total = None
    for own in of_pipelines:
        value = sum(own.unbind()) / len(own)
        total = value if total is None else total + value
    assert total is not None
    return total / len(of_pipelines)


