"""A search in a process of its own, both ends of its pipe: ``run`` for the planning process, ``serve`` for the
searching one.

The request is one line of JSON, and so is each better schedule, written at once: a kill loses no found schedule. The
searching process is niced. An alarm of its own ends it where the solver does not respond; its parent kills it besides.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..plan import Problem, lower_bound
from . import cpsat, lent_schedules
from .crossing_flow import Crossings
from .instance import Instance, Schedule, build
from .portfolio import Found, goal, search
from .timing import timed

#: arguments of the interpreter that make it serve one search; modules in the working folder ('') are not ours
COMMAND = ("-c", "import sys; sys.path[:] = filter(None, sys.path); "
                 "from megatron_recycle.planner.search_process import serve; serve()")
#: seconds kept back for reading and validating: the minimum, and per action of the plan
RESERVE, RESERVE_PER_ACTION = 0.05, 8e-6
#: actions scheduled and timed per second, well below one core's speed: work ends a search before the clock does
RATE = 400_000
#: the same with lent layers, whose spans have to be worked out for every trial
LENT_RATE = 300_000
#: plans with more actions are left to the portfolio
CPSAT_ACTIONS = 1_600


def run(request: dict[str, Any], actions: int, budget_s: float,
        cancelled: Callable[[], bool]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The last schedule that the searching process found (or None) and its closing statistics.

    Returns within ``budget_s`` seconds, even if that process hangs; ``killed`` in the statistics: it had to be killed.
    ``cancelled`` is polled about ten times a second.
    """
    begin = time.monotonic()
    limit = max(0.1, budget_s - RESERVE - RESERVE_PER_ACTION * actions)
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH", "")) if p)
    # A file in memory: writing to a pipe would block on a child that does not read.
    with os.fdopen(os.memfd_create("recycle-search"), "w+b") as request_file:
        request_file.write(json.dumps({**request, "wall": max(0.05, limit - 0.1)}).encode() + b"\n")
        request_file.seek(0)
        child = subprocess.Popen([sys.executable, *COMMAND], stdin=request_file, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, start_new_session=True,
                                 env={**os.environ, "PYTHONPATH": path})
    stats: dict[str, Any] = {"killed": False}
    best: dict[str, Any] | None = None
    try:
        for message in _lines(child, begin + limit, cancelled):
            if message.get("done"):
                stats.update({key: entry for key, entry in message.items() if key != "done"})
                return best, stats
            best = message
        stats["killed"] = stats["cut"] = True
        return best, stats
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _lines(child: subprocess.Popen[bytes], end: float, cancelled: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Messages of the child until it ends, the time is over, or the search is cancelled."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0 and not cancelled():
            if not selector.select(min(left, 0.1)):
                continue
            chunk = os.read(child.stdout.fileno(), 1 << 20)
            if not chunk:
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                try:
                    message = json.loads(line)
                except json.JSONDecodeError:
                    return
                yield message


def serve() -> None:
    """Answer one request from standard input on standard output: schedules, each better than the one before, then the
    statistics."""
    os.nice(10)
    request = json.loads(sys.stdin.readline())
    begin = time.monotonic()
    wall = float(request["wall"])
    signal.setitimer(signal.ITIMER_REAL, wall + 1.0)  # the default action ends the process, even inside the solver
    _Search(build(Problem.from_json(request["problem"])), request, begin + wall).run()


class _Search:
    """Portfolio, then CP-SAT where the plan is small enough; only schedules that beat the incumbent are reported."""

    def __init__(self, instance: Instance, request: dict[str, Any], end: float) -> None:
        self.instance, self.end = instance, end
        self.budget, self.seed = float(request["budget"]), int(request["seed"])
        self.floor = lower_bound(instance.problem)
        self.route: list[int] = request["route"]
        self.trace: list[int] = request["trace"]
        self.crossings: Crossings = tuple(map(tuple, request.get("crossings", ())))
        self.best = goal(instance.problem, timed(instance, self.route, self.trace, self.crossings))
        self.stats: dict[str, Any] = {"trials": 0, "cut": False}

    def run(self) -> None:
        """Search until the bound is met, the work is done or the time is over."""
        small = self.instance.actions <= CPSAT_ACTIONS
        share = 0.4 if small else 0.5  # of the budget; the rest is CP-SAT's, and a reserve
        if lent_schedules.helps(self.instance.problem) and self.best > self.floor:
            work = int(LENT_RATE * self.budget * 0.8)
            self._note(lent_schedules.search(self.instance, work, self.seed, self._over, self._keep))
            share /= 8  # orders without lent layers are seldom the best then
        if self.best > self.floor:
            self._note(search(self.instance, int(RATE * self.budget * share), self.seed, self._over, self._keep))
        if self.best > self.floor and small and not self.crossings and not self._over():
            self._exact()  # it has not been seen to improve orders with lent layers
        self._say({"done": True, **self.stats})

    def _exact(self) -> None:
        if not cpsat.available():
            self.stats["cpsat"] = "missing"
            return
        limits = cpsat.Limits(work=self.budget * 0.3, wall=max(0.1, self.end - time.monotonic()), seed=self.seed)
        polish = replace(limits, work=self.budget * 0.1, merge_only=True)
        for chosen in (polish, limits):
            if self.best <= self.floor or self._over():
                break
            outcome = cpsat.solve(self.instance, self.route, self.trace, self.floor, chosen,
                                  lambda trace: self._offer(self.route, trace, (), "cpsat"))
            self.stats["cpsat_work"] = round(self.stats.get("cpsat_work", 0.0) + outcome.work, 3)
            self.stats["cut"] = self.stats["cut"] or outcome.cut
            if not chosen.merge_only:
                self.stats.update(cpsat_bound=outcome.bound, cpsat_proven=outcome.proven)

    def _note(self, found: Found) -> None:
        self.stats["trials"] += found.trials
        self.stats["cut"] = self.stats["cut"] or found.cut

    def _over(self) -> bool:
        return time.monotonic() > self.end

    def _keep(self, schedule: Schedule) -> None:
        self._offer(schedule.route, schedule.trace, schedule.crossings, "portfolio")

    def _offer(self, route: list[int], trace: list[int], crossings: Crossings, source: str) -> None:
        result = goal(self.instance.problem, timed(self.instance, route, trace, crossings))
        if result >= self.best:
            return
        self.best, self.route, self.trace, self.crossings = result, route, trace, crossings
        self._say({"route": route, "trace": trace, "crossings": crossings, "source": source})

    @staticmethod
    def _say(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
