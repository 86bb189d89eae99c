"""What the workers have measured, put together: costs and memory of the job as the planner takes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_recycle.membership.names import Process
from megatron_recycle.plan import Costs, PlanError, Worker
from megatron_recycle.planner import Profile, caps, drifted

log = logging.getLogger(__name__)

NOTABLE = 0.10
"""A worker's memory has changed if it differs by more than this share."""


@dataclass(frozen=True)
class Memory:
    """Memory in the planner's units: what workers have for activations, what a micro-batch of each stage holds before
    and after its B, and the bytes of all that."""

    room: Mapping[Worker, int]
    before_b: tuple[int, ...]
    after_b: tuple[int, ...]
    bytes: Mapping[str, Any]

    def cap(self, worker: Worker, activations: int) -> int:
        """Units that ``worker`` may hold: ``activations`` micro-batches, if there is room for so many."""
        # One that was not there when the others were heard has its peers' memory.
        peers = [size for other, size in self.room.items() if other.stage == worker.stage]
        room = self.room.get(worker, min(peers, default=1))
        return min(room, activations * max(self.before_b[worker.stage], self.after_b[worker.stage]))


@dataclass(frozen=True)
class Measured:
    """What is known of the running job; ``memory`` is None where nobody knows how much of it there is."""

    costs: Costs
    memory: Memory | None = None

    def to_json(self) -> dict[str, Any]:
        """For the event."""
        memory = self.memory
        return {"costs": self.costs.to_json(), **({} if memory is None else {"memory": dict(memory.bytes)})}


class Measurements:
    """Profiles of the workers, each the latest of its worker.

    Attributes:
        live: names of the workers to wait for.
        known: what the profiles say, None before all live workers have been heard.
    """

    def __init__(self) -> None:
        self.live: frozenset[str] = frozenset()
        self.known: Measured | None = None
        self._profiles: dict[str, Mapping[str, Any]] = {}
        self._heard: set[str] = set()

    def take(self, profile: Mapping[str, Any]) -> bool:
        """Take in one worker's profile; whether `known` has changed notably, which it may once all have been heard."""
        worker = str(Process.parse(profile["worker"]).worker)  # a worker's parts take the same time and memory
        self._profiles[worker] = profile
        self._heard.add(worker)
        if not self._heard >= self.live:
            return False
        self._heard.clear()
        costs, memory = self._costs(), self._memory()
        if costs is None:
            return False
        if self.known is not None and not drifted(self.known.costs, costs) and not _changed(self.known.memory, memory):
            return False
        self.known = Measured(costs, memory)
        return True

    def _costs(self) -> Costs | None:
        durations = Profile(1 + max(Worker.parse(name).stage for name in self._profiles))
        for name, profile in self._profiles.items():
            for kind in "FBW":
                if kind in profile:
                    durations.add(kind, Worker.parse(name), profile[kind])
            durations.add("S", Worker.parse(name), 0.0)
        return durations.costs()

    def _memory(self) -> Memory | None:
        live = {Worker.parse(name): self._profiles[name] for name in self.live}
        if not live or any(profile.get("room") is None or not profile["held"]["before_b"] for profile in live.values()):
            return None
        stages = range(1 + max(worker.stage for worker in live))
        before, after = ([max(profile["held"][name] for worker, profile in live.items() if worker.stage == stage)
                          for stage in stages] for name in ("before_b", "after_b"))
        room = {worker: int(profile["room"]) for worker, profile in live.items()}
        try:
            units, before_b, after_b = caps(room, before, after)
        except PlanError as error:
            log.warning("recycle: memory does not limit the plans: %s", error)
            return None
        return Memory(units, before_b, after_b, {
            "before_b": before, "after_b": after, "room": {str(worker): size for worker, size in sorted(room.items())}})


def _changed(old: Memory | None, new: Memory | None) -> bool:
    if old is None or new is None:
        return old is not new
    pairs = [(old.bytes["room"].get(name, 0), size) for name, size in new.bytes["room"].items()]
    for kind in ("before_b", "after_b"):
        pairs += zip(old.bytes[kind], new.bytes[kind])
    return any(abs(size - was) > NOTABLE * max(was, 1) for was, size in pairs)
