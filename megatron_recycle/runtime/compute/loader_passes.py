"""Reads of torch's data loaders, and the origin of each item that a script's iterator gives.

A script's iterator may be anything that reads a loader in the end: `itertools.cycle`, a generator, DeepSpeed's
RepeatingLoader. The hidden loader shows when an item is taken: its iterator gets a call for the next batch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

_PIPELINE = ("data_parallel_rank", "rank")
"""A sampler's attribute that names its pipeline: Megatron's samplers; torch's DistributedSampler, gpt-neox's
DistributedBatchSampler."""
_INSIDE = ("sampler", "batch_sampler")
"""Attributes in which a sampler keeps another one."""
_DEPTH = 3
_PASS = "_recycle_pass"


class OneOnly(Exception):
    """A loader's sampler cannot be made to sample for another pipeline; gives the reason, in words for the user."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over a loader.

    Attributes:
        dataset: map-style or not.
        collate: list of samples -> batch.
        sampler: a copy of the sampler of each batch's indices, as of the start of the pass; None: batches are not made
            of samples.
    """

    dataset: Any
    collate: Any
    sampler: Any

    def sampler_of(self, pipeline: int, own: int) -> Any:
        """A sampler of the same pass for another pipeline than ``own``, this one's. Raises OneOnly."""
        sampler = _copied(self.sampler, _DEPTH)
        if pipeline == own:
            return sampler
        holder = sampler
        for _ in range(_DEPTH):
            for name in _PIPELINE:
                rank = getattr(holder, name, None)
                if isinstance(rank, int) and not isinstance(rank, bool):
                    if rank != own:
                        raise OneOnly(f"its {type(holder).__name__} has {name} {rank}, and this is a worker of "
                                      f"pipeline {own}: give it the data-parallel rank")
                    setattr(holder, name, pipeline)
                    return sampler
            holder = next((getattr(holder, name) for name in _INSIDE if hasattr(holder, name)), None)
        raise OneOnly(f"its {type(self.sampler).__name__} has no attribute {' or '.join(_PIPELINE)} that would name "
                      "the pipeline that it samples for")


@dataclass(frozen=True)
class Read:
    """A loader's batch: the ``position``-th (from 0) of a pass."""

    of: Pass
    position: int


Reads = list[tuple[Any, Read]]
"""Batches and their origins, in the order of reading."""


def watch_loaders() -> None:
    """From now on each pass over a `DataLoader` records its start. Idempotent."""
    if hasattr(_BaseDataLoaderIter.__init__, "recycle"):
        return
    init, reset = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter._reset

    def begins(self: Any, loader: DataLoader) -> None:
        setattr(self, _PASS, _pass_of(loader))
        init(self, loader)

    def begins_again(self: Any, loader: DataLoader, first_iter: bool = False) -> None:
        if not first_iter:  # a loader with persistent workers keeps its iterator
            setattr(self, _PASS, _pass_of(loader))
        reset(self, loader, first_iter)

    begins.recycle = True  # type: ignore[attr-defined]
    _BaseDataLoaderIter.__init__ = begins
    _BaseDataLoaderIter._reset = begins_again


@contextmanager
def noting_reads(before: Callable[[Pass], None]) -> Iterator[Reads]:
    """A block in which this thread takes an item from a script's iterator; gives a list of the loaders' batches for it.

    ``before`` is called with the pass that a batch is about to be read in. A pass that begins there draws no random
    numbers of torch's, since a copy would not draw them.
    """
    found: Reads = []
    thread, stock, init = threading.get_ident(), _BaseDataLoaderIter.__next__, _BaseDataLoaderIter.__init__

    def following(self: Any) -> Any:
        if threading.get_ident() != thread or not hasattr(self, _PASS):
            return stock(self)
        before(getattr(self, _PASS))
        item = stock(self)
        found.append((item, Read(getattr(self, _PASS), self._num_yielded - 1)))
        return item

    def drawing_nothing(self: Any, loader: DataLoader) -> None:
        state = torch.get_rng_state()
        init(self, loader)
        torch.set_rng_state(state)

    _BaseDataLoaderIter.__next__ = following
    _BaseDataLoaderIter.__init__ = drawing_nothing
    try:
        yield found
    finally:
        _BaseDataLoaderIter.__next__ = stock
        _BaseDataLoaderIter.__init__ = init


def _pass_of(loader: DataLoader) -> Pass:
    batches = loader._auto_collation and loader._dataset_kind == _DatasetKind.Map
    return Pass(loader.dataset, loader.collate_fn, _copied(loader._index_sampler, _DEPTH) if batches else None)


def _copied(sampler: Any, depth: int) -> Any:
    """A copy that samples without advancing the original. Its dataset is the same one."""
    made = copy.copy(sampler)
    for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
        if isinstance(value, torch.Generator):
            setattr(made, name, torch.Generator(value.device).set_state(value.get_state()))
        elif depth and (name in _INSIDE or isinstance(value, Sampler)):
            setattr(made, name, _copied(value, depth - 1))
    return made
