"""Learning rates, weight decays and the like as Megatron's loop sets them, one iteration after another.

The loop sets them between two steps, from counters of its own, and does not know that a step may be undone and repeated
later. So they are noted when an iteration begins, and put in force during its step, whenever that is. At all other
times the loop's latest rates are in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SET_BY_LOOP = ("lr", "weight_decay")
"""Keys of an optimizer's parameter group that are every loop's own: joiners do not take them from their peers."""

SET_BY_STEP = ("step",)
"""Keys of a parameter group that a step changes; all others are the script's."""


class Rates:
    """The rates with which ``optimizer`` (a torch one) steps each iteration.

    Attributes:
        steps: number of steps made and not undone.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._of: dict[int, list[dict[str, Any]]] = {}
        self._expected: tuple[int, Any] | None = None
        self.steps = 0

    def note(self, iteration: int) -> None:
        """Note the rates in force as those of ``iteration``."""
        self._of[iteration] = self._in_force()

    def set(self, iteration: int) -> str | None:
        """Begin ``iteration`` with the rates in force. Returns, in words, how they differ from the peers' rates
        (`expect`); None: they do not."""
        self.note(iteration)
        expected, self._expected = self._expected, None
        if expected is None or expected[0] != iteration or expected[1] == _shown(self._of[iteration]):
            return None
        return f"its rates for iteration {iteration} are {_shown(self._of[iteration])}, its peers' are {expected[1]}"

    def told(self) -> tuple[int, Any]:
        """For a joiner: the rates of the coming iteration, if the loop has set them already."""
        rates = self._of.get(self.steps)
        return self.steps, None if rates is None else _shown(rates)

    def expect(self, message: tuple[int, Any]) -> None:
        """Note the peers' rates (their `told`), as a joiner."""
        iteration, rates = message
        self._expected = None if rates is None else (iteration, rates)

    @contextmanager
    def of_next_step(self) -> Iterator[None]:
        """Inside the block, which makes the next step, that step's rates are in force."""
        latest = self._in_force()
        self._use(self._of.get(self.steps, latest))
        yield
        self._use(latest)
        self.steps += 1

    def forget(self, committed: int) -> None:
        """Forget iterations up to ``committed``, which are final."""
        if next(iter(self._of), committed + 1) <= committed:
            self._of = {iteration: values for iteration, values in self._of.items() if iteration > committed}

    def _in_force(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key not in ("params", *SET_BY_STEP)}
                for group in self._optimizer.param_groups]

    def _use(self, rates: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, rates, strict=True):
            group.update(values)


def _shown(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers in ``rates`` that a loop sets from one iteration to the next."""
    return [{key: float(group[key]) for key in ("lr", "weight_decay") if key in group} for group in rates]
