"""Costs and memory of the job in the planner's form, put together from the workers' measurements."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from megatron_recycle.measure import Profile, caps, drifted
from megatron_recycle.measure.hops import Hops
from megatron_recycle.measure.noise import LONG, RECENT
from megatron_recycle.membership.names import Process
from megatron_recycle.plan import Costs, PlanError, Worker, of_place

_ACTIONS = ("F", "B", "W", "reduce", "step", "gap")
"""Action times that a worker reports; all its other times are where time went (`runtime.activity.part_of`)."""

_HELD = ("before_b", "after_b", "message")
"""Sizes of a micro-batch, by chunk."""

_SPENT_EVERY = 25
"""Iterations between two events `spent`."""

log = logging.getLogger(__name__)

NOTABLE = 0.10
"""A worker's memory has changed if it differs by more than this share."""


@dataclass(frozen=True)
class Memory:
    """Memory in the planner's units: room for activations of each worker, and per chunk the share of a micro-batch
    before and after its B and of a posted receive. ``placement``: the stage of each chunk; (): each stage has one."""

    room: Mapping[Worker, int]
    before_b: tuple[int, ...]
    after_b: tuple[int, ...]
    message: tuple[int, ...]
    placement: tuple[int, ...] = ()

    def cap(self, worker: Worker, activations: int) -> int:
        """Units that ``worker`` may hold: ``activations`` micro-batches, if there is room for so many."""
        # A worker that was missing when the others reported has its peers' memory.
        peers = [size for other, size in self.room.items() if other.stage == worker.stage]
        room = self.room.get(worker, min(peers, default=1))
        at_home = self.placement or range(len(self.before_b))
        return min(room, activations * max(max(held) for stage, *held in zip(
            at_home, self.before_b, self.after_b, strict=True) if stage == worker.stage))


@dataclass(frozen=True)
class Measured:
    """Knowledge of the running job; ``memory`` is None where its size is unknown.

    ``bytes`` has the measured sizes behind it: bytes held by a micro-batch, per chunk; the most bytes held at a time
    and the bytes kept besides, per worker.
    """

    costs: Costs
    memory: Memory | None = None
    bytes: Mapping[str, Any] = field(default_factory=dict)

    def held(self, name: str) -> Sequence[int]:
        """Bytes of a micro-batch by chunk: ``before_b``, ``after_b`` or ``message``, if they are known."""
        found: Sequence[int] = self.bytes.get("held", {}).get(name, ())
        return found

    def to_json(self) -> dict[str, Any]:
        """Fields of the event `profiled`."""
        return {"costs": self.costs.to_json(), **self.bytes}


