"""The plan: each live worker's ordered actions, with the problem it solves; the value of the plan file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from .action import PASSES_ON, Action
from .errors import PlanError
from .grid import Microbatch, Worker
from .plan_file import PlanFile
from .problem import Crossing, Problem
from .value import read

FORMAT, VERSION = "recycle-plan", 4
SOURCES = ("1f1b", "greedy", "portfolio", "cpsat", "drop")
_DIGESTED = ("grid", "failed", "costs", "cap", "held", "block", "tied", "split_backward", "full_backward", "workers")
_DIGESTED_1 = (*(name for name in _DIGESTED if name != "full_backward"), "stage_of")
"""Parts of a plan that a digest of version 1 covers; ``stage_of`` was always empty there."""
_DIGESTED_MORE = {"placement": 3, "lending": 3, "crossings": 3, "done": 4}
"""Parts that are digested where a plan has them, with the version that brought them. A plan without them keeps its
version 2 digest."""
_SINCE = {"full_backward": 2, **_DIGESTED_MORE}
"""Parts that files of earlier versions cannot have."""
_MICROBATCH = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\Z")


@dataclass(frozen=True)
class Plan:
    """Plan file, version 4. ``period``, ``makespan`` and ``lower_bound`` are in the unit of the costs.

    ``crossings``: the micro-batches that cross chunk boundaries away from home; all others are omitted. ``done``: the
    number of a worker's first actions that were done before the plan begins, where any were. Such a plan is for the
    rest of one iteration: its figures are of the rest, and its period is its makespan. ``stats``: how the plan was
    made; not digested. ``stated``: the digest a file came with, or "" for a plan made here; validate.violations
    compares it with ``digest``. Raises PlanError if ``done`` counts more actions than there are before the step of a
    listed worker.
    """

    problem: Problem
    workers: Mapping[Worker, tuple[Action, ...]]
    period: float
    makespan: float
    lower_bound: float
    source: str
    stats: Mapping[str, Any] = field(default_factory=dict, compare=False)
    stated: str = field(default="", compare=False)
    crossings: Mapping[Microbatch, Crossing] = field(default_factory=dict)
    done: Mapping[Worker, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "crossings", {
            item: tuple(crossing) for item, crossing in sorted(self.crossings.items()) if any(crossing)})
        object.__setattr__(self, "done", {worker: count for worker, count in sorted(self.done.items()) if count})
        for worker, count in self.done.items():
            before = self.actions(worker)[:max(0, count)]
            if count != len(before) or any(action.kind == "S" for action in before):
                raise PlanError(f"done: {count} actions of worker {worker}, which has"
                                f" {sum(action.kind != 'S' for action in self.workers[worker])} before its step")

    def actions(self, worker: Worker) -> tuple[Action, ...]:
        """The ordered actions of a live worker. Raises PlanError for a worker that the plan does not list."""
        try:
            return self.workers[worker]
        except KeyError:
            raise PlanError(f"worker {worker} has no orders in this plan") from None

    def without(self, left_out: Collection[tuple[int, int]]) -> Plan:
        """The same orders without these ``(pipeline, microbatch)``, for an iteration that leaves them out."""
        def kept(actions: Sequence[Action]) -> tuple[Action, ...]:
            return tuple(action for action in actions if action[1:3] not in left_out)

        return replace(self, stated="", workers={worker: kept(actions) for worker, actions in self.workers.items()},
                       done={worker: len(kept(self.workers[worker][:count])) for worker, count in self.done.items()})

    def rest(self, worker: Worker) -> tuple[Action, ...]:
        """The actions of a live worker that are still to run. Raises PlanError for a worker that is not listed."""
        return self.actions(worker)[self.done.get(worker, 0):]

    def chunk(self, worker: Worker, action: Action) -> int:
        """The chunk, counted through the model, that an action of ``worker`` runs."""
        return self.problem.chunks_of[worker.stage][action.chunk]

    def duration(self, worker: Worker, action: Action) -> int:
        """Time of an action of ``worker``, with the layers that its micro-batch's crossing adds or takes away."""
        return self.problem.duration(action.kind, worker, action.chunk, self.crossing(*action[1:3]))

    def crossing(self, pipeline: int, microbatch: int) -> Crossing:
        """A micro-batch's crossing of each boundary between chunks; () if all at home."""
        return self.crossings.get((pipeline, microbatch), ())

    def span(self, pipeline: int, microbatch: int, chunk: int) -> tuple[int, int]:
        """The layers, first and end, that an action of ``chunk`` (counted through the model) runs for a micro-batch.
        Layers that may be lent are counted through the model; the rest of a chunk stays with it."""
        layers = self.problem.layers or (0,) * self.problem.chunks
        crossing = self.crossing(pipeline, microbatch) or (0,) * (self.problem.chunks - 1)
        first = sum(layers[:chunk])
        return (first + (crossing[chunk - 1] if chunk else 0),
                first + layers[chunk] + (crossing[chunk] if chunk < len(crossing) else 0))

    @cached_property
    def _route(self) -> Mapping[tuple[int, int, int], Worker]:
        chunks_of = self.problem.chunks_of
        return {(action.pipeline, action.microbatch, chunks_of[worker.stage][action.chunk]): worker
                for worker, actions in self.workers.items() for action in actions if action.kind == "F"}

    @cached_property
    def _read(self) -> frozenset[tuple[str, int, int, int]]:
        """Messages that done actions have read: kind of the message, pipeline, micro-batch and chunk of the action."""
        return frozenset((PASSES_ON[action.kind], action.pipeline, action.microbatch, self.chunk(worker, action))
                         for worker, count in self.done.items() for action in self.workers[worker][:count]
                         if action.kind in PASSES_ON)

    def route(self) -> dict[tuple[int, int, int], Worker]:
        """The worker that runs each ``(pipeline, microbatch, chunk)``; ``chunk`` is counted through the model, and the
        stage where each stage has one."""
        return dict(self._route)

    @property
    def objective_value(self) -> float:
        """Period or makespan, as the problem's objective says."""
        return self.makespan if self.problem.objective == "makespan" else self.period

    @property
    def gap(self) -> float:
        """Excess of the plan over its lower bound, as a fraction of the bound."""
        return self.objective_value / self.lower_bound - 1 if self.lower_bound else 0.0

    @cached_property
    def digest(self) -> str:
        """``sha256:`` and the SHA-256 of the sorted-key, space-free JSON of grid, failed, costs, cap, held, block,
        tied, split_backward, full_backward and workers; of placement, lending, crossings and done where the plan has
        them."""
        return _digest_of(self._content(), _DIGESTED)

    def _content(self) -> dict[str, Any]:
        named: dict[Action, str] = {}
        workers = {}
        for worker, actions in sorted(self.workers.items()):
            workers[str(worker)] = [named.get(a) or named.setdefault(a, str(a)) for a in actions]
        content = {**self.problem.to_json(), "workers": workers}
        if self.crossings:
            content["crossings"] = {f"{d}.{m}": list(crossing) for (d, m), crossing in self.crossings.items()}
        if self.done:
            content["done"] = {str(worker): count for worker, count in self.done.items()}
        return content

    def _content_1(self) -> dict[str, Any]:
        """The digested content in the form of version 1."""
        content = self._content()
        held = {name: content["held"][name] for name in ("before_b", "after_b")}
        return {**content, "held": held, "stage_of": {}}

    def to_json(self) -> dict[str, Any]:
        """The plan file as plain JSON values; ``stats`` only if there are any."""
        period = int(self.period) if float(self.period).is_integer() else self.period
        value = {"format": FORMAT, "version": VERSION, **self._content(), "period": period,
                 "makespan": self.makespan, "lower_bound": self.lower_bound, "source": self.source,
                 "digest": self.digest}
        if self.stats:
            value["stats"] = dict(self.stats)
        return value

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        """Read a plan file's JSON, of any version. Raises PlanError when malformed; legality is checked by validate."""
        return cls.from_file(read(PlanFile, value, "plan file"))

    def to_file(self) -> PlanFile:
        """The plan in its wire form."""
        return PlanFile.from_json(self.to_json())

    @classmethod
    def from_file(cls, file: PlanFile) -> Plan:
        """Read the wire form. Raises PlanError as `from_json` does."""
        if file.format != FORMAT or not 1 <= file.version <= VERSION:
            raise PlanError(f"plan file: format and version must be {FORMAT!r} and 1 to {VERSION}, not {file.format!r}"
                            f" and {file.version}")
        if file.source not in SOURCES:
            raise PlanError(f"plan file: source {file.source!r} is none of {', '.join(SOURCES)}")
        unknown = {name for name, since in _SINCE.items() if file.version < since}
        file = msgspec.structs.replace(file, **{name: getattr(PlanFile(), name) for name in unknown})
        problem = Problem.from_file(file)
        if file.workers is None or file.period is None or file.makespan is None or file.lower_bound is None:
            raise PlanError("plan file: workers, period, makespan or lower_bound is missing")
        parse = cache(Action.parse)
        workers = {Worker.parse(name): tuple(map(parse, actions)) for name, actions in file.workers.items()}
        for worker, actions in workers.items():
            held = len(problem.chunks_of[worker.stage]) if worker in problem.grid else 1
            if beyond := next((action for action in actions if action.chunk >= held), None):
                raise PlanError(f"plan file: {beyond} of worker {worker}, whose stage has {held}"
                                f" chunk{'s' if held > 1 else ''}")
        plan = cls(problem, workers, file.period, file.makespan, file.lower_bound, file.source, file.stats,
                   file.digest, _crossings(file.crossings, problem),
                   {Worker.parse(name): count for name, count in file.done.items()})
        if file.version == 1 and file.digest == _digest_of(plan._content_1(), _DIGESTED_1):
            return replace(plan, stated=plan.digest)
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanError, naming the file, if it cannot be read or is malformed."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanError(f"plan file {path} cannot be read: {error}") from error
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file atomically."""
        target = Path(path)
        aside = target.with_name(target.name + f".{os.getpid()}.tmp")
        aside.write_text(json.dumps(self.to_json(), separators=(", ", ": ")) + "\n", encoding="utf-8")
        os.replace(aside, target)


def _crossings(listed: Mapping[str, Crossing], problem: Problem) -> dict[Microbatch, Crossing]:
    found: dict[Microbatch, Crossing] = {}
    for name, crossing in listed.items():
        match = _MICROBATCH.match(name)
        if match is None:
            raise PlanError(f"plan file: crossings: {name!r} is not of the form PIPELINE.MICROBATCH, for example 1.4")
        if len(crossing) != problem.chunks - 1:
            raise PlanError(f"plan file: crossings of {name} must be a list of {problem.chunks - 1} integers, one per"
                            " boundary between chunks")
        found[int(match[1]), int(match[2])] = crossing
    return found


def _digest_of(content: Mapping[str, Any], names: Sequence[str]) -> str:
    covered = [*names, *(name for name in _DIGESTED_MORE if name in content)]
    text = json.dumps({name: content[name] for name in covered}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
