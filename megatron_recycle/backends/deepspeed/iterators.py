"""Data iterators that a script gives to `train_batch()`: the engine's side of `LoaderSource`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_recycle.backends.session import Session
from megatron_recycle.errors import DataError
from megatron_recycle.runtime.comm.standalone import is_joining
from megatron_recycle.runtime.compute.data import DataSource, FactorySource
from megatron_recycle.runtime.compute.loaders import LoaderSource
from megatron_recycle.runtime.compute.random_state import Seeds
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.setup_record import SetUp


def iterator_source(engine: PipelineEngine, given: bool, place: Place, seeds: Seeds) -> LoaderSource:
    """The source of micro-batches from an iterator, if one was ``given`` on this worker. Raises DataError where an
    iterator is needed and missing."""
    if not given and place.part == 0 and (engine.is_first_stage() or engine.is_last_stage()):
        raise DataError("there is no training data: give a dataset to deepspeed.initialize(training_data=...), an "
                        "iterator over a torch DataLoader to train_batch(), or call "
                        "megatron_recycle.enable(data=factory) with factory(pipeline) -> iterator")
    return LoaderSource(place.me.pipeline, seeds, place.part)


def take_iterator(source: DataSource, iterator: Iterator[Any], number: int) -> None:
    """Read micro-batches from ``number`` on from the script's ``iterator``. Raises DataError."""
    if isinstance(source, LoaderSource):
        source.give(iterator, number)
    elif not isinstance(source, FactorySource):  # its factory replaces the iterator
        raise DataError("train_batch() got an iterator after it had begun with the dataset that was given to "
                        "deepspeed.initialize(training_data=...): use one of them for the whole training")


def compare_iterators(source: DataSource, session: Session, setup: SetUp | None) -> None:
    """Check, before the job's first iteration, that each worker can read what the others' iterators give; all workers
    call this together. A joiner checks its data when it comes in. Raises DataError."""
    if not isinstance(source, LoaderSource) or is_joining():
        return
    own: int | None = None
    error: DataError | None = None
    with session.generators.kept():
        try:
            own = source.own_digest(source.first) if source.first is not None else None
        except DataError as failure:
            error = failure
        reports: list[Any] = [None] * dist.get_world_size()
        with nullcontext() if setup is None else setup.apart():
            dist.all_gather_object(reports, (session.place.me.pipeline, own, str(error or "")))
        if error is not None:
            raise error
        if failed := next((text for _, _, text in reports if text), None):
            raise DataError(failed)
        if source.first is not None:
            pipelines = {pipeline: digest for pipeline, digest, _ in reports if digest is not None}
            source.check(source.first, [pipelines.get(pipeline) for pipeline in range(session.place.grid.pipelines)])
