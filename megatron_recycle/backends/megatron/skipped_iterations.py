"""Iterations that Megatron-LM's loop passes over (``--iterations-to-skip``): data is read, and nothing is trained.

The runtime counts trained iterations only, the loop counts all. Micro-batches are numbered among all that are trained;
in the data they lie further on, by the number of those passed over.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from itertools import count, filterfalse, islice


class PassedOver:
    """The skipped ``iterations`` of one loop, which counts from ``first`` on."""

    def __init__(self, iterations: Collection[int], first: int) -> None:
        self._iterations, self._first = frozenset(iterations), first

    def after(self, trained: int) -> int:
        """The loop's count after ``trained`` trained iterations, before it goes on."""
        if not trained or not self._iterations:
            return self._first + trained
        ran = filterfalse(self._iterations.__contains__, count(self._first))
        return next(islice(ran, trained - 1, None)) + 1

    def trained(self, iteration: int) -> int:
        """The number of trained iterations when the loop has counted to ``iteration``."""
        return iteration - self._first - sum(self._first <= one < iteration for one in self._iterations)


class Gaps:
    """Counts micro-batches that are passed over, before micro-batch n of each pipeline."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._sums: list[int] = []

    def add(self, number: int, microbatches: int) -> None:
        """Add passed-over micro-batches before ``number``, which must not fall."""
        self._numbers.append(number)
        self._sums.append(self.before(number) + microbatches)

    def before(self, number: int) -> int:
        """The number of those before micro-batch ``number``, including those right before it."""
        found = bisect_right(self._numbers, number, hi=len(self._sums))
        return self._sums[found - 1] if found else 0
