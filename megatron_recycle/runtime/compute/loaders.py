"""Micro-batches of all pipelines, from the one-pipeline iterator that a script gives to its framework.

A worker's own pipeline is read from the script's iterator itself, as in stock, loader processes included. The other
pipelines are read by copies of the loader's sampler that name another pipeline, at the same position of the same pass
over the loader. Equality with the others' iterators is checked: a copy for the own pipeline must give the script's own
micro-batches, at the first one and at the first of each further pass, and all workers compare the first micro-batch of
each pipeline (`LoaderSource.check`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_recycle.errors import DataError
from megatron_recycle.runtime.compute.data import Batch, NotReadHere, Reading, digest
from megatron_recycle.runtime.compute.loader_passes import OneOnly, Pass, Read, Reads, noting_reads
from megatron_recycle.runtime.compute.random_state import Seeds
from megatron_recycle.runtime.compute.replay import Replayable

_REMEDY = (
    "Give the dataset to deepspeed.initialize(training_data=...) and call train_batch(), or let the iterator hand out "
    "what a torch DataLoader gives as it is (make batches in collate_fn or set_batch_fn()), over a map-style dataset "
    "and with a sampler that has an attribute rank or data_parallel_rank, such as DistributedSampler, or call "
    "megatron_recycle.enable(data=factory) with factory(pipeline) -> an iterator that gives that pipeline's "
    "micro-batches in the same order each time it is called")

_AHEAD = 64
"""Batches that an iterator may read ahead."""
_RUNS = 256
"""Passes, or parts of passes, whose micro-batches can be read again."""
_PASSES = 8
"""Passes that are kept beside those in use: an iterator may take turns with a few loaders."""


@dataclass(frozen=True)
class _Item:
    batch: Batch
    at: Read | DataError
    """The micro-batch's origin, or why only this worker can read it."""


