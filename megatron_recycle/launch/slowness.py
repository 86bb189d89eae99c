"""Which workers are slow, compared with their peers: reported, and declared out where the user asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from megatron_recycle.launch.planning import Planning
from megatron_recycle.membership import Coordinator
from megatron_recycle.membership.names import Process
from megatron_recycle.plan.costs import NOTABLE

Emit = Callable[[Mapping[str, Any]], None]


class Slowness:
    """Durations of every worker's micro-batches, the latest of each process, and who is known to be slow."""

    def __init__(self) -> None:
        self._seconds: dict[str, tuple[str, float]] = {}
        self._slow: dict[str, str] = {}

    def take(self, profile: Mapping[str, Any], members: Mapping[str, str]) -> float | None:
        """How many times as long as the median of its peers a worker takes; None if that is not known.

        Args:
            profile: of a member.
            members: incarnation of each.
        """
        name = profile["worker"]
        if name not in members:
            return None
        self._seconds[name] = members[name], sum(profile.get(kind, 0.0) for kind in "FBW")
        current = {other: seconds for other, (incarnation, seconds) in self._seconds.items()
                   if members.get(other) == incarnation}
        (_, stage), part = Process.parse(name)
        peers = [seconds for other, seconds in current.items()
                 if other != name and (Process.parse(other).worker.stage, Process.parse(other).part) == (stage, part)]
        usual = median(peers) if peers else 0.0
        return current[name] / usual if usual > 0 else None

    def news(self, name: str, incarnation: str, factor: float) -> bool:
        """Whether this process has become slow by this, and that was not known."""
        if factor <= 1 + NOTABLE:
            self._slow.pop(name, None)
            return False
        known = self._slow.get(name) == incarnation
        self._slow[name] = incarnation
        return not known


class Profiles:
    """What becomes of a worker's profile: costs for the planner, a report of slow workers.

    Args:
        emit: gets the events that follow from it.
    """

    def __init__(self, planning: Planning, coordinator: Coordinator, emit: Emit) -> None:
        self._planning = planning
        self._coordinator = coordinator
        self._emit = emit
        self._slowness = Slowness()

    def take(self, profile: Mapping[str, Any]) -> None:
        """Called in the coordinator's event loop."""
        found = self._planning.measured(profile)
        if found is not None:
            self._emit({"event": "profiled", "t": profile["t"], "generation": profile["generation"],
                        **found.to_json()})
        state, name = self._coordinator.state, profile["worker"]
        factor = self._slowness.take(profile, state.incarnations())
        limit = float((state.description or {}).get("slow_factor_out") or 0)
        if factor is not None and limit and factor > limit:
            self._coordinator.declare_out(name, "slow")
        elif factor is not None and self._slowness.news(name, state.members[name].incarnation, factor):
            self._coordinator.tell({
                "event": "slow", "t": time.time(), "generation": state.generation,
                "iteration": state.committed + 1, "worker": name, "factor": round(factor, 2)})
        if found is not None:
            self._coordinator.search_again()
