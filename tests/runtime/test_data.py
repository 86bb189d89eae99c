"""A batch is found by its place, as often as it is asked for."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from megatron_recycle.errors import DataError
from megatron_recycle.runtime.compute.data import DatasetSource, FactorySource, Mapped, digest
from megatron_recycle.runtime.compute.random_state import Generators, Seeds


class Squares(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index * index])


@pytest.mark.parametrize(("size", "drop_last"), [(24, False), (23, False), (23, True)])
def test_batches_come_in_the_order_of_deepspeeds_own_loader(size, drop_last):
    source = DatasetSource(Squares(size), pipelines=3, batch_size=2, drop_last=drop_last)
    for pipeline in range(3):
        sampler = DistributedSampler(Squares(size), 3, pipeline, shuffle=False)
        loader = DataLoader(Squares(size), batch_size=2, sampler=sampler, drop_last=drop_last)
        stock = list(itertools.chain(loader, loader))
        for number in (*range(len(stock)), 1, 0):
            assert torch.equal(source.batch(pipeline, number), stock[number])


def test_a_factorys_batches_stay_until_they_are_committed():
    calls = []

    def factory(pipeline: int):
        calls.append(pipeline)
        return iter(range(100 * pipeline, 100 * pipeline + 50))

    source = FactorySource(factory)
    assert [source.batch(1, number) for number in (3, 1, 2, 3)] == [103, 101, 102, 103]
    source.forget(1, 4)
    assert source.batch(1, 5) == 105 and source.batch(1, 4) == 104
    assert source.batch(2, 8) == 208, "a guest pipeline's stream is read from its start"
    assert calls == [1, 2]


def test_a_factory_that_ends_says_what_to_do():
    with pytest.raises(DataError, match="RepeatingLoader"):
        FactorySource(lambda pipeline: iter([1, 2])).batch(0, 2)


def test_an_iterable_dataset_is_refused_with_the_remedy():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(DataError, match="lambda pipeline"):
        DatasetSource(Stream(), 2, 1)


def test_too_little_data_is_refused():
    with pytest.raises(DataError, match="fewer than one micro-batch"):
        DatasetSource(Squares(3), pipelines=3, batch_size=2, drop_last=True).batch(0, 0)


def test_the_digest_sees_every_nested_tensor():
    batch = {"x": (torch.ones(2), [torch.tensor(True)]), "y": torch.zeros(1, dtype=torch.bfloat16)}
    other = {"x": (torch.ones(2), [torch.tensor(False)]), "y": torch.zeros(1, dtype=torch.bfloat16)}
    assert digest(batch) == digest(batch) != digest(other)


class Masked(Squares):
    """Draws while it is read, as masking and augmentation do; also from a generator of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.own = numpy.random.default_rng(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), numpy.random.rand(), self.own.random(), float(torch.rand(1))]
        return torch.tensor([index, *drawn])


def seeds(purpose: str = "data") -> Seeds:
    return Seeds(Generators(torch.device("cpu")), 0, purpose)


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    batch = torch.stack(samples)
    return batch + torch.rand_like(batch)


def test_what_data_draw_at_random_depends_on_the_micro_batch_only():
    """Whoever reads it, in whatever order, and how often."""
    one, other, more = (DatasetSource(Masked(24), 3, 2, noisy, seeds=seeds(purpose))
                        for purpose in ("data", "data", "evaluation data"))
    places = [(pipeline, number) for pipeline in range(3) for number in range(4)]
    found = {place: one.batch(*place) for place in places}
    for place in [*reversed(places), *places]:
        assert torch.equal(other.batch(*place), found[place])
        assert not torch.equal(more.batch(*place), found[place])
    assert len({float(batch[0, 1]) for batch in found.values()}) == len(places)
    assert not torch.equal(one.batch(0, 4)[:, 1:], found[0, 0][:, 1:]), "the next epoch draws anew"


def test_what_a_factorys_iterators_draw_depends_on_the_micro_batch_only():
    """Though they read ahead, and share a generator."""
    shared = random.Random(0)

    def factory(pipeline: int):
        order = torch.randperm(50).tolist()
        while True:
            yield pipeline, order, torch.rand(1).item(), shared.random()

    one, other = FactorySource(factory, seeds()), FactorySource(factory, seeds())
    places = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    found = [one.batch(*place) for place in places]
    assert [other.batch(*place) for place in reversed(places)] == found[::-1]
    assert found[0][1] != found[1][1] and found[0][2] != found[2][2] and found[0][3] != found[2][3]


