"""Numbers of a step (the gradient norm) that are looked at now and then, and known a little later."""

from __future__ import annotations

import numbers
from collections.abc import Callable


class LateNumber(numbers.Number):
    """A number of an iteration that is not committed yet, which it becomes as soon as somebody looks at it.

    With staggered steps a stage steps before it knows the others' norms. Megatron's loop takes the global one after
    every step, but writes it only now and then: so only who reads it waits.

    Args:
        find: waits for the number.
    """

    def __init__(self, find: Callable[[], float]) -> None:
        self._find = find
        self._value: float | None = None

    def settle(self) -> LateNumber:
        """Find the number now, without waiting if it is known."""
        float(self)
        return self

    def __float__(self) -> float:
        if self._value is None:
            self._value = self._find()
        return self._value

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return repr(float(self))

    def __eq__(self, other: object) -> bool:
        return float(self) == other

    def __lt__(self, other: float) -> bool:
        return float(self) < other

    def __gt__(self, other: float) -> bool:
        return float(self) > other

    __hash__ = None  # type: ignore[assignment]
