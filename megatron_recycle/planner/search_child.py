"""The search in a process of its own: ``python -m megatron_recycle.planner.search_child``, a request in, schedules
out.

It runs niced, and its own alarm ends it even where the solver does not listen; the parent kills it besides.
Each better schedule is written as one line of JSON at once, so that a kill loses nothing that was found.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from ..plan import Problem, lower_bound
from . import cpsat
from .instance import Instance, Schedule, build
from .portfolio import Found, search, value

#: actions scheduled and timed per second, well below what one core does, so that work ends a search before
#: the clock
RATE = 400_000
#: plans with more actions are left to the portfolio
CPSAT_ACTIONS = 1_600


def main() -> int:
    """Serve one request from standard input."""
    os.nice(10)
    request = json.loads(sys.stdin.readline())
    begin = time.monotonic()
    wall = float(request["wall"])
    signal.setitimer(signal.ITIMER_REAL, wall + 1.0)  # the default action ends the process, whatever runs
    problem = Problem.from_json(request["problem"])
    instance = build(problem)
    _Search(instance, request, begin + wall).run()
    return 0


class _Search:
    """Portfolio, then CP-SAT where the plan is small enough; only what beats the incumbent is reported."""

    def __init__(self, instance: Instance, request: dict[str, Any], end: float) -> None:
        self.instance, self.end = instance, end
        self.budget, self.seed = float(request["budget"]), int(request["seed"])
        self.floor = lower_bound(instance.problem)
        self.route: list[int] = request["route"]
        self.trace: list[int] = request["trace"]
        self.best = value(instance, self.route, self.trace)
        self.stats: dict[str, Any] = {"trials": 0, "cut": False}

    def run(self) -> None:
        """Search until the bound is met, the work is done or the clock says so."""
        small = self.instance.actions <= CPSAT_ACTIONS
        if self.best > self.floor:
            share = 0.4 if small else 0.5
            found = search(self.instance, int(RATE * self.budget * share), self.seed, self._over, self._keep)
            self._note(found)
        if self.best > self.floor and small and not self._over():
            self._exact()
        self._say({"done": True, **self.stats})

    def _exact(self) -> None:
        if not cpsat.available():
            self.stats["cpsat"] = "missing"
            return
        limits = cpsat.Limits(work=self.budget * 0.3, wall=max(0.1, self.end - time.monotonic()), seed=self.seed)
        polish = replace(limits, work=self.budget * 0.1, interleave=False, merge_only=True)
        for chosen in (polish, limits):
            if self.best <= self.floor or self._over():
                break
            outcome = cpsat.solve(self.instance, self.route, self.trace, self.floor, chosen,
                                  lambda trace: self._offer(self.route, trace, "cpsat"))
            self.stats["cpsat_work"] = round(self.stats.get("cpsat_work", 0.0) + outcome.work, 3)
            self.stats["cut"] = self.stats["cut"] or outcome.cut
            if not chosen.merge_only:
                self.stats.update(cpsat_bound=outcome.bound, cpsat_proven=outcome.proven)

    def _note(self, found: Found) -> None:
        self.stats["trials"] = found.trials
        self.stats["cut"] = found.cut

    def _over(self) -> bool:
        return time.monotonic() > self.end

    def _keep(self, schedule: Schedule) -> None:
        self._offer(schedule.route, schedule.trace, "portfolio")

    def _offer(self, route: list[int], trace: list[int], source: str) -> None:
        result = value(self.instance, route, trace)
        if result >= self.best:
            return
        self.best, self.route, self.trace = result, route, trace
        self._say({"route": route, "trace": trace, "source": source})

    @staticmethod
    def _say(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
