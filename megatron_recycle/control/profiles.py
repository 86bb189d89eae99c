"""The workers' measurements and their consequences: costs for the planner; slow workers are reported, and declared out
if the user asks for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_recycle.control.planning import Planning
from megatron_recycle.membership.protocol import Measured
from megatron_recycle.membership.state import Member, State


@dataclass(frozen=True)
class Conclusions:
    """The consequences of one measurement.

    Attributes:
        profiled: the event with all measurements of the job, if they have changed enough for new plans.
        spent: the event with the breakdown of each worker's time, when it is due.
        out: members to be declared out.
        slow: events about members that have become slow.
    """

    profiled: Mapping[str, Any] | None = None
    spent: Mapping[str, Any] | None = None
    out: tuple[str, ...] = ()
    slow: tuple[Mapping[str, Any], ...] = ()


class Slowness:
    """The slow workers reported so far."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def news(self, slow: Mapping[str, float], incarnations: Mapping[str, str]) -> dict[str, float]:
        """The newly slow workers of ``slow``: not in it the last time, or as another process. ``slow`` has all workers
        that are slow now."""
        now = {name: incarnations[name] for name in slow if name in incarnations}
        found = {name: slow[name] for name, incarnation in now.items() if self._known.get(name) != incarnation}
        self._known = now
        return found


class Profiles:
    """Evaluates the workers' measurements."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._slowness = Slowness()
        self._last_incarnations: dict[str, str] = {}  # by worker, the last incarnation with a measurement

    def take(self, state: State, member: Member, measured: Measured) -> Conclusions:
        """The consequences of a member's `measured` message."""
        incarnations = state.incarnations()
        self._last_incarnations[member.worker] = member.incarnation
        memory = {} if measured.memory is None else measured.memory.to_json()
        profile = {"worker": member.worker, **measured.to_json(), **memory}
        found = self._planning.measured(profile, member.incarnation)
        spent = self._planning.spent()
        now = {"t": time.time(), "generation": state.generation}
        limit = state.job.slow_factor_out
        # A new process in the place of a slow one has no measurements yet.
        slow = {name: factor for name, factor in self._planning.slow.items()
                if name in incarnations and incarnations[name] == self._last_incarnations.get(name)}
        return Conclusions(
            None if found is None else {"event": "profiled", **now, **found.to_json()},
            None if spent is None else {"event": "spent", **now, "iteration": state.progress.committed, **spent},
            tuple(name for name, factor in slow.items() if limit and factor > limit),
            tuple({"event": "slow", **now, "iteration": state.progress.committed + 1, "worker": name,
                   "factor": round(factor, 2)}
                  for name, factor in self._slowness.news(slow, incarnations).items() if not limit or factor <= limit),
        )
