"""The script's iterator of an evaluation: it goes on alike on all workers, whatever becomes of the evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Taken:
    """An iterator over the next micro-batches of the script's, of which an evaluation takes a known number.

    Args:
        data: the script's; None where it has none.
        count: micro-batches that a whole evaluation takes from it here.
    """

    def __init__(self, data: Iterator[Any] | None, count: int) -> None:
        self._data = data
        self._left = count if data is not None else 0

    def __iter__(self) -> Taken:
        return self

    def __next__(self) -> Any:
        assert self._data is not None
        found = next(self._data)
        self._left -= 1
        return found

    def finish(self) -> None:
        """Pass over what the evaluation has not taken: it was left out or cut short. Where the data ends before, the
        next evaluation finds out, as it does in stock."""
        while self._left > 0:
            try:
                next(self)
            except StopIteration:
                return
