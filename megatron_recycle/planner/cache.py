"""Plan cache by canonical problem, and the memberships to plan for ahead of failures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations

from ..plan import Plan, Problem
from .canonical import Canonical, canonical


class Cache:
    """The best plan known for each canonical problem."""

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}

    def get(self, problem: Problem) -> Plan | None:
        """The cached plan, in the problem's own names, or None."""
        form = canonical(problem)
        plan = self._plans.get(key(form))
        return None if plan is None else form.back(plan, problem)

    def put(self, problem: Problem, plan: Plan) -> None:
        """Cache a plan unless a better one is known."""
        form = canonical(problem)
        name = key(form)
        known = self._plans.get(name)
        if known is None or plan.objective_value < known.objective_value:
            self._plans[name] = form.forth(plan)

    def __contains__(self, problem: Problem) -> bool:
        return key(canonical(problem)) in self._plans

    def __len__(self) -> int:
        return len(self._plans)


def key(form: Canonical) -> str:
    """A short name of a canonical problem."""
    text = json.dumps(form.problem.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def ahead(problem: Problem) -> Iterator[Problem]:
    """Likely next memberships, likeliest first, one for each canonical problem.

    One more failure; then the return of each failed worker; then two more failures. Memberships in which a stage has no
    worker are left out.
    """
    live = problem.live_workers()
    seen = {key(canonical(problem))}
    for candidate in chain(
            (problem.without([worker]) for worker in live),
            (replace(problem, failed=tuple(w for w in problem.failed if w != back)) for back in problem.failed),
            (problem.without(pair) for pair in combinations(live, 2))):
        if not all(candidate.live(s) for s in range(candidate.grid.stages)):
            continue
        name = key(canonical(candidate))
        if name not in seen:
            seen.add(name)
            yield candidate