class LoaderSource:
    """Micro-batches from a script's iterator over a torch `DataLoader`.

    Args:
        pipeline: the pipeline of the script's iterator.
        seeds: set the random numbers for reading.
        part: tensor-parallel rank; others than the first may have no iterator, and read nothing then.
        anything: whether the iterator may be over something else; only this worker can read its micro-batches then.
    """

    follows_script = True

    def __init__(self, pipeline: int, seeds: Seeds, part: int = 0, anything: bool = False) -> None:
        self.anything = anything
        self._pipeline = pipeline
        self._seeds = seeds
        self._part = part
        self._given: list[tuple[int, Any]] = []
        self._reading: Pass | None = None
        self._copies: dict[int, _Copies] = {}
        self._own: Replayable[_Item] | None = None  # before the first is read
        self._turns = False
        self._past = _Past()

    @property
    def since(self) -> int:
        """As in `DataSource`. An iterator is read once; earlier micro-batches are read again by a copy of its sampler,
        which has been checked to give the same."""
        if self.first is None:
            return 0
        return self.first if self._own is None else self._past.since

    @property
    def first(self) -> int | None:
        """Number of the first micro-batch that is read here; None: no iterator has been given yet."""
        return self._given[0][0] if self._given else None

    def give(self, iterator: Iterator[Batch], number: int) -> None:
        """Take micro-batches from ``number`` on from ``iterator``."""
        if self._given and self._given[-1][1] is iterator:
            return
        if self._given and self._given[-1][0] == number:
            self._given.pop()
        self._turns |= any(iterator is known for _, known in self._given)
        self._given.append((number, iterator))
        if self._own is None and not self._turns:  # a joiner goes through its loop without reading
            del self._given[:-_PASSES]

    def batch(self, pipeline: int, number: int) -> Batch:
        if self._part and not self._given:
            return None
        item = self._item(number)
        if pipeline == self._pipeline:
            return item.batch
        if isinstance(item.at, DataError):
            raise item.at
        return self._copies_of(item.at.of).batch(pipeline, item.at.position, number)

    def forget(self, pipeline: int, before: int) -> None:
        if pipeline != self._pipeline:
            return
        self._past.final = max(self._past.final, before)
        if self._own is None or self.first is None or before <= self.first:
            return
        self._own.forget(self._pipeline, before - self.first)
        if not any(isinstance(iterator, itertools.cycle) for _, iterator in self._given):  # it gives them again
            for known in self._copies.values():
                known.forget(before)
        # An older pass is read again only if an iteration that is not final is repeated.
        for key in [key for key, known in self._copies.items() if known.last < before][:-_PASSES]:
            del self._copies[key]

    def own_digest(self, number: int) -> int:
        """A checksum of the own pipeline's micro-batch ``number``, as the script's iterator gives it."""
        return digest(self._item(number).batch)

    def check(self, number: int, checksums: Sequence[int | None]) -> None:
        """Check that this worker reads each pipeline's micro-batch ``number`` as that pipeline's workers do, whose
        checksums (`own_digest`) are in ``checksums``. Raises DataError."""
        for pipeline, checksum in enumerate(checksums):
            if checksum is not None and digest(self.batch(pipeline, number)) != checksum:
                raise DataError(
                    f"train_batch(data_iter): what this worker reads as pipeline {pipeline}'s first micro-batch is not "
                    "what that pipeline's own workers get from theirs: the loaders differ in more than the rank of "
                    f"their sampler. {_REMEDY}")

    def iterator_at(self, number: int) -> tuple[int, Iterator[Batch]]:
        """The number at which the script's iterator for micro-batch ``number`` begins, and that iterator."""
        return next((begin, iterator) for begin, iterator in reversed(self._given) if begin <= number)

    def seed(self, number: int, of: Pass | None = None) -> None:
        """Set the random numbers for reading micro-batch ``number`` of the own pipeline, in the pass ``of``."""
        if of is not None and of is not self._reading:
            self._reading = of
            self._seeds.generators.adopt("the data", of.dataset, of.collate)
        self._seeds.set(self._pipeline, number)

    def prove(self, item: _Item, number: int) -> None:
        """Check that a copy for the own pipeline gives the script's own micro-batch. Raises DataError."""
        assert not isinstance(item.at, DataError)
        copies = self._copies_of(item.at.of)
        if digest(copies.batch(self._pipeline, item.at.position, number)) != digest(item.batch):
            raise DataError(
                "train_batch(data_iter) got an iterator that gives other micro-batches than its data loader's sampler "
                f"names (at micro-batch {number}): other workers could not read them. It may change what the loader "
                "gives, or the dataset draws random numbers that are out of sight, or an order that is not the same "
                f"each time. {_REMEDY}")

    def _item(self, number: int) -> _Item:
        if self.first is None or number < self.first:
            raise NotReadHere(f"train_batch() got no data iterator on this worker. {_REMEDY}")
        if self._own is None:
            self._own = self._begin(number)
        if number < self._past.final and (at := self._past.at(number)) is not None:  # all roll back behind it
            return _Item(self._copies_of(at.of).batch(self._pipeline, at.position, number), at)
        return self._own.item(self._pipeline, number - self.first)

    def _begin(self, number: int) -> Replayable[_Item]:
        """Begin with micro-batch ``number``, of the newest iterator for it, which is at its beginning, unless iterators
        take turns."""
        if not self._turns:
            begin, _ = self.iterator_at(number)
            self._given = [given for given in self._given if given[0] >= begin]
        own: Replayable[_Item] = Replayable(
            lambda _: _Stream(self), None, once=True, name="the iterator given to train_batch()",
            ended="it must not end before training does (deepspeed.utils.RepeatingLoader repeats one)",
            failed="Handle the error in the dataset")
        own.forget(self._pipeline, max(0, min(self._past.final, number) - self._given[0][0]))
        return own

    def note(self, number: int, at: Read | DataError) -> None:
        """Record the origin of the own pipeline's micro-batch ``number``."""
        self._past.note(number, at)

    def _copies_of(self, of: Pass) -> _Copies:
        return self._copies.setdefault(id(of), _Copies(of, self._pipeline, self._seeds))


