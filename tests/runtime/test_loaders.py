"""A script's iterator over a data loader: any worker reads any pipeline's micro-batches, and proves it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.utils import RepeatingLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from megatron_recycle.errors import DataError
from megatron_recycle.runtime.compute.data import NotReadHere
from megatron_recycle.runtime.compute.loader_passes import watch_loaders
from megatron_recycle.runtime.compute.loaders import _RUNS, LoaderSource
from megatron_recycle.runtime.compute.random_state import Generators, Seeds

PIPELINES, SAMPLES, BATCH = 3, 24, 2
PER_PASS = SAMPLES // PIPELINES // BATCH


class Squares(Dataset):
    noise = 0.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index * index]) + self.noise * torch.rand(2)


class MegatronSampler:
    """As Megatron's: an object that gives lists of indices and moves itself on."""

    def __init__(self, rank: int, start: int = 0) -> None:
        self.data_parallel_rank, self.consumed = rank, start

    def __iter__(self) -> Iterator[list[int]]:
        while self.consumed + PIPELINES * BATCH <= SAMPLES:
            first = self.consumed + self.data_parallel_rank * BATCH
            self.consumed += PIPELINES * BATCH
            yield list(range(first, first + BATCH))
        self.consumed = 0


class Interleaved(BatchSampler):
    """As gpt-neox's: of each global batch it takes every third sample."""

    def __init__(self, rank: int) -> None:
        super().__init__(SequentialSampler(Squares()), PIPELINES * BATCH, drop_last=True)
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[self.rank::PIPELINES]


def shuffled(rank: int) -> DataLoader:
    return DataLoader(Squares(), BATCH, sampler=DistributedSampler(Squares(), PIPELINES, rank, shuffle=True))


def in_epochs(rank: int) -> Iterator[Any]:
    loader = shuffled(rank)
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def two_loaders(rank: int) -> Iterator[Any]:
    for one, other in zip(shuffled(rank), itertools.cycle(DataLoader(Squares(), batch_sampler=Interleaved(rank)))):
        yield from (one, other)


KINDS: dict[str, Callable[[int], Iterator[Any]]] = {
    "an iterator": lambda rank: iter(shuffled(rank)),
    "itertools.cycle": lambda rank: itertools.cycle(DataLoader(Squares(), batch_sampler=Interleaved(rank))),
    "with loader processes": lambda rank: itertools.cycle(
        DataLoader(Squares(), batch_sampler=Interleaved(rank), num_workers=1)),
    "RepeatingLoader": lambda rank: iter(RepeatingLoader(shuffled(rank))),
    "a generator that sets epochs": in_epochs,
    "a sampler that moves on": lambda rank: iter(RepeatingLoader(
        DataLoader(Squares(), batch_sampler=MegatronSampler(rank, start=PIPELINES * BATCH)))),
    "turns of two loaders": two_loaders,
}


def source_of(rank: int, iterator: Iterator[Any], first: int = 0) -> LoaderSource:
    watch_loaders()
    source = LoaderSource(rank, Seeds(Generators(torch.device("cpu")), seed=1))
    source.give(iterator, first)
    return source


@pytest.fixture(autouse=True)
def watched() -> None:
    watch_loaders()


@pytest.mark.parametrize("kind", KINDS)
def test_each_worker_reads_what_the_others_iterators_give(kind: str):
    count = 4 if kind == "an iterator" else 7 if kind == "turns of two loaders" else 3 * PER_PASS - 1
    stock = [[batch for batch, _ in zip(KINDS[kind](rank), range(count))] for rank in range(PIPELINES)]
    for own in range(PIPELINES):
        source = source_of(own, KINDS[kind](own), first=10)
        order = [(pipeline, number) for number in range(count) for pipeline in range(PIPELINES)]
        for start in range(0, len(order), 6):  # two numbers in any order, twice: an iteration that is made again
            for _ in range(2):
                some = order[start:start + 6]
                random.Random(own).shuffle(some)
                for pipeline, number in some:
                    assert torch.equal(source.batch(pipeline, 10 + number), stock[pipeline][number])
            for pipeline in range(PIPELINES):
                source.forget(pipeline, 10 + order[start][1] + 2)
        assert source.since == 10, "all go back"
        again = order[:]
        random.Random(own + 7).shuffle(again)
        for pipeline, number in again:
            assert torch.equal(source.batch(pipeline, 10 + number), stock[pipeline][number]), (pipeline, number)


def test_one_that_comes_in_compares_a_micro_batch_that_its_peers_have_done_with():
    source, stock = source_of(1, in_epochs(1), first=10), [batch for batch, _ in zip(in_epochs(1), range(4))]
    source.forget(1, 13)  # the iteration that it begins with is told before anything is read here
    assert torch.equal(source.batch(1, 11), stock[1])
    source.forget(1, 12)
    assert torch.equal(source.batch(1, 13), stock[3])


