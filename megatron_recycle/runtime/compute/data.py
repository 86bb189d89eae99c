"""The training data as a function of (iteration, pipeline, micro-batch).

After a failure any first- or last-stage worker may run any pipeline's micro-batch, and an iteration may be run again:
so a batch must be found by its place, not by its turn. A plain iterator cannot do that; a map-style dataset can, and so
can a factory that gives each pipeline's iterator anew. Random numbers of a dataset or a collate function (the masks of
masked language modelling) are drawn by place too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, DistributedSampler, default_collate

from megatron_recycle.errors import DataError
from megatron_recycle.runtime.compute.random_state import Seeds
from megatron_recycle.runtime.compute.replay import Replayable

Batch = Any
Factory = Callable[[int], Iterator[Batch]]
"""pipeline -> its iterator over micro-batches, giving the same sequence each time it is called."""


class NotReadHere(DataError):
    """This process has no data to read, or none yet."""


class DataSource(Protocol):
    """Micro-batches by place. ``number`` counts a pipeline's micro-batches from the start of training.

    ``since``: the first one that can be read again though it was forgotten, at the price of time."""

    @property
    def since(self) -> int: ...

    def batch(self, pipeline: int, number: int) -> Batch: ...

    def forget(self, pipeline: int, before: int) -> None:
        """Micro-batches of ``pipeline`` before ``before`` are committed and will not be requested again."""


def follows_script(source: DataSource) -> bool:
    """Whether ``source`` gives the data that the script has last handed over in its training loop."""
    return bool(getattr(source, "follows_script", False))


def read_everywhere(source: DataSource) -> bool:
    """Whether stages between first and last read the micro-batches of ``source`` too."""
    return bool(getattr(source, "everywhere", False))


class DatasetSource:
    """Micro-batches of a map-style dataset, in the order of DeepSpeed's own pipeline data loader:
    a DistributedSampler without shuffling, repeated for ever.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; the same on every worker.
        pipelines: nominal number of pipelines.
        batch_size: samples of a micro-batch.
        collate: list of samples -> batch.
        drop_last: leave out an epoch's last, smaller micro-batch.
        seeds: set the random numbers for reading; None: they are left alone.
    """

    since = 0

    def __init__(self, dataset: Dataset, pipelines: int, batch_size: int,
                 collate: Callable[[list], Batch] | None = None, drop_last: bool = False,
                 seeds: Seeds | None = None) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError("training_data must be a map-style dataset (with __len__ and __getitem__), since a batch "
                            "may be needed again on another worker; give an iterable one as "
                            "megatron_recycle.enable(data=lambda pipeline: iterator)")
        self._dataset = dataset
        self._pipelines = pipelines
        self._batch_size = batch_size
        self._collate = collate or default_collate
        self._drop_last = drop_last
        self._reading = Reading(seeds, self._dataset, self._collate)
        self._indices: dict[int, list[int]] = {}

    @property
    def short(self) -> int | None:
        """Number of the first micro-batch that has fewer samples than the others, an epoch's last; None if all have the
        same number."""
        if self._drop_last or not len(self._dataset):
            return None
        whole, rest = divmod(self._samples, self._batch_size)
        return whole if whole and rest else None

    @property
    def _samples(self) -> int:
        """Number of samples of an epoch and pipeline: the sampler fills up with samples from the beginning."""
        return math.ceil(len(self._dataset) / self._pipelines)

    def has_short(self, first: int, count: int) -> bool:
        """Whether one of a pipeline's ``count`` micro-batches from number ``first`` on has fewer samples."""
        return self.short is not None and (self.short - first) % (self.short + 1) < count

    def describe_short(self) -> str:
        """The error message about a short micro-batch, with the remedy."""
        return (f"training_data gives {self._samples} samples to each pipeline in an epoch, so that the last "
                f"micro-batch has {self._samples % self._batch_size} instead of {self._batch_size}, and stages pass on "
                'micro-batches of one shape only. Set "dataloader_drop_last": true in the DeepSpeed JSON to leave it '
                "out, or let collate_fn fill it up")

    def check(self, first: int, count: int, read: Callable[[int, int], Batch] | None = None) -> None:
        """Raises DataError if one of a pipeline's ``count`` micro-batches from number ``first`` on has fewer samples
        than the others, and other tensor shapes as read by ``read`` (default: `batch`)."""
        if self.short is None or not self.has_short(first, count):
            return
        read = read or self.batch
        if _shapes(read(0, self.short)) != _shapes(read(0, 0)):
            raise DataError(self.describe_short())

    def batch(self, pipeline: int, number: int) -> Batch:
        indices = self._indices.get(pipeline)
        if indices is None:
            indices = self._indices[pipeline] = list(DistributedSampler(
                self._dataset, num_replicas=self._pipelines, rank=pipeline, shuffle=False))
        whole, rest = divmod(len(indices), self._batch_size)
        per_epoch = whole + (1 if rest and not self._drop_last else 0)
        if not per_epoch:
            raise DataError(f"the dataset has {len(indices)} samples for each pipeline, fewer than one micro-batch of "
                            f"{self._batch_size}; use more data or a smaller micro-batch")
        start = (number % per_epoch) * self._batch_size
        return self._reading.samples(pipeline, number, indices[start:start + self._batch_size])

    def forget(self, pipeline: int, before: int) -> None:
        pass  # any batch can be read again


