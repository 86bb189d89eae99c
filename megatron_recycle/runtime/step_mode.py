"""Whether stages step at once or wait for the verdict: decided anew for every iteration, alike on all workers.

A stage that steps before it knows the others' gradient norms is wrong whenever clipping is active, and every
wrong step throws away the work on the next iteration. The choice depends on nothing but the verdicts so far,
which are the same everywhere, so all workers switch at the same iteration without a word between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from megatron_recycle.membership import Verdict
from megatron_recycle.observe.log import get_logger

_WINDOW = 8
_MANY = 3


class Pace:
    """Staggered steps while guesses are mostly right, a barrier while they are often wrong.

    Args:
        staggered: False: always the barrier.
        right: the coefficient that a verdict asks for.
        announce: whether this worker logs a change.
    """

    def __init__(self, staggered: bool, right: Callable[[Verdict], float], announce: bool) -> None:
        self._wanted = staggered
        self._right = right
        self._announce = announce
        self._wrong: deque[bool] = deque(maxlen=_WINDOW)
        self.staggered = staggered

    def wrong(self, verdict: Verdict) -> bool:
        """Whether some stage guessed wrong."""
        right = self._right(verdict)
        # Compared as text: a coefficient that is not a number is right if the guess was none either.
        return any(str(guess) != str(right) for guess in verdict.guesses)

    def learn(self, verdict: Verdict) -> None:
        """Take in the next iteration's verdict; `staggered` then holds for the iteration after it."""
        if not self._wanted:
            return
        self._wrong.append(self.wrong(verdict))
        if self.staggered and sum(self._wrong) >= _MANY:
            self._switch(False, verdict)
        elif not self.staggered and len(self._wrong) == _WINDOW and not any(self._wrong):
            self._switch(True, verdict)

    def to_json(self) -> dict[str, Any]:
        """What the next choice depends on."""
        return {"staggered": self.staggered, "wrong": list(self._wrong)}

    def follow(self, other: Mapping[str, Any]) -> None:
        """Choose from now on as the worker does whose `to_json` this is."""
        self.staggered = other["staggered"]
        self._wrong = deque(other["wrong"], maxlen=_WINDOW)

    def _switch(self, staggered: bool, verdict: Verdict) -> None:
        self.staggered = staggered
        if self._announce:
            count = sum(self._wrong)
            get_logger().info(
                "megatron-recycle: after iteration %d stages %s (%d of the last %d steps would have been undone)",
                verdict.iteration, "step at once again" if staggered else "wait for each other's gradient norms",
                count, len(self._wrong))
        self._wrong.clear()
