"""Moments of a training job: where in an iteration a worker is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """``worker``'s ``nth`` (from 0) arrival at ``phase`` of ``iteration``, counted over all attempts."""

    worker: str
    phase: str
    iteration: int
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.worker} at {self.phase} {self.nth} of {self.iteration}"


class Arrivals:
    """Counts those of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._seen: dict[tuple[str, int], int] = {}

    def at(self, phase: str, iteration: int) -> Moment:
        """It gets to ``phase`` of ``iteration`` now."""
        nth = self._seen.get((phase, iteration), 0)
        self._seen[phase, iteration] = nth + 1
        return Moment(self._worker, phase, iteration, nth)