class Reading:
    """Reads samples by index, with random numbers by place.

    Args:
        seeds: of the job's data; None: random numbers are left alone.
        dataset: has ``__getitem__``.
        collate: list of samples -> batch.
    """

    def __init__(self, seeds: Seeds | None, dataset: Any, collate: Callable[[list], Batch]) -> None:
        self._seeds = seeds
        self._dataset = dataset
        self._collate = collate
        self._checked = False

    def samples(self, pipeline: int, number: int, indices: Sequence[int]) -> Batch:
        """The batch of ``indices``. Raises DataError if the first one, read twice, differs."""
        if self._seeds is None:
            return self._read(indices)
        if not self._checked:
            self._checked = True
            self._check(self._seeds, indices)
        self._seeds.set(pipeline, number)
        return self._read(indices)

    def _check(self, seeds: Seeds, indices: Sequence[int]) -> None:
        seeds.generators.adopt("the data", self._dataset, self._collate)
        digests = []
        for _ in range(3):
            # The same on all workers, for a dataset that draws once, when it is first read. That may shift its draws
            # for the samples, so only the later two are compared.
            seeds.set(0, -1)
            digests.append(digest(self._read(indices)))
        if digests[1] != digests[2]:
            raise DataError(
                f"the same samples, read twice with the same random seeds, differ (indices {list(indices)[:4]}...): "
                f"{type(self._dataset).__name__} or its collate function draws random numbers from a generator that is "
                "out of sight, or counts how often it is read; workers would read different data. Draw from torch's, "
                "Python's or numpy's global generators, which are set for each micro-batch, or seed by the index")

    def _read(self, indices: Sequence[int]) -> Batch:
        return self._collate([self._dataset[index] for index in indices])


class FactorySource:
    """Micro-batches of a user's ``factory(pipeline) -> iterator``; kept until they are committed.

    ``seeds``: set the random numbers for reading; None: they are left alone.
    """

    since = 0

    def __init__(self, factory: Factory, seeds: Seeds | None = None) -> None:
        if seeds is not None:
            seeds.generators.adopt("the data factory", factory)
        self._batches: Replayable[Batch] = Replayable(
            lambda pipeline: iter(factory(pipeline)), seeds, name="the data factory's iterator",
            ended="the factory's iterator must not end before training does (deepspeed.utils.RepeatingLoader repeats "
                  "one)",
            failed="Handle the error in the factory, or give a map-style dataset")

    def batch(self, pipeline: int, number: int) -> Batch:
        return self._batches.item(pipeline, number)

    def forget(self, pipeline: int, before: int) -> None:
        self._batches.forget(pipeline, before)


class Mapped:
    """Another source's micro-batches after a function, such as the one given to DeepSpeed's `set_batch_fn`.

    Args:
        source: reads them.
        function: gives the current function, or None.
        seeds: set the random numbers for the function.
    """

    def __init__(self, source: DataSource, function: Callable[[], Callable[[Batch], Batch] | None],
                 seeds: Seeds) -> None:
        self._source = source
        self._function = function
        self._seeds = seeds
        self._known: Any = None
        self.follows_script = follows_script(source)

    @property
    def since(self) -> int:
        """As in `DataSource`."""
        return self._source.since

    @property
    def maps(self) -> bool:
        """Whether there is a function now."""
        return self._function() is not None

    def batch(self, pipeline: int, number: int) -> Batch:
        batch, function = self._source.batch(pipeline, number), self._function()
        if function is None:
            return batch
        if function is not self._known:
            self._known = function
            self._seeds.generators.adopt("the function for batches", function)
        self._seeds.set(pipeline, number)
        return function(batch)

    def forget(self, pipeline: int, before: int) -> None:
        self._source.forget(pipeline, before)


def digest(batch: Batch) -> int:
    """CRC-32 of every tensor, numpy array, number and text in a batch (nested lists, tuples and dicts), in order."""
    crc = 0
    for leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(leaf, crc)
    return crc


def _shapes(batch: Batch) -> list[torch.Size]:
    return [tensor.shape for tensor in _leaves(batch) if isinstance(tensor, torch.Tensor)]


def _leaves(batch: Batch) -> Iterator[torch.Tensor | bytes]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (str, bytes, int, float)):
        yield repr(batch).encode()
    elif isinstance(batch, Sequence):
        for value in batch:
            yield from _leaves(value)
    elif hasattr(batch, "tobytes"):
        yield batch.tobytes()