def test_batches_that_are_too_many_passes_ago_are_not_read_again():
    source = source_of(1, in_epochs(1))
    for number in range(PER_PASS * (_RUNS + 2)):
        source.batch(1, number)
        source.forget(1, number)
    assert source.since == PER_PASS * 2
    source.batch(0, source.since)


def test_another_iterator_goes_on_where_it_is_given():
    loaders = [shuffled(rank) for rank in range(PIPELINES)]
    source = source_of(1, iter(loaders[1]))
    first = [source.batch(pipeline, 1) for pipeline in range(PIPELINES)]
    for loader in loaders:
        loader.sampler.set_epoch(5)
    source.give(iter(loaders[1]), 2)
    second = [next(iter(loader)) for loader in loaders]
    assert all(map(torch.equal, [source.batch(pipeline, 2) for pipeline in range(PIPELINES)], second))
    assert all(map(torch.equal, [source.batch(pipeline, 1) for pipeline in range(PIPELINES)], first)), "made again"


def test_samples_that_draw_random_numbers_are_the_same_on_all_workers():
    data = Squares()
    data.noise = 0.5

    def loader(rank: int) -> Any:
        return RepeatingLoader(DataLoader(data, BATCH, sampler=DistributedSampler(data, PIPELINES, rank)))
    sources = [source_of(rank, loader(rank)) for rank in range(PIPELINES)]
    for number in range(2 * PER_PASS):  # each pass is proved
        for pipeline in range(PIPELINES):
            batches = [source.batch(pipeline, number) for source in sources]
            assert all(torch.equal(batches[0], batch) for batch in batches)


class Flow(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(100.0))


@pytest.mark.parametrize(("iterator", "says"), [
    (lambda: iter([torch.ones(2)] * 9), "took no batches from torch DataLoaders"),
    (lambda: (batch * 2 for batch in shuffled(1)), "other micro-batches than its data loader's sampler names"),
    (lambda: map(torch.cat, zip(shuffled(1), shuffled(1))), "took 2 batches"),
    (lambda: iter(DataLoader(Squares(), BATCH)), "has no attribute data_parallel_rank or rank"),
    (lambda: iter(shuffled(2)), "has rank 2, and this is a worker of pipeline 1"),
    (lambda: iter(DataLoader(Flow(), BATCH)), "whose Flow is not read in batches by index"),
    (lambda: iter(DataLoader(Squares(), None)), "is not read in batches by index"),
    (lambda: iter(DataLoader(Squares(), BATCH, shuffle=True)), "has no attribute|an order that is not the same"),
])
def test_what_only_one_worker_could_read_is_refused_with_the_remedy(iterator: Callable[[], Any], says: str):
    source = source_of(1, iterator())
    with pytest.raises(DataError, match=says) as refusal:
        for pipeline in (1, 0):
            source.batch(pipeline, 0)
    assert "training_data" in str(refusal.value) and "enable(data=factory)" in str(refusal.value)


def test_loaders_that_differ_in_more_than_their_rank_are_found_before_training():
    def iterator(rank: int, seed: int) -> Any:
        return iter(DataLoader(Squares(), BATCH, sampler=DistributedSampler(Squares(), PIPELINES, rank, seed=seed)))
    sources = [source_of(rank, iterator(rank, seed=7 if rank == 2 else 0)) for rank in range(PIPELINES)]
    told = [source.own_digest(0) for source in sources]
    for source in sources:
        with pytest.raises(DataError, match="what this worker reads as pipeline"):
            source.check(0, told)
    same = [source_of(rank, iterator(rank, seed=0)) for rank in range(PIPELINES)]
    for source in same:
        source.check(0, [None, *(source.own_digest(0) for source in same[1:])])


def test_a_worker_without_an_iterator_says_so_and_a_tensor_parallel_part_reads_nothing():
    seeds = Seeds(Generators(torch.device("cpu")), seed=1)
    with pytest.raises(NotReadHere, match="no data iterator"):
        LoaderSource(0, seeds).batch(0, 0)
    assert LoaderSource(0, seeds, part=1).batch(0, 0) is None


def passed_over(rank: int, iterators: list[Iterator[Any]], until: int) -> LoaderSource:
    """A worker that comes in: its script gives an iterator for each of the first micro-batches, which are over."""
    source = LoaderSource(rank, Seeds(Generators(torch.device("cpu")), seed=1))
    source.give(iterators[0], 0)
    source.forget(rank, until)
    for number in range(until + 1):
        source.give(iterators[number % len(iterators)], number)
    return source


@pytest.mark.parametrize("turns, until", [(1, 3), (2, 5), (20, 10)])
def test_a_worker_that_has_passed_over_iterators_reads_on_where_the_last_one_is(turns, until):
    """One for all, two in turns, another one for each micro-batch."""
    def iterators() -> list[Iterator[Any]]:
        return [iter(DataLoader(Squares(), batch_sampler=Interleaved(0))) for _ in range(turns)]

    expected, own = iterators(), passed_over(0, iterators(), until)
    for number in range(until):
        next(expected[number % turns])
    assert torch.equal(torch.as_tensor(own.batch(0, until)), torch.as_tensor(next(expected[until % turns])))