class _Stream:
    """The script's iterators, one after another, as one: their micro-batches and the origins of these."""

    def __init__(self, source: LoaderSource) -> None:
        self._source = source
        assert source.first is not None
        self._number = source.first
        self._proved: Pass | None = None
        self._ahead: Reads = []
        """The last few batches that were read and not given yet."""
        self._round: list[Read] = []
        """The batches that an `itertools.cycle` has read; it then gives them again, without reading."""

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> _Item:
        begin, iterator = self._source.iterator_at(self._number)
        if begin == self._number:
            self._ahead, self._round = [], []
        self._source.seed(self._number)
        with noting_reads(lambda of: self._source.seed(self._number, of)) as reads:
            batch = next(iterator)
        self._ahead = [*self._ahead, *reads][-_AHEAD:]
        try:
            at = self._came_from(iterator, batch, [read for _, read in reads], self._number - begin)
            item = _Item(batch, at)
            if at.of is not self._proved:
                self._source.prove(item, self._number)
                self._proved = at.of
        except DataError as error:
            if not self._source.anything:
                raise
            item = _Item(batch, error)
        self._source.note(self._number, item.at)
        self._number += 1
        return item

    def _came_from(self, iterator: Any, batch: Batch, reads: Sequence[Read], count: int) -> Read:
        cycles = isinstance(iterator, itertools.cycle)
        if not reads and cycles and self._round:
            return self._round[count % len(self._round)]
        index = next((index for index, (item, _) in enumerate(self._ahead) if item is batch), None)
        if index is not None:
            _, read = self._ahead.pop(index)
        else:
            if len(reads) != 1:
                raise DataError(f"train_batch(data_iter) got a {type(iterator).__name__} that took "
                                f"{len(reads) or 'no'} batches from torch DataLoaders for its next one: so nobody but "
                                f"this worker can read that pipeline's micro-batches. {_REMEDY}")
            read, = reads
        if read.of.sampler is None:
            kind = type(read.of.dataset).__name__
            raise DataError(f"train_batch(data_iter) got an iterator over a loader whose {kind} is not read in batches "
                            "by index: so nobody but this worker can read that pipeline's micro-batches. "
                            f"{_REMEDY}")
        if cycles:
            self._round.append(read)
        return read


class _Past:
    """Origins of micro-batches that are not kept any more: for each run of consecutive ones of a pass, the first.
    Micro-batches before ``final`` are not kept."""

    def __init__(self) -> None:
        self.final = 0
        self._runs: list[tuple[int, Read]] = []
        self._next = 0

    def note(self, number: int, at: Read | DataError) -> None:
        """Record the origin of the next micro-batch."""
        if isinstance(at, DataError):
            self._runs.clear()
            return
        if self._runs:
            begin, first = self._runs[-1]
            if number == self._next and first == Read(at.of, at.position - (number - begin)):
                self._next = number + 1
                return
        if number != self._next:
            self._runs.clear()
        self._runs, self._next = [*self._runs, (number, at)][-_RUNS:], number + 1

    @property
    def since(self) -> int:
        """The first micro-batch whose origin is known, or that is kept."""
        return self._runs[0][0] if self._runs else self.final

    def at(self, number: int) -> Read | None:
        """The origin of that micro-batch; None: unknown."""
        run = next((run for run in reversed(self._runs) if run[0] <= number < self._next), None)
        return None if run is None else Read(run[1].of, run[1].position + number - run[0])


class _Copies:
    """A pass over a loader, read for any pipeline by copies of its sampler."""

    def __init__(self, of: Pass, own: int, seeds: Seeds) -> None:
        self._of = of  # held, so that no other pass gets its id
        self._positions: dict[int, int] = {}
        self._read: set[int] = set()
        self._reading = Reading(seeds, of.dataset, of.collate)
        self._indices: Replayable[list[int]] = Replayable(
            lambda pipeline: iter(of.sampler_of(pipeline, own)), None, name="the batch sampler",
            ended="its loader gives other pipelines more micro-batches than this one: let them have as many",
            failed="Handle the error in the sampler")

    @property
    def last(self) -> int:
        """The highest number of a micro-batch that was read here and may be needed again."""
        return max(self._positions, default=-1)

    def batch(self, pipeline: int, position: int, number: int) -> Batch:
        self._positions[number] = position
        self._read.add(pipeline)
        try:
            indices = self._indices.item(pipeline, position)
        except OneOnly as error:
            raise DataError(f"train_batch(data_iter) got an iterator over a loader that can be read for one pipeline "
                            f"only: {error}. {_REMEDY}") from None
        return self._reading.samples(pipeline, number, indices)

    def forget(self, before: int) -> None:
        done = [self._positions[number] + 1 for number in self._positions if number < before]
        self._positions = {number: at for number, at in self._positions.items() if number >= before}
        for pipeline in self._read if done else ():
            self._indices.forget(pipeline, max(done))
