"""The planner's problem: grid, membership, costs and rules, which is the plan file without its orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .costs import Costs
from .errors import PlanError
from .grid import Grid, Worker

OBJECTIVES = ("period", "makespan")
AHEAD = 2
"""Receives that a worker keeps posted for the activations that it reads next, and as many for gradients."""


def _count(value: Any, what: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"{what} must be an integer of at least {least}, not {value!r}")
    return value


@dataclass(frozen=True)
class Problem:
    """A membership of a grid with its costs and rules.

    ``failed``: workers that are out. ``cap``: most memory units a worker may hold (a worker not named has no cap).
    ``before_b``/``after_b``: units a micro-batch weighs per stage from F's start to B's end, and from there
    to W's end. ``message``: units that a posted receive weighs per stage (default: nothing). It counts receives beyond
    the usual ones (`receives`); room for the usual ones is kept before caps are derived. ``block``: micro-batches per
    block of the exact reduction, 0 for none. ``tied``: groups of stages that step together. ``full_backward``: stages
    whose workers may run B and W in one (FB). Raises PlanError.
    """

    grid: Grid
    costs: Costs
    failed: tuple[Worker, ...] = ()
    cap: Mapping[Worker, int] = field(default_factory=dict)
    before_b: tuple[int, ...] = ()
    after_b: tuple[int, ...] = ()
    message: tuple[int, ...] = ()
    block: int = 0
    tied: tuple[tuple[int, ...], ...] = ()
    split_backward: bool = True
    full_backward: tuple[int, ...] = ()
    objective: str = "period"

    def __post_init__(self) -> None:
        stages = self.grid.stages
        object.__setattr__(self, "failed", tuple(sorted(set(self.failed))))
        object.__setattr__(self, "full_backward", tuple(sorted(set(self.full_backward))))
        for name, usual in (("before_b", 1), ("after_b", 1), ("message", 0)):
            if not getattr(self, name):
                object.__setattr__(self, name, (usual,) * stages)
            if len(getattr(self, name)) != stages:
                raise PlanError(f"held: {name} lists {len(getattr(self, name))} stages, not {stages}")
            for value in getattr(self, name):
                _count(value, f"held: {name}")
        if self.costs.stages != stages:
            raise PlanError(f"costs: {self.costs.stages} stages are given, the grid has {stages}")
        for what, workers in (("failed", self.failed), ("cap", self.cap), ("costs: speed", self.costs.speed)):
            for worker in workers:
                if worker not in self.grid:
                    raise PlanError(f"{what}: worker {worker} is outside the grid of"
                                    f" {self.grid.pipelines} pipelines and {stages} stages")
        for worker, cap in self.cap.items():
            _count(cap, f"cap: worker {worker}'s cap", least=1)
        _count(self.block, "block")
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective {self.objective!r} is neither period nor makespan")
        for stage in self.full_backward:
            if _count(stage, "full_backward: a stage") >= stages:
                raise PlanError(f"full_backward: stage {stage} is outside the grid of {stages} stages")
        seen: set[int] = set()
        for group in self.tied:
            for stage in group:
                if _count(stage, "tied: a stage") >= stages or stage in seen:
                    raise PlanError(f"tied: stage {stage} is outside the grid or tied twice")
                seen.add(stage)

    def live(self, stage: int) -> tuple[Worker, ...]:
        """The live workers of ``stage``, in order."""
        out = set(self.failed)
        return tuple(w for w in (Worker(d, stage) for d in range(self.grid.pipelines)) if w not in out)

    def live_workers(self) -> tuple[Worker, ...]:
        """Every live worker, in order."""
        out = set(self.failed)
        return tuple(w for w in self.grid.workers() if w not in out)

    def duration(self, kind: str, worker: Worker) -> int:
        """Time of an action of ``kind`` on ``worker``."""
        return self.costs.duration(kind, worker, self.split_backward)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Stages that step together: the tied groups, every other stage alone, ordered by their first stage."""
        tied = {stage for group in self.tied for stage in group}
        groups = [tuple(sorted(group)) for group in self.tied if group]
        groups += [(stage,) for stage in range(self.grid.stages) if stage not in tied]
        return tuple(sorted(groups))

    def require_live(self) -> None:
        """Raise PlanError, naming the stage, if a stage has no live worker, or none whose cap holds a micro-batch."""
        for stage in range(self.grid.stages):
            live = self.live(stage)
            if not live:
                raise PlanError(f"stage {stage} has no live worker left: bring one back, or let workers of"
                                " other stages move over")
            if not any(self.fits(worker) for worker in live):
                raise PlanError(f"stage {stage}: no live worker's cap holds one micro-batch; raise the cap")

    def weight(self, stage: int) -> int:
        """Most units one micro-batch holds at ``stage`` at any time."""
        before = self.before_b[stage]
        return max(before, self.after_b[stage]) if self.split_backward else before

    def receives(self, stage: int) -> int:
        """Receives that a worker of ``stage`` usually has posted: AHEAD for each side that messages come from."""
        return AHEAD * ((stage > 0) + (stage < self.grid.stages - 1))

    def fits(self, worker: Worker) -> bool:
        """Whether the worker's cap lets it hold one micro-batch."""
        cap = self.cap.get(worker)
        return cap is None or self.weight(worker.stage) <= cap

    def without(self, workers: Iterable[Worker]) -> Problem:
        """The same problem with ``workers`` failed as well."""
        return replace(self, failed=(*self.failed, *workers))

    def to_json(self) -> dict[str, Any]:
        """The plan file's statement of its problem: the digested parts without ``workers``, and ``objective``."""
        return {"grid": {"stages": self.grid.stages, "microbatches": list(self.grid.microbatches)},
                "failed": [str(w) for w in self.failed],
                "costs": self.costs.to_json(),
                "cap": {str(w): c for w, c in sorted(self.cap.items())},
                "held": {"before_b": list(self.before_b), "after_b": list(self.after_b), "message": list(self.message)},
                "block": self.block, "tied": [list(group) for group in self.tied],
                "split_backward": self.split_backward, "full_backward": list(self.full_backward),
                "objective": self.objective}

    @classmethod
    def from_json(cls, value: Any) -> Problem:
        """Read what to_json wrote, or a whole plan file of any version (the rest is left alone). Raises PlanError."""
        if not isinstance(value, dict):
            raise PlanError("an object is needed at the top of a plan file")
        grid = _member(value, "grid", dict)
        held = _member(value, "held", dict, {})
        split = _member(value, "split_backward", bool, True)
        if moved := _member(value, "stage_of", dict, {}):
            raise PlanError(f"stage_of: worker {min(moved)} is moved to another stage, which no job has ever done; name"
                            " the position that its process takes instead, and its own among the failed")
        return cls(
            grid=Grid(grid.get("stages", 0), tuple(_member(grid, "microbatches", list))),
            costs=Costs.from_json(_member(value, "costs", dict)),
            failed=tuple(Worker.parse(w) for w in _member(value, "failed", list, [])),
            cap={Worker.parse(w): c for w, c in _member(value, "cap", dict, {}).items()},
            before_b=tuple(_member(held, "before_b", list, [])),
            after_b=tuple(_member(held, "after_b", list, [])),
            message=tuple(_member(held, "message", list, [])),
            block=value.get("block", 0),
            tied=_tied(_member(value, "tied", list, [])),
            split_backward=split,
            full_backward=tuple(_member(value, "full_backward", list, [])),
            objective=value.get("objective", "period"))


def _tied(groups: list[Any]) -> tuple[tuple[int, ...], ...]:
    if not all(isinstance(group, list) for group in groups):
        raise PlanError("plan file: tied must be a list of lists of stages")
    return tuple(map(tuple, groups))


_NEEDED: Any = object()


def _member(value: Mapping[str, Any], name: str, kind: type, default: Any = _NEEDED) -> Any:
    entry = value.get(name, default)
    if entry is _NEEDED:
        raise PlanError(f"plan file: {name} is missing")
    if not isinstance(entry, kind):
        raise PlanError(f"plan file: {name} must be {kind.__name__}, not {type(entry).__name__}")
    return entry
