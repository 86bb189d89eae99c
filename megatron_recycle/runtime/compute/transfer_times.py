"""Times at which messages left and arrived, by this worker's own clock, for the planner's `hop`.

Clocks need not agree: the coordinator takes the least lag of each direction between two workers, and their clocks'
difference cancels in the mean of both (`measure.hops`). A message that arrived before its receiver waited for it is not
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron_recycle.plan import Message

WAITED = 2e-4
"""Seconds that a receiver must have waited for a message, so that the message's arrival has ended the wait."""

Label = tuple[int, int]
"""Iteration and attempt."""


class _Times(NamedTuple):
    """Times at which messages of an iteration's attempt (``of``) left, and came."""

    of: Label
    sent: Mapping[str, float]
    came: Mapping[str, float]


class Lags:
    """Times (seconds of the monotonic clock) of the messages of one iteration and of the one before."""

    def __init__(self) -> None:
        self._label: Label | None = None
        self._sent: dict[Message, float] = {}
        self._came: dict[Message, float] = {}
        self._before: _Times | None = None

    def begin(self, label: Label | None) -> None:
        """The next messages are those of ``label``; None: they are not to be measured."""
        self._before = self._written()
        self._label, self._sent, self._came = label, {}, {}

    def sent(self, message: Message, now: float) -> None:
        """The tensors of ``message`` are there to be sent."""
        self._sent[message] = now

    def received(self, message: Message, asked: float, now: float) -> None:
        """``message`` is there; it was waited for since ``asked``."""
        if now - asked > WAITED:
            self._came[message] = now

    def told(self, iteration: int) -> _Times | None:
        """The times of ``iteration``, for the coordinator, if it is one of the two."""
        kept = (self._written(), self._before)
        return next((found for found in kept if found is not None and found.of[0] == iteration), None)

    def _written(self) -> _Times | None:
        if self._label is None:
            return None
        return _Times(self._label, _named(self._sent), _named(self._came))


def _named(times: Mapping[Message, float]) -> dict[str, float]:
    # Messages of a stage's second chunk may go the other way, and would be confused with others' (`measure.hops`).
    return {str(message): round(seconds, 6) for message, seconds in times.items() if not message.chunk}
