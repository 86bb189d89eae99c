"""The plan: for every live worker its ordered actions, with the problem it solves; the value of the plan file."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .action import Action
from .errors import PlanError
from .grid import Worker
from .problem import Problem

FORMAT, VERSION = "recycle-plan", 2
SOURCES = ("1f1b", "greedy", "portfolio", "cpsat", "drop")
_DIGESTED = ("grid", "failed", "costs", "cap", "held", "block", "tied", "split_backward", "full_backward", "workers")
_DIGESTED_1 = (*(name for name in _DIGESTED if name != "full_backward"), "stage_of")
"""Parts of a plan that a digest of version 1 covers; ``stage_of`` was always empty there."""


@dataclass(frozen=True)
class Plan:
    """Version 2 of the plan file. ``period``, ``makespan`` and ``lower_bound`` are in the unit of the costs.

    ``stats`` says how the plan was made and is no part of the digest. ``stated`` is the digest a file came
    with, or "" for a plan made here; validate.violations compares it with ``digest``.
    """

    problem: Problem
    workers: Mapping[Worker, tuple[Action, ...]]
    period: float
    makespan: int
    lower_bound: float
    source: str
    stats: Mapping[str, Any] = field(default_factory=dict, compare=False)
    stated: str = field(default="", compare=False)

    def actions(self, worker: Worker) -> tuple[Action, ...]:
        """The ordered actions of a live worker. Raises PlanError for a worker that the plan does not list."""
        try:
            return self.workers[worker]
        except KeyError:
            raise PlanError(f"worker {worker} has no orders in this plan") from None

    def without(self, left_out: Collection[tuple[int, int]]) -> Plan:
        """The same orders but for these ``(pipeline, microbatch)``, for an iteration that does not run them."""
        return replace(self, stated="", workers={
            worker: tuple(action for action in actions if (action.pipeline, action.microbatch) not in left_out)
            for worker, actions in self.workers.items()})

    def live(self, stage: int) -> tuple[Worker, ...]:
        """The live workers of ``stage``, in order."""
        return self.problem.live(stage)

    @cached_property
    def _route(self) -> dict[tuple[int, int, int], Worker]:
        return {(action.pipeline, action.microbatch, worker.stage): worker
                for worker, actions in self.workers.items() for action in actions if action.kind == "F"}

    def route(self) -> dict[tuple[int, int, int], Worker]:
        """The worker that runs each ``(pipeline, microbatch, stage)``."""
        return dict(self._route)

    @property
    def objective_value(self) -> float:
        """Period or makespan, as the problem's objective says."""
        return self.makespan if self.problem.objective == "makespan" else self.period

    @property
    def gap(self) -> float:
        """How far the plan is above its lower bound, as a fraction of the bound."""
        return self.objective_value / self.lower_bound - 1 if self.lower_bound else 0.0

    @cached_property
    def digest(self) -> str:
        """``sha256:`` and the SHA-256 of the sorted-key, space-free JSON of grid, failed, costs, cap, held, block,
        tied, split_backward, full_backward and workers."""
        return _digest_of(self._content(), _DIGESTED)

    def _content(self) -> dict[str, Any]:
        named: dict[Action, str] = {}
        workers = {}
        for worker, actions in sorted(self.workers.items()):
            workers[str(worker)] = [named.get(a) or named.setdefault(a, str(a)) for a in actions]
        return {**self.problem.to_json(), "workers": workers}

    def _content_1(self) -> dict[str, Any]:
        """The content as version 1 wrote it."""
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
        """Read a plan file's JSON, of this version or of version 1. Raises PlanError when malformed; whether it is
        legal is for validate to say."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise PlanError(f"plan file: format must be {FORMAT!r}")
        version = value.get("version")
        if version not in (1, VERSION) or isinstance(version, bool):
            raise PlanError(f"plan file: version {version!r} is neither 1 nor {VERSION}")
        if version == 1:
            value = {**value, "full_backward": []}
        problem = Problem.from_json(value)
        listed = value.get("workers")
        if not isinstance(listed, dict):
            raise PlanError("plan file: workers must map each live worker to its actions")
        parsed: dict[str, Action] = {}
        workers = {}
        for name, actions in listed.items():
            if not isinstance(actions, list) or not all(isinstance(a, str) for a in actions):
                raise PlanError(f"plan file: the actions of worker {name} must be a list of strings")
            workers[Worker.parse(name)] = tuple(parsed.get(a) or parsed.setdefault(a, Action.parse(a))
                                                for a in actions)
        numbers: dict[str, Any] = {}
        for name in ("period", "makespan", "lower_bound"):
            number = value.get(name)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
                raise PlanError(f"plan file: {name} must be a non-negative number, not {number!r}")
            numbers[name] = number
        source = value.get("source")
        if source not in SOURCES:
            raise PlanError(f"plan file: source {source!r} is none of {', '.join(SOURCES)}")
        stats = value.get("stats", {})
        if not isinstance(stats, dict):
            raise PlanError("plan file: stats must be an object")
        stated = value.get("digest", "")
        if not isinstance(stated, str):
            raise PlanError("plan file: digest must be a string")
        plan = cls(problem=problem, workers=workers, source=source, stats=stats, stated=stated, **numbers)
        if version == 1 and stated == _digest_of(plan._content_1(), _DIGESTED_1):
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
        """Write the plan file, whole or not at all."""
        target = Path(path)
        aside = target.with_name(target.name + f".{os.getpid()}.tmp")
        aside.write_text(json.dumps(self.to_json(), separators=(", ", ": ")) + "\n", encoding="utf-8")
        os.replace(aside, target)


def _digest_of(content: Mapping[str, Any], names: Sequence[str]) -> str:
    text = json.dumps({name: content[name] for name in names}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
