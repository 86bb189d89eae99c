"""Iterators read once, whose items can be replayed until their iterations are final."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from megatron_recycle.errors import DataError
from megatron_recycle.runtime.compute.random_state import Seeds

Item = TypeVar("Item")


class _Stream(Generic[Item]):
    """One pipeline's iterator, begun when its first item is requested."""

    def __init__(self) -> None:
        self.items: Iterator[Item] | None = None
        self.next = 0
        self.floor = 0
        self.kept: dict[int, Item] = {}
        self.failed: str | None = None


class Replayable(Generic[Item]):
    """The items of one iterator per pipeline, by place; an item is kept from when it is read until it is forgotten.

    Args:
        begin: pipeline -> its iterator.
        seeds: set the random numbers for an iterator's start and each item; None: they are left alone.
        once: whether it cannot be restarted for forgotten items.
        name: of an iterator, in messages.
        ended: remedy for an iterator that ends too early, for messages.
        failed: remedy for an iterator that fails.
    """

    def __init__(self, begin: Callable[[int], Iterator[Item]], seeds: Seeds | None, *, name: str, ended: str,
                 failed: str, once: bool = False) -> None:
        self._begin = begin
        self._once = once
        self._seeds = seeds
        self._name = name
        self._ended = ended
        self._failed = failed
        self._streams: dict[int, _Stream[Item]] = {}

    def item(self, pipeline: int, number: int) -> Item:
        """Item ``number`` (from 0) of ``pipeline``. Items before it are read too, and kept: they may be needed later in
        the same iteration. For a forgotten item the iterator is restarted.

        Raises DataError if the iterator ends before it, or has failed before; at its first failure, its own error.
        """
        stream = self._streams.setdefault(pipeline, _Stream())
        if number not in stream.kept:
            self._read(pipeline, stream, number)
        return stream.kept[number]

    def forget(self, pipeline: int, before: int) -> None:
        """Items of ``pipeline`` before ``before`` will not be requested again: drop them now, or as soon as they are
        read."""
        stream = self._streams.setdefault(pipeline, _Stream())
        stream.floor = before
        for number in [number for number in stream.kept if number < before]:
            del stream.kept[number]

    def _read(self, pipeline: int, stream: _Stream[Item], number: int) -> None:
        if stream.failed is not None:
            raise DataError(f"{self._name} of pipeline {pipeline} has failed ({stream.failed}), and whether it has "
                            "gone past that micro-batch nobody knows: the job cannot leave it out and read on. "
                            f"{self._failed}")
        if number < stream.next and not self._once:
            stream.items, stream.next, stream.kept = None, 0, {}
        if number < stream.floor and not self._once:  # it was not expected to be requested again
            stream.floor = number
        if stream.items is None:
            self._seed(pipeline, -1)
            stream.items = self._begin(pipeline)
        try:
            while stream.next <= number:
                self._seed(pipeline, stream.next)
                item = next(stream.items)
                if stream.next >= stream.floor:
                    stream.kept[stream.next] = item
                stream.next += 1
        except StopIteration:
            raise DataError(f"the data of pipeline {pipeline} ended before micro-batch {number}; "
                            f"{self._ended}") from None
        except Exception as error:
            stream.failed = f"{type(error).__name__}: {error}"
            raise

    def _seed(self, pipeline: int, number: int) -> None:
        if self._seeds is not None:
            self._seeds.set(pipeline, number)
