"""Results of past iterations and evaluations, for a worker that comes in later.

The joiner's script runs through its loop from the start, and may decide by results on the way: it stops early, saves
whenever a loss is the lowest so far, or lets the batch size follow it. So peers keep their own results, a few numbers
each time, in memory of a bounded size, and give them to joiners.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

import torch

from megatron_recycle.plan.value import Value

_MOST = 64 * 2**20
"""Limit to the bytes that a worker keeps of iterations, and of evaluations."""
_AT_ONCE = 8
"""One part in so many is let go at the limit."""


class Rows(Value, frozen=True):
    """All of a `History`, as bytes."""

    numbers: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor


class History:
    """Rows of bytes by ascending number; the oldest are let go beyond ``most`` bytes."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._numbers = array("q")
        self._ends = array("q")  # of the rows in the data
        self._rows = bytearray()

    def note(self, number: int, row: bytes) -> None:
        """Add ``row``, the result of ``number``; rows from that number on are dropped before."""
        self._keep(0, bisect_left(self._numbers, number))
        self._numbers.append(number)
        self._rows += row
        self._ends.append(len(self._rows))
        if self.nbytes > self._most:
            self.let_go()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self._rows) + 16 * len(self._ends)

    def let_go(self) -> None:
        """Forget the oldest part."""
        self._keep(1 + len(self._numbers) // _AT_ONCE, len(self._numbers))

    def exactly(self, number: int) -> bytes | None:
        """The result of ``number`` itself; None if it is not known."""
        index = bisect_left(self._numbers, number)
        known = index < len(self._numbers) and self._numbers[index] == number
        return bytes(self._rows[self._start(index):self._ends[index]]) if known else None

    def of(self, number: int) -> bytes | None:
        """The result of ``number``; if it was let go, the first known one after it, or else the last one; None if
        nothing is known."""
        if not self._numbers:
            return None
        index = min(bisect_left(self._numbers, number), len(self._numbers) - 1)
        return bytes(self._rows[self._start(index):self._ends[index]])

    def told(self) -> Rows:
        """All of it, for another worker."""
        return Rows(_tensor(self._numbers.tobytes()), _tensor(self._ends.tobytes()), _tensor(self._rows))

    def take(self, history: Rows) -> None:
        """Take over the rows that another worker has `told`, and no others."""
        numbers, ends, rows = (one.cpu().numpy().tobytes() for one in (history.numbers, history.ends, history.rows))
        self._numbers, self._ends, self._rows = array("q", numbers), array("q", ends), bytearray(rows)

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def _keep(self, first: int, end: int) -> None:
        """Rows ``first`` to ``end``, and no others."""
        if first == 0 and end == len(self._numbers):
            return
        start, stop = self._start(first), self._start(end)
        self._numbers = self._numbers[first:end]
        self._ends = array("q", (end - start for end in self._ends[first:end])) if start else self._ends[:end]
        self._rows = self._rows[start:stop]


def _tensor(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
