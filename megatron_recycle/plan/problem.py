"""The planner's problem: grid, membership, costs and rules, which is the plan file without its orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .costs import Costs
from .errors import PlanError
from .grid import Grid, Worker
from .plan_file import PlanFile

Crossing = tuple[int, ...]
"""For each boundary between chunks, how many layers later (negative: earlier) than at home a micro-batch crosses it; ()
where it crosses all at home."""
AHEAD = 2
"""Receives that a worker keeps posted for its next activations, and as many for gradients."""


@dataclass(frozen=True)
class Problem:
    """A membership of a grid with its costs and rules.

    ``failed``: workers that are out. ``cap``: most memory units a worker may hold (a worker not named has no cap).
    ``placement``: the stage of each chunk, in the order of the model's layers; (): one chunk per stage. Lists are by
    chunk, which is by stage where each has one. ``before_b``/``after_b``: units a micro-batch weighs from F's start to
    B's end, and from there to W's end. ``message``: units that a posted receive weighs (default: nothing). It counts
    receives beyond the usual ones (`receives`); room for the usual ones is kept before caps are derived. ``block``:
    micro-batches per block of the exact reduction, 0 for none. ``tied``: groups of chunks whose stages step together.
    ``full_backward``: chunks whose B and W may be run in one (FB).

    ``layers``: number of layers of each chunk that are alike and may be lent; (): nothing is lent. ``lend``: for each
    boundary between chunks, the most layers by which a micro-batch may cross it earlier, and later. ``layer_held``:
    units that a micro-batch weighs in one such layer, before and after its B. ``layer_parameters``: units that one such
    layer weighs on its helper as long as it is lent. Raises PlanError.
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
    placement: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    lend: tuple[tuple[int, int], ...] = ()
    layer_held: tuple[tuple[int, int], ...] = ()
    layer_parameters: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "failed", tuple(sorted(set(self.failed))))
        object.__setattr__(self, "full_backward", tuple(sorted(set(self.full_backward))))
        self._placed()
        stages, of = self.grid.stages, "chunk" if self.placement else "stage"
        chunks = range(self.chunks)
        for name, usual in (("before_b", 1), ("after_b", 1), ("message", 0)):
            self._listed(name, usual, "held: ")
        if self.costs.stages != self.chunks:
            raise PlanError(f"costs: {self.costs.stages} {of}s are given, the grid has {self.chunks}")
        if len(self.costs.step) != stages:
            if any(self.costs.step):
                raise PlanError(f"costs: step lists {len(self.costs.step)} stages, the grid has {stages}")
            object.__setattr__(self, "costs", replace(self.costs, step=(0,) * stages))
        for what, workers in (("failed", self.failed), ("cap", self.cap), ("costs: speed", self.costs.speed)):
            for worker in workers:
                if worker not in self.grid:
                    raise PlanError(f"{what}: worker {worker} is outside the grid of"
                                    f" {self.grid.pipelines} pipelines and {stages} stages")
        for worker, cap in self.cap.items():
            if cap < 1:
                raise PlanError(f"cap: worker {worker} may hold {cap} units, one is the least")
        if self.block < 0:
            raise PlanError(f"block: {self.block} micro-batches are no block")
        if outside := [chunk for chunk in self.full_backward if chunk not in chunks]:
            raise PlanError(f"full_backward: {of} {outside[0]} is outside the grid of {self.chunks} {of}s")
        tied = [chunk for group in self.tied for chunk in group]
        for chunk in tied:
            if chunk not in chunks or tied.count(chunk) > 1:
                raise PlanError(f"tied: {of} {chunk} is outside the grid or tied twice")
        self._lendable()

    def _listed(self, name: str, usual: Any, of: str = "") -> None:
        """Give a list by chunk, or by boundary, its default, and check its length."""
        length = self.chunks - (name == "lend")
        if not getattr(self, name):
            object.__setattr__(self, name, (usual,) * length)
        if len(getattr(self, name)) != length:
            raise PlanError(f"{of}{name} lists {len(getattr(self, name))} entries, not {length}")

    def _placed(self) -> None:
        """Check the placement, and normalise the usual one (one chunk per stage) to ()."""
        stages = range(self.grid.stages)
        for chunk, stage in enumerate(self.placement):
            if stage not in stages:
                raise PlanError(f"placement: chunk {chunk} is on stage {stage}, the grid has {len(stages)} stages")
        if self.placement and set(self.placement) != set(stages):
            raise PlanError(f"placement: stage {min(set(stages) - set(self.placement))} has no chunk")
        if self.placement == tuple(stages):
            object.__setattr__(self, "placement", ())

    def _lendable(self) -> None:
        """Check the fields about lent layers, and normalise all of them to () where nothing may be lent."""
        lists = {"layers": 0, "lend": (0, 0), "layer_held": (0, 0), "layer_parameters": 0}
        for name, usual in lists.items():
            self._listed(name, usual)
        for boundary, (earlier, later) in enumerate(self.lend):
            if earlier > self.layers[boundary] or later > self.layers[boundary + 1]:
                raise PlanError(f"lend: boundary {boundary} cannot move by {max(earlier, later)} layers, chunks"
                                f" {boundary} and {boundary + 1} have {self.layers[boundary]} and"
                                f" {self.layers[boundary + 1]}")
            if (earlier or later) and self.stage_of(boundary) == self.stage_of(boundary + 1):
                raise PlanError(f"lend: chunks {boundary} and {boundary + 1} are both on stage"
                                f" {self.stage_of(boundary)}, whose workers hold both: nothing is lent there")
        if not any(map(any, self.lend)):
            for name in lists:
                object.__setattr__(self, name, ())
        elif not self.costs.layer:
            raise PlanError("lend: the costs of one layer are needed (costs: layer)")

    @property
    def chunks(self) -> int:
        """Number of chunks of the model."""
        return len(self.placement) or self.grid.stages

    def stage_of(self, chunk: int) -> int:
        """Chunks of each stage, in the order of the model's layers; ``Action.chunk`` is an index into this list."""
        return self.placement[chunk] if self.placement else chunk

    @cached_property
    def chunks_of(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk its index among its stage's chunks: the ``Action.chunk`` of its actions."""
        return tuple(tuple(chunk for chunk in range(self.chunks) if self.stage_of(chunk) == stage)
                     for stage in range(self.grid.stages))

    @cached_property
    def place_of(self) -> tuple[int, ...]:
        """For each chunk its place among those of its stage, as actions name it."""
        return tuple(self.chunks_of[self.stage_of(chunk)].index(chunk) for chunk in range(self.chunks))

    @property
    def lends(self) -> bool:
        """Whether any layer may be lent."""
        return bool(self.lend)

    def more(self, chunk: int, crossing: Crossing) -> dict[int, int]:
        """Extra layers by chunk that an action of ``chunk`` runs (negative: does not run) for a micro-batch with this
        ``crossing``."""
        found: dict[int, int] = {}
        for boundary, sign in ((chunk - 1, -1), (chunk, 1)):
            by = sign * crossing[boundary] if 0 <= boundary < len(crossing) else 0
            if by > 0:
                found[chunk + sign] = by
            elif by < 0:
                found[chunk] = found.get(chunk, 0) + by
        return found

    def live(self, stage: int) -> tuple[Worker, ...]:
        """The live workers of ``stage``, in order."""
        out = set(self.failed)
        return tuple(w for w in (Worker(d, stage) for d in range(self.grid.pipelines)) if w not in out)

    def live_workers(self) -> tuple[Worker, ...]:
        """Every live worker, in order."""
        out = set(self.failed)
        return tuple(w for w in self.grid.workers() if w not in out)

    def duration(self, kind: str, worker: Worker, place: int = 0, crossing: Crossing = ()) -> int:
        """Time of an action of ``kind`` on ``worker``, of chunk ``place`` of its stage, for a micro-batch with this
        ``crossing`` (() for all at home). A ``FB`` takes as long as its ``B`` and its ``W`` one after the other; a
        ``S`` takes the stage's step."""
        if kind == "S":
            return self.costs.step[worker.stage]
        if kind == "FB":
            return self.duration("B", worker, place, crossing) + self.duration("W", worker, place, crossing)
        chunk = self.chunks_of[worker.stage][place]
        more = self.more(chunk, crossing) if crossing else None
        return self.costs.scaled(self.costs.cost(kind, chunk, more, self.split_backward), worker)

    def held(self, chunk: int, crossing: Crossing = ()) -> tuple[int, int]:
        """Units that a micro-batch with this ``crossing`` weighs in its span of ``chunk``: from F's start to B's end,
        and from there to W's end."""
        before, after = self.before_b[chunk], self.after_b[chunk]
        if crossing:
            for other, count in self.more(chunk, crossing).items():
                before += count * self.layer_held[other][0]
                after += count * self.layer_held[other][1]
        return max(0, before), max(0, after) if self.split_backward else 0

    @cached_property
    def group(self) -> tuple[int, ...]:
        """By stage, the number of its group: stages of tied chunks step together, every other stage steps alone. Groups
        are numbered in the order of their first stages."""
        found = list(range(self.grid.stages))
        for tied in self.tied:
            joined = {found[self.stage_of(chunk)] for chunk in tied}
            found = [min(joined) if first in joined else first for first in found]
        numbers = {first: number for number, first in enumerate(sorted(set(found)))}
        return tuple(numbers[first] for first in found)

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
        """Most units one micro-batch holds at ``stage`` at any time, in all of its chunks: an earlier chunk's are held
        until the micro-batch has come back from the later chunks."""
        return sum(max(self.held(chunk)) for chunk in self.chunks_of[stage])

    def message_weight(self, stage: int) -> int:
        """Units that a posted receive of ``stage`` weighs at most."""
        return max(self.message[chunk] for chunk in self.chunks_of[stage])

    def receives(self, stage: int) -> int:
        """Usual number of posted receives of a worker of ``stage``: AHEAD for activations and AHEAD for gradients, as
        far as a chunk before or after its own may be with another worker."""
        return AHEAD * sum(any(0 <= chunk + way < self.chunks and (self.stage_of(chunk + way) != stage
                                                                   or self.grid.pipelines > 1)
                               for chunk in self.chunks_of[stage]) for way in (-1, 1))

    def fits(self, worker: Worker) -> bool:
        """Whether the worker's cap lets it hold one micro-batch."""
        cap = self.cap.get(worker)
        return cap is None or self.weight(worker.stage) <= cap

    def without(self, workers: Iterable[Worker]) -> Problem:
        """The same problem with ``workers`` failed as well."""
        return replace(self, failed=(*self.failed, *workers))

    def to_json(self) -> dict[str, Any]:
        """The plan file's statement of its problem: the digested parts without ``workers`` and ``crossings``, and
        ``objective``."""
        value: dict[str, Any] = {
                "grid": {"stages": self.grid.stages, "microbatches": list(self.grid.microbatches)},
                "failed": [str(w) for w in self.failed],
                "costs": self.costs.to_json(),
                "cap": {str(w): c for w, c in sorted(self.cap.items())},
                "held": {"before_b": list(self.before_b), "after_b": list(self.after_b), "message": list(self.message)},
                "block": self.block, "tied": [list(group) for group in self.tied],
                "split_backward": self.split_backward, "full_backward": list(self.full_backward),
                "objective": self.objective}
        if self.placement:
            value["placement"] = list(self.placement)
        if self.lends:
            value["lending"] = {
                "layers": list(self.layers), "lend": [list(most) for most in self.lend],
                "held": [list(held) for held in self.layer_held], "parameters": list(self.layer_parameters)}
        return value

    @classmethod
    def from_file(cls, file: PlanFile) -> Problem:
        """The problem of a plan file of any version. Raises PlanError."""
        if file.grid is None or file.costs is None:
            raise PlanError(f"plan file: {'grid' if file.grid is None else 'costs'} is missing")
        if file.stage_of:
            raise PlanError(f"stage_of: worker {min(file.stage_of)} is moved to another stage, which no job has ever"
                            " done; name the position that its process takes instead, and its own among the failed")
        held, lending = file.held, file.lending
        return cls(
            grid=file.grid, costs=Costs.from_json(file.costs), failed=tuple(map(Worker.parse, file.failed)),
            cap={Worker.parse(name): cap for name, cap in file.cap.items()}, before_b=held.before_b,
            after_b=held.after_b, message=held.message, block=file.block, tied=file.tied,
            split_backward=file.split_backward, full_backward=file.full_backward, objective=file.objective,
            placement=file.placement, layers=lending.layers, lend=lending.lend, layer_held=lending.held,
            layer_parameters=lending.parameters)
