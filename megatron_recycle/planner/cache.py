"""Plans remembered by canonical problem, in memory and (if asked for) on disk, and what to plan ahead of
failures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from ..plan import Plan, PlanError, Problem, violations
from .canonical import Canonical, canonical

#: part of every key: raised when the planner changes so that older plans should not be used any more
GENERATION = 2


class Cache:
    """The best plan known for each canonical problem.

    With a ``folder`` plans outlive the process; a file that does not hold a legal plan for its problem is
    ignored.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = Path(folder) if folder is not None else None
        self._plans: dict[str, Plan] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, problem: Problem) -> Plan | None:
        """The remembered plan, in the problem's own names, or None."""
        form = canonical(problem)
        plan = self._load(key(form))
        return None if plan is None else form.back(plan, problem)

    def put(self, problem: Problem, plan: Plan) -> None:
        """Remember a plan unless a better one is known."""
        form = canonical(problem)
        name = key(form)
        known = self._load(name)
        if known is not None and known.objective_value <= plan.objective_value:
            return
        self._plans[name] = form.forth(plan)
        if self._folder is not None:
            self._plans[name].save(self._folder / f"{name}.json")

    def __contains__(self, problem: Problem) -> bool:
        return self._load(key(canonical(problem))) is not None

    def __len__(self) -> int:
        return len(self._plans)

    def _load(self, name: str) -> Plan | None:
        if name in self._plans:
            return self._plans[name]
        if self._folder is None or not (self._folder / f"{name}.json").exists():
            return None
        try:
            plan = Plan.load(self._folder / f"{name}.json")
        except PlanError:
            return None
        if key(Canonical(plan.problem, {}, ())) != name or violations(plan):
            return None
        self._plans[name] = replace(plan, stated="")
        return self._plans[name]


def key(form: Canonical) -> str:
    """A short name of a canonical problem."""
    text = json.dumps([GENERATION, form.problem.to_json()], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def ahead(problem: Problem) -> Iterator[Problem]:
    """Memberships that may come next, likeliest first, one for each canonical problem.

    One more failure; then the return of each failed worker; then two more failures. Those that leave a stage
    without a worker are left out.
    """
    live = problem.live_workers()
    seen = {key(canonical(problem))}
    candidates = [problem.without([worker]) for worker in live]
    candidates += [replace(problem, failed=tuple(w for w in problem.failed if w != back))
                   for back in problem.failed]
    for candidate in candidates:
        yield from _fresh(candidate, seen)
    for pair in combinations(live, 2):
        yield from _fresh(problem.without(pair), seen)


def _fresh(candidate: Problem, seen: set[str]) -> Iterator[Problem]:
    if not all(candidate.live(s) for s in range(candidate.grid.stages)):
        return
    name = key(canonical(candidate))
    if name not in seen:
        seen.add(name)
        yield candidate
