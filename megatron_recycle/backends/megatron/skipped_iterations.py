"""Iterations that Megatron-LM's loop passes over (``--iterations-to-skip``): data is read, and nothing is trained.

The runtime counts iterations that are trained, the loop all of them; micro-batches are found by their number among all
that are trained, and lie further on in the data by those that were passed over.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from itertools import count, filterfalse, islice


class PassedOver:
    """Those of one loop, which counts from ``first`` on; ``iterations`` are passed over."""

    def __init__(self, iterations: Collection[int], first: int) -> None:
        self._iterations, self._first = frozenset(iterations), first

    def after(self, trained: int) -> int:
        """What the loop has counted when so many iterations were trained, and no other one has begun."""
        if not trained or not self._iterations:
            return self._first + trained
        ran = filterfalse(self._iterations.__contains__, count(self._first))
        return next(islice(ran, trained - 1, None)) + 1

    def trained(self, iteration: int) -> int:
        """How many the loop has trained when it has counted to ``iteration``."""
        return iteration - self._first - sum(self._first <= one < iteration for one in self._iterations)


class Gaps:
    """Micro-batches that are not trained with: before the one numbered n of each pipeline there are so many."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._sums: list[int] = []

    def add(self, number: int, microbatches: int) -> None:
        """Further ones; ``number`` does not fall."""
        self._numbers.append(number)
        self._sums.append(self.before(number) + microbatches)

    def before(self, number: int) -> int:
        """All up to the micro-batch of this number; those right before it too."""
        found = bisect_right(self._numbers, number, hi=len(self._sums))
        return self._sums[found - 1] if found else 0
