"""Restarts: which dead workers a launcher starts again, and when."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_TOGETHER = 5.0
"""Seconds within which failures of a host's workers count as one."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_SHORTAGE_PAUSE = 10.0
_FRUITLESS = 3
"""Lives in a row that may end before they have joined: after these another one would end the same way."""


@dataclass
class _Rank:
    restarts: int = 0
    fruitless: int = 0
    """Lives in a row that ended before they had joined."""
    cuts: int = 0
    due: float | None = None


class Restarts:
    """Launcher's memory of its ranks' lives; times are the caller's clock, in seconds.

    Args:
        say: gets each line for the user.
        give_up: gets each rank that will not be started again.
    """

    def __init__(self, say: Callable[[str], None], give_up: Callable[[int], None] = lambda rank: None) -> None:
        self.most = 0
        """Limit of restarts per rank (`max_restarts`), once training has `begun`; until then 0."""
        self.of_host = 0
        """Limit of failures of this host's workers (`max_failures_per_host`); 0: none."""
        self.given_up: set[int] = set()
        """The ranks that stay out."""
        self._say = say
        self._give_up = give_up
        self._ranks: dict[int, _Rank] = {}
        self._failures, self._latest = 0, -math.inf
        self._early: dict[int, str] | None = {}
        """The ranks that have failed before this host has heard that training has begun, with their logs."""

    def begun(self, most: int, now: float) -> None:
        """Training has begun, and a rank may be restarted ``most`` times, including one that ended before this message
        came. Idempotent."""
        self.most = most
        early, self._early = self._early or {}, None
        for rank, log in early.items():
            self.ended(rank, now, log)

    def ended(self, rank: int, now: float, log: str) -> None:
        """The rank's process has failed: decide whether to restart it."""
        if not self.most:
            if self._early is not None:
                self._early[rank] = log
            return
        known = self._ranks.setdefault(rank, _Rank())
        if self._is_limit(now):
            self._stays_out(rank, f"workers of this host have failed {self._failures} times (max_failures_per_host)")
        elif known.restarts >= self.most:
            self._stays_out(rank, f"it has been started again {known.restarts} times (max_restarts)")
        elif known.fruitless >= _FRUITLESS:
            self._stays_out(rank, f"it has ended {known.fruitless} times before it had joined; see {log}")
        else:
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**known.fruitless)
            known.restarts, known.fruitless, known.due = known.restarts + 1, known.fruitless + 1, now + pause
            self._say(f"rank {rank} is started again in {pause:.0f} s (restart {known.restarts} of {self.most})")

    def _is_limit(self, now: float) -> bool:
        """Count a failure (one for all that fail at the same time); returns whether the limit is reached. Then the
        ranks that were to be restarted stay out, too."""
        self._failures += now - self._latest > _TOGETHER
        self._latest = now
        if not self.of_host or self._failures < self.of_host:
            return False
        for other, known in self._ranks.items():
            if known.due is not None:
                known.due = None
                self._stays_out(other, "its host has failed too often (max_failures_per_host)")
        return True

    def cut_off(self, rank: int, now: float, log: str) -> None:
        """The rank's process was well, but its host was out of reach and counts as lost. It is restarted even if `most`
        is 0. A flapping network makes the pauses longer."""
        known = self._ranks.setdefault(rank, _Rank())
        if known.due is not None:
            return
        if known.fruitless >= _FRUITLESS:
            self._stays_out(rank, f"it has ended {known.fruitless} times before it had joined; see {log}")
            return
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**known.cuts)
        known.cuts, known.fruitless, known.due = known.cuts + 1, known.fruitless + 1, now + pause
        for other in self._ranks.values():  # a host comes back as a whole
            if other.due is not None and other.cuts == known.cuts:
                other.due = known.due

    def later(self, rank: int, now: float) -> None:
        """The rank was due, and its host has no room for a process at present: the rank loses none of its restarts."""
        self._ranks[rank].due = now + _SHORTAGE_PAUSE

    def replaced(self, rank: int) -> None:
        """The rank's process has failed, and its replacement has its device already."""
        if self.most:
            self._stays_out(rank, "its device has the process that it was to move to")

    def _stays_out(self, rank: int, why: str) -> None:
        if rank not in self.given_up:
            self.given_up.add(rank)
            self._say(f"rank {rank} stays out: {why}")
            self._give_up(rank)

    def joined(self, rank: int) -> None:
        """The rank's new process takes part in the training."""
        self.given_up.discard(rank)
        if rank in self._ranks:
            self._ranks[rank].fruitless = 0

    def due(self, now: float) -> list[int]:
        """Ranks to be started now; each is named once."""
        found = [rank for rank, known in self._ranks.items() if known.due is not None and known.due <= now]
        for rank in found:
            self._ranks[rank].due = None
        return found

    def pending(self) -> bool:
        """Whether some rank will be started later."""
        return any(known.due is not None for known in self._ranks.values())

    def cancel(self) -> None:
        """Start no rank again: the job is over."""
        self.most, self._early = 0, None
        for known in self._ranks.values():
            known.due = None
