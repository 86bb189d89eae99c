"""A batch is found by its place, as often as it is asked for."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from megatron_recycle.errors import DataError
from megatron_recycle.runtime.data import DatasetSource, FactorySource, digest


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
