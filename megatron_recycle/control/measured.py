"""What becomes of the workers' measurements: costs for the planner; the slow are reported, and declared out where the
user asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_recycle.control import Coordinator
from megatron_recycle.control.planning import Planning
from megatron_recycle.membership.failure_kinds import FailureKind

Emit = Callable[[Mapping[str, Any]], None]


class Slowness:
    """Who is known to be slow."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def news(self, slow: Mapping[str, float], incarnations: Mapping[str, str]) -> dict[str, float]:
        """Those of ``slow``, which are all that are, that were not the last time, or were as another process."""
        now = {name: incarnations[name] for name in slow if name in incarnations}
        found = {name: slow[name] for name, incarnation in now.items() if self._known.get(name) != incarnation}
        self._known = now
        return found


class Profiles:
    """Takes in the workers' measurements.

    Args:
        emit: gets the events that follow from them.
    """

    def __init__(self, planning: Planning, coordinator: Coordinator, emit: Emit) -> None:
        self._planning = planning
        self._coordinator = coordinator
        self._emit = emit
        self._slowness = Slowness()
        self._heard: dict[str, str] = {}  # incarnations of those that have told anything

    def take(self, profile: Mapping[str, Any]) -> None:
        """Called in the coordinator's event loop."""
        state = self._coordinator.state
        incarnations = state.incarnations()
        if profile["worker"] not in incarnations or profile.get("fenced"):
            return
        self._heard[profile["worker"]] = incarnations[profile["worker"]]
        found = self._planning.measured(profile, incarnations[profile["worker"]])
        if found is not None:
            self._emit({"event": "profiled", "t": profile["t"], "generation": profile["generation"],
                        **found.to_json()})
        limit = float((state.description or {}).get("slow_factor_out") or 0)
        # Not who has just come to the place of one that was slow.
        slow = {name: factor for name, factor in self._planning.slow.items()
                if incarnations.get(name) == self._heard[name]}
        for name, factor in slow.items():
            if limit and factor > limit:
                self._coordinator.declare_out(name, FailureKind.SLOW)
        for name, factor in self._slowness.news(slow, incarnations).items():
            if not limit or factor <= limit:
                self._coordinator.tell({"event": "slow", "t": time.time(), "generation": state.generation,
                                        "iteration": state.committed + 1, "worker": name, "factor": round(factor, 2)})
        if found is not None:
            self._coordinator.search_again()
