"""Micro-batches of any pipeline, from the data iterator that Megatron gives to one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader

from megatron_recycle.backends.megatron.script import taken_from, unwrapped
from megatron_recycle.errors import DataError
from megatron_recycle.runtime.compute.data import Batch, DataSource, NotReadHere, Reading, read_everywhere
from megatron_recycle.runtime.compute.random_state import Seeds
from megatron_recycle.runtime.compute.replay import Replayable

_REMEDY = ("Build it as Megatron does: a torch DataLoader whose batch_sampler has an attribute data_parallel_rank "
           "(--dataloader-type single or cyclic), or call megatron_recycle.enable(data=factory) with factory(pipeline) "
           "-> an iterator that gives that pipeline's micro-batches in the same order each time it is called")


class NoData:
    """The source without a data iterator. On stages between first and last it is never read. On tensor-parallel
    ``part``s but the first it gives None, since the first reads for all, as Megatron-LM's loaders do."""

    since = 0

    def __init__(self, part: int = 0) -> None:
        self._part = part

    def batch(self, pipeline: int, number: int) -> Batch:
        if self._part:
            return None
        raise NotReadHere(f"pipeline {pipeline} wants a micro-batch, but forward_backward_func() got no data iterator "
                          "on this worker; Megatron gives one to the first and last stage")

    def forget(self, pipeline: int, before: int) -> None:
        pass


def read_from(batch: Batch) -> Iterator[Any] | None:
    """The iterator from which `forward_step` reads ``batch``; None, as the script has it, if it reads none here.

    A dictionary is copied: pretrain_gpt.py of newer cores removes entries that this stage does not use, and the
    micro-batch may be run again.
    """
    if batch is not None:
        return iter([{**batch} if type(batch) is dict else batch])
    return None


class Shifted:
    """Another source's micro-batches, with each number moved on by ``before`` of it. ``source`` may become known
    later."""

    def __init__(self, source: DataSource, before: Callable[[int], int]) -> None:
        self.source, self._before = source, before

    @property
    def everywhere(self) -> bool:
        """As `read_everywhere`."""
        return read_everywhere(self.source)

    @property
    def since(self) -> int:
        """As in `DataSource`."""
        return self.source.since

    def batch(self, pipeline: int, number: int) -> Batch:
        return self.source.batch(pipeline, number + self._before(number))

    def forget(self, pipeline: int, before: int) -> None:
        self.source.forget(pipeline, before + self._before(before))


class SamplerSource:
    """One sampler per pipeline served: a copy of Megatron's, with that pipeline's data-parallel rank.

    A sampler gives lists of indices, so that other iterations' data is skipped without reading it.

    Args:
        dataset: map-style, the same on every worker.
        sampler: yields a micro-batch's indices, by its ``data_parallel_rank``; not advanced.
        collate: list of samples -> batch.
        seeds: random numbers for reading; None: not controlled.
        taken: micro-batches that the script has read itself, which are skipped.
        again: whether the sampler begins anew at its end, as often as needed.
    """

    since = 0
    everywhere = True
    """Also on stages between first and last, if they have an iterator: BERT's read masks there."""

    def __init__(self, dataset: Any, sampler: Any, collate: Any, seeds: Seeds | None = None, taken: int = 0,
                 again: bool = False) -> None:
        self._reading = Reading(seeds, dataset, collate)
        self._sampler = sampler
        self._taken = taken
        self._again = again
        self._indices: Replayable[list[int]] = Replayable(
            self._begin, seeds, name="the batch sampler",
            ended="Megatron's samples must last for all iterations (--train-iters)",
            failed="Handle the error in the sampler, or call megatron_recycle.enable(data=factory)")

    def batch(self, pipeline: int, number: int) -> Batch:
        return self._reading.samples(pipeline, number, self._indices.item(pipeline, number))

    def forget(self, pipeline: int, before: int) -> None:
        self._indices.forget(pipeline, before)

    def _begin(self, pipeline: int) -> Iterator[list[int]]:
        sampler = copy.copy(self._sampler)
        sampler.data_parallel_rank = pipeline
        return islice(_epochs(sampler) if self._again else iter(sampler), self._taken, None)


def _epochs(sampler: Any) -> Iterator[list[int]]:
    """A sampler's epochs in a row; Megatron's sampler counts them. Ends if an epoch is empty."""
    given = True
    while given:
        given = False
        for indices in sampler:
            given = True
            yield indices


def _cycled(loader: Any) -> DataLoader[Any] | None:
    """The loader behind Megatron-LM's endless generator ``loader`` (``--dataloader-type cyclic``); None: it is no such
    generator. Raises DataError."""
    if not isinstance(loader, GeneratorType) or loader.__name__ != "cyclic_iter":
        return None
    if inspect.getgeneratorstate(loader) != inspect.GEN_CREATED:
        raise DataError("the script has taken micro-batches from a cyclic data iterator before it has trained: leave "
                        "that to forward_step, or use --dataloader-type single")
    whole = inspect.getgeneratorlocals(loader).get("iter")
    if not isinstance(whole, DataLoader) or not hasattr(whole.batch_sampler, "data_parallel_rank"):
        raise DataError(f"a cyclic data iterator goes through a {type(whole).__name__}, which cannot give a dead "
                        f"worker's micro-batches to another worker. {_REMEDY}")
    if hasattr(whole.dataset, "set_epoch"):
        raise DataError(f"{type(whole.dataset).__name__} draws its samples by the epoch that its reader is in, and "
                        "here one reader serves several pipelines. Use --dataloader-type single")
    return whole


def source_of(iterator: Any, part: int, seeds: Seeds) -> DataSource:
    """The source of the micro-batches that ``iterator`` gives to one pipeline. Raises DataError.

    ``part``: tensor-parallel rank of this process; ``seeds``: random numbers for reading.
    """
    iterator = unwrapped(iterator)
    if iterator is None:
        return NoData(part)
    loader = getattr(iterator, "iterable", iterator)  # Megatron-LM wraps a loader's iterator to be able to rewind it
    if (whole := _cycled(loader)) is not None:
        return SamplerSource(whole.dataset, whole.batch_sampler, whole.collate_fn, seeds, again=True)
    sampler = getattr(loader, "_index_sampler", None)
    if not hasattr(sampler, "data_parallel_rank") or not hasattr(loader, "_dataset"):
        raise DataError(f"forward_backward_func() got a {type(loader).__name__}, which cannot give a dead worker's "
                        f"micro-batches to another worker. {_REMEDY}")
    return SamplerSource(loader._dataset, sampler, loader._collate_fn, seeds, taken_from(iterator))