class Measurements:
    """The workers' reports of their iterations, and the costs that follow from them.

    Attributes:
        live: names of the workers to wait for.
        placement: the stage of each chunk of the model; () where each stage has one.
        known: costs and memory by the reports; None before all live workers have reported.
        slow: first process of a live worker that takes notably longer than its peers -> how many times as long.
    """

    def __init__(self) -> None:
        self.live: frozenset[str] = frozenset()
        self.placement: tuple[int, ...] = ()
        self.known: Measured | None = None
        self.slow: Mapping[str, float] = {}
        self._durations = Profile()
        self._hops = Hops()
        self._memory: dict[str, Mapping[str, Any]] = {}
        self._incarnations: dict[str, str] = {}
        self._processes: dict[Worker, str] = {}
        self._heard: set[str] = set()
        self._spent: dict[str, deque[Mapping[str, float]]] = {}
        self._rounds = self._rounds_at_spent = 0  # rounds of reports by all, and rounds at the last `spent`
        self._since = 0  # rounds of reports by all since `known` has changed
        self._streak = 0  # times in a row that a stage seemed to have changed

    def restore(self, event: Mapping[str, Any]) -> None:
        """Go on from the last event of an earlier coordinator (`Measured.to_json`). An event of a release that measured
        stages without separate chunks applies to each chunk of a stage."""
        found = {name: event[name] for name in ("held", "kept", "room") if name in event}
        placement = self.placement
        if placement and "held" in found:
            found["held"] = {name: [sizes[stage] for stage in placement]
                             if name in _HELD and len(sizes) < len(placement) else sizes
                             for name, sizes in found["held"].items()}
        self.known = Measured(
            Costs.from_json(event["costs"]).by_chunk(placement), _memory(found, placement), found)

    def take(self, profile: Mapping[str, Any], incarnation: str = "") -> bool:
        """Take in one worker's measurements since its last report; returns whether `known` has changed notably, which
        is judged each time all live workers have reported.

        Args:
            profile: its durations are in "iterations", seconds by kind for each; times of messages in "lags".
            incarnation: the process's; with a new one the worker's earlier measurements are dropped.
        """
        process = Process.parse(profile["worker"])
        if process.part:  # a worker's parts take the same time and memory
            return False
        worker, name = process.worker, str(process.worker)
        if self._incarnations.setdefault(name, incarnation) != incarnation:
            self._durations.forget(worker)
            self._memory.pop(name, None)
            self._spent.pop(name, None)
            self.slow = {other: factor for other, factor in self.slow.items() if other != profile["worker"]}
            self._incarnations[name] = incarnation
        self._processes[worker] = profile["worker"]
        for durations in profile["iterations"]:
            chunks = self.placement.count(worker.stage) or 1
            self._durations.add(worker, _kinds(durations, chunks), chunks)
            self._spent.setdefault(name, deque(maxlen=LONG)).append(
                {part: seconds for part, seconds in durations.items() if part.partition("/")[0] not in _ACTIONS})
        for times in profile.get("lags", ()):
            self._hops.take(worker, times)
        if "held" in profile:
            self._memory[name] = profile
        self._heard.add(name)
        if not self.live or not self._heard >= self.live:
            return False
        self._heard.clear()
        self._rounds += 1
        return self._judged()

    def spent(self) -> dict[str, Any] | None:
        """Fields of the event `spent`, when it is due: how each worker's time was spent, in seconds of an iteration,
        with the costs by the same iterations: means, for readers who want an iteration's real time."""
        if self._heard or self._rounds % _SPENT_EVERY != LONG or self._rounds == self._rounds_at_spent:
            return None
        self._rounds_at_spent = self._rounds
        live = [Worker.parse(name) for name in self.live]
        hop = self._hops.usual()
        costs = self._durations.costs(live, self._at_home(live), LONG, self._hop() if hop is None else hop, mean)
        workers = {name: _mean(self._spent[name]) for name in sorted(self.live) if name in self._spent}
        return None if costs is None else {"costs": costs.to_json(), "seconds": workers}

    def _judged(self) -> bool:
        live = [Worker.parse(name) for name in self.live]
        self.slow = {self._processes[worker]: factor for worker, factor in self._durations.factors(live).items()
                     if factor > 1}
        found = self._bytes() or (self.known.bytes if self.known is not None else {})
        memory = _memory(found, self.placement)
        noise, hop = self._durations.noise(live), self._hop()
        self._since += 1
        for window in (RECENT, LONG):
            costs = self._durations.costs(live, self._at_home(live), LONG if self.known is None else window, hop)
            if costs is None or (window == LONG and self._since < LONG):
                return False
            known = Measured(costs, memory, found)
            if (self.known is None or self._drifted(self.known.costs, costs, noise, window)
                    or (window == RECENT and _changed(self.known, known))):
                self.known, self._since, self._streak = known, 0, 0
                return True
        return False

    def _at_home(self, live: Iterable[Worker]) -> Sequence[int]:
        """The stage of each chunk of the model."""
        return self.placement or range(1 + max(worker.stage for worker in live))

    def _hop(self) -> float:
        """Seconds of a transfer."""
        hop = self._hops.seconds()
        if hop is None:  # as before: not every iteration has messages that are waited for
            hop = self.known.costs.hop / 1e6 if self.known is not None else 0.0
        return hop

    def _drifted(self, planned: Costs, costs: Costs, noise: Mapping[str, float], window: int) -> bool:
        """Whether costs have drifted, for good. A few iterations count for a whole stage only if the next ones, without
        them, agree: on a busy machine a whole stage may be late for a moment. Speeds of single workers have been
        confirmed already."""
        found = drifted(planned, costs, noise, window, placement=self.placement)
        if window == RECENT and planned.speed == costs.speed:
            self._streak = self._streak + 1 if found else 0
            return self._streak > RECENT
        return found

    def _bytes(self) -> dict[str, Any]:
        """Sizes measured by the live workers; {} if some have not reported, or if a chunk's are unknown."""
        live = {Worker.parse(name): self._memory[name] for name in self.live if name in self._memory}
        if len(live) < len(self.live):
            return {}
        at_home = self._at_home(live)
        held = {name: [max(profile["held"].get(of_place(name, at_home[:chunk].count(stage)), 0)
                           for worker, profile in live.items() if worker.stage == stage)
                       for chunk, stage in enumerate(at_home)] for name in _HELD}
        if not all(held["before_b"]):
            return {}
        of_workers = {name: {str(worker): profile["held"].get(name) for worker, profile in sorted(live.items())}
                      for name in ("peak", "planned")}
        found = {"held": {**held, **of_workers},
                 "kept": {str(worker): profile.get("kept") for worker, profile in sorted(live.items())}}
        room = {str(worker): profile.get("room") for worker, profile in sorted(live.items())}
        return found if None in room.values() else {**found, "room": room}


def _kinds(durations: Mapping[str, float], chunks: int) -> dict[str, float]:
    """Durations by the kinds of `Profile`. A plan knows no time between actions: each action includes its gap, and the
    step all that a worker does once an iteration. A thread that is ahead of its device has no gaps, and does the rest,
    but for the step, beside the device's work."""
    gap = durations.get("gap")
    parts = ("reduce", "step") if gap is None else ("reduce", "own", "script")
    names = [of_place(kind, chunk) for chunk in range(chunks) for kind in "FBW"]
    found = {name: durations[name] + (gap or 0.0) for name in names if name in durations}
    return {**found, "S": sum(durations.get(part, 0.0) for part in parts)}


def _mean(iterations: Collection[Mapping[str, float]]) -> dict[str, float]:
    parts = sorted({part for each in iterations for part in each})
    return {part: round(mean(each.get(part, 0.0) for each in iterations), 6) for part in parts}


def _memory(found: Mapping[str, Any], placement: tuple[int, ...]) -> Memory | None:
    if "room" not in found:
        return None
    room = {Worker.parse(name): int(size) for name, size in found["room"].items()}
    try:
        before_b, after_b, message = (found["held"][name] for name in _HELD)
        return Memory(*caps(room, before_b, after_b, message, placement=placement), placement)
    except PlanError as error:
        log.warning("recycle: memory does not limit the plans: %s", error)
        return None


def _changed(old: Measured, new: Measured) -> bool:
    """Whether memory now limits plans notably differently; more of a plentiful memory changes nothing."""
    if old.memory is None or new.memory is None:
        return old.memory is not new.memory
    activations = 2 * len(new.memory.before_b)  # the default cap
    pairs = [(old.memory.cap(worker, activations), new.memory.cap(worker, activations)) for worker in new.memory.room]
    for kind in ("before_b", "after_b"):
        pairs += zip(old.bytes["held"][kind], new.bytes["held"][kind])
    return any(abs(size - was) > NOTABLE * max(was, 1) for was, size in pairs)