def test_the_scripts_own_random_numbers_are_left_alone():
    generators = Generators(torch.device("cpu"))
    source = DatasetSource(Masked(24), 3, 2, noisy, seeds=Seeds(generators, 0))
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    with generators.kept():
        source.batch(0, 0)
    assert torch.equal(torch.rand(1), expected)


def test_data_that_are_not_the_same_twice_are_refused_at_the_first_reading():
    """Also where first and last stage are one, so that nobody could compare."""
    calls = itertools.count()

    def counting(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + next(calls)

    with pytest.raises(DataError, match="Squares or its collate function draws random numbers"):
        DatasetSource(Squares(24), 3, 2, counting, seeds=seeds()).batch(1, 3)


def test_what_is_drawn_once_is_drawn_alike_on_all_workers():
    class Shuffled(Squares):
        order: list[int] | None = None

        def __getitem__(self, index: int) -> torch.Tensor:
            if self.order is None:
                self.order = torch.randperm(24).tolist()
            return super().__getitem__(self.order[index]) + torch.rand(2)

    one, other = (DatasetSource(Shuffled(24), 3, 2, seeds=seeds()) for _ in range(2))
    one.batch(2, 1)
    assert torch.equal(one.batch(0, 0), other.batch(0, 0))


def test_the_digest_sees_numbers_texts_and_arrays():
    batches = [{"a": numpy.arange(3), "n": 3, "t": "x"}, {"a": numpy.arange(3), "n": 4, "t": "x"},
               {"a": numpy.arange(3) + 1, "n": 3, "t": "x"}, {"a": numpy.arange(3), "n": 3, "t": "y"}]
    assert len({digest(batch) for batch in batches}) == 4


def test_a_function_for_batches_draws_the_same_on_first_and_last_stage():
    functions = [None, lambda batch: batch * (torch.rand(2, 2) > 0.3)]
    one, other = (Mapped(DatasetSource(Squares(24), 3, 2), lambda: functions[-1], seeds("batch_fn")) for _ in range(2))
    found = [one.batch(1, number) for number in range(6)]
    assert all(torch.equal(other.batch(1, number), found[number]) for number in (5, 3, 1, 0, 0))
    del functions[-1]
    assert any(not torch.equal(one.batch(1, number), found[number]) for number in range(6))


def filled_up(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples + samples[:1] * (2 - len(samples)))


@pytest.mark.parametrize(("size", "drop_last", "collate", "short"), [
    (26, False, None, 4), (24, False, None, None), (26, True, None, None), (26, False, filled_up, None),
    (3, False, None, None),
])
def test_a_smaller_micro_batch_is_found_before_anybody_trains_on_it(size, drop_last, collate, short):
    """Three pipelines: of 26 samples each reads 9, in micro-batches of two."""
    source = DatasetSource(Squares(size), pipelines=3, batch_size=2, collate=collate, drop_last=drop_last)
    for first in range(15):
        if short is not None and first % 5 in (short - 1, short):
            with pytest.raises(DataError, match="1 instead of 2") as refusal:
                source.check(first, 2)
            assert '"dataloader_drop_last": true' in str(refusal.value)
        else:
            source.check(first, 2)


def test_a_factory_s_iterator_that_has_failed_is_not_read_on():
    """It may have gone past that micro-batch, as a loader does, or not: the next one could be another than it seems."""
    class Loader:
        def __init__(self) -> None:
            self.number = -1

        def __iter__(self):
            return self

        def __next__(self) -> torch.Tensor:
            self.number += 1
            if self.number == 1:
                raise ValueError("sample 31 is corrupt")
            return torch.tensor([self.number])

    source = FactorySource(lambda pipeline: Loader())
    assert source.batch(0, 0).item() == 0
    with pytest.raises(ValueError, match="sample 31"):
        source.batch(0, 1)
    with pytest.raises(DataError, match="sample 31 is corrupt.*map-style"):
        source.batch(0, 2)
    assert source.batch(0, 0).item() == 0 and source.batch(1, 0).item() == 0, "what was read stays"
