"""The workers' measurements and what follows from them: costs for the planner; slow workers are reported, and declared
out where the user asks for it."""

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
        profiled: the event with all that is known of the job, if that has changed so much that plans are made again.
        spent: the event with where each worker's time went, when it is due.
        out: members that are to be declared out.
        slow: events about members that have become slow.
    """

    profiled: Mapping[str, Any] | None = None
    spent: Mapping[str, Any] | None = None
    out: tuple[str, ...] = ()
    slow: tuple[Mapping[str, Any], ...] = ()


class Slowness:
    """The slow workers that were reported."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def news(self, slow: Mapping[str, float], incarnations: Mapping[str, str]) -> dict[str, float]:
        """The workers of ``slow`` that were not in it the last time, or were as another process. ``slow`` has all that
        are slow now."""
        now = {name: incarnations[name] for name in slow if name in incarnations}
        found = {name: slow[name] for name, incarnation in now.items() if self._known.get(name) != incarnation}
        self._known = now
        return found


class Profiles:
    """Takes in what workers measure."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._slowness = Slowness()
        self._heard: dict[str, str] = {}  # incarnations of those that have told anything

    def take(self, state: State, member: Member, measured: Measured) -> Conclusions:
        """The consequences of a member's `measured` message."""
        incarnations = state.incarnations()
        self._heard[member.worker] = member.incarnation
        memory = {} if measured.memory is None else measured.memory.to_json()
        profile = {"worker": member.worker, **measured.to_json(), **memory}
        found = self._planning.measured(profile, member.incarnation)
        spent = self._planning.spent()
        now = {"t": time.time(), "generation": state.generation}
        limit = state.job.slow_factor_out
        # A process that has just come to the place of a slow one has measured nothing yet.
        slow = {name: factor for name, factor in self._planning.slow.items()
                if name in incarnations and incarnations[name] == self._heard.get(name)}
        return Conclusions(
            None if found is None else {"event": "profiled", **now, **found.to_json()},
            None if spent is None else {"event": "spent", **now, "iteration": state.progress.committed, **spent},
            tuple(name for name, factor in slow.items() if limit and factor > limit),
            tuple({"event": "slow", **now, "iteration": state.progress.committed + 1, "worker": name,
                   "factor": round(factor, 2)}
                  for name, factor in self._slowness.news(slow, incarnations).items() if not limit or factor <= limit),
        )
