"""Deaths of a service of the job: it may die again and again, as long as training gets on in between."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_recycle.errors import RecycleError

_MOST = 5
"""Deaths in a row after which a service is started again."""
_LIFE = 60.0
"""Seconds of a life after which its end is not in a row with the one before: an iteration may take that long."""


class Deaths:
    """The count of one service's deaths without an iteration committed, or a longer life, in between.

    Args:
        what: the service, in words.
        clock: seconds that only grow.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._count = 0
        self._born = clock()

    def progress(self) -> None:
        """An iteration was committed: what was before is forgotten."""
        self._count = 0

    def died(self, log: object) -> None:
        """One more; the next life begins. Raises RecycleError if there is to be none."""
        if self._clock() - self._born > _LIFE:
            self._count = 0
        self._count += 1
        self._born = self._clock()
        if self._count > _MOST:
            raise RecycleError(f"{self._what} has died {self._count} times in a row, without an iteration committed in "
                               f"between: see {log}")
