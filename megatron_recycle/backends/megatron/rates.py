"""Learning rates, weight decays and the like as Megatron's loop sets them, one iteration after another.

The loop sets them between two steps, from counters of its own, and does not know that a step may be undone and made
again later. So they are noted when an iteration begins, and put in force while its step is made, whenever that is;
at all other times those in force are the loop's latest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SET_BY_LOOP = ("lr", "weight_decay")
"""Keys of an optimizer's parameter group that are every loop's own: a worker that comes in does not take them from its
peers."""

SET_BY_STEP = ("step",)
"""Keys of a parameter group that a step changes; all others are the script's."""


class Rates:
    """The rates with which ``optimizer`` (a torch one) steps each iteration.

    Attributes:
        steps: that have been made, and not been undone.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._of: dict[int, list[dict[str, Any]]] = {}
        self._expected: tuple[int, Any] | None = None
        self.steps = 0

    def note(self, iteration: int) -> None:
        """What is in force now is meant for ``iteration``."""
        self._of[iteration] = self._in_force()

    def set(self, iteration: int) -> str | None:
        """``iteration`` begins, with what is in force now. Returns how that differs from what peers have told
        (`expect`), in words."""
        self.note(iteration)
        expected, self._expected = self._expected, None
        if expected is None or expected[0] != iteration or expected[1] == _shown(self._of[iteration]):
            return None
        return f"its rates for iteration {iteration} are {_shown(self._of[iteration])}, its peers' are {expected[1]}"

    def told(self) -> tuple[int, Any]:
        """For one that joins: the rates of the iteration that comes next, if the loop has set them already."""
        rates = self._of.get(self.steps)
        return self.steps, None if rates is None else _shown(rates)

    def expect(self, told: tuple[int, Any]) -> None:
        """This worker joins peers that have `told` this."""
        iteration, rates = told
        self._expected = None if rates is None else (iteration, rates)

    @contextmanager
    def of_next_step(self) -> Iterator[None]:
        """Inside the block, which makes the next step, its rates are in force."""
        latest = self._in_force()
        self._use(self._of.get(self.steps, latest))
        yield
        self._use(latest)
        self.steps += 1

    def forget(self, committed: int) -> None:
        """Iterations up to ``committed`` are final."""
        if next(iter(self._of), committed + 1) <= committed:
            self._of = {iteration: values for iteration, values in self._of.items() if iteration > committed}

    def _in_force(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key not in ("params", *SET_BY_STEP)}
                for group in self._optimizer.param_groups]

    def _use(self, rates: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, rates, strict=True):
            group.update(values)


def _shown(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers among them that a loop sets from one iteration to the next."""
    return [{key: float(group[key]) for key in ("lr", "weight_decay") if key in group} for group in rates]
