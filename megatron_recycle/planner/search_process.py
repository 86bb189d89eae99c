"""A search in a process of its own, both ends of its pipe: ``run`` for the planning process, ``serve`` for the
searching one.

The request is one line of JSON, and so is each better schedule, written at once: a kill loses no found schedule. The
searching process is niced. An alarm of its own ends it where the solver does not respond; its parent kills it besides.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from ..plan import Problem, lower_bound
from ..plan.plan_file import PlanFile
from . import cpsat, lent_schedules
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
    limit = max(0.1, budget_s - RESERVE - RESERVE_PER_ACTION * actions)
    end = time.monotonic() + limit
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH", "")) if p)
    with _file_in_memory() as asked, _file_in_memory() as answered:
        asked.write(json.dumps({**request, "wall": max(0.05, limit - 0.1)}).encode() + b"\n")
        asked.seek(0)
        child = subprocess.Popen([sys.executable, *COMMAND], stdin=asked, stdout=answered, stderr=subprocess.DEVNULL,
                                 start_new_session=True, env={**os.environ, "PYTHONPATH": path})
        try:
            while (left := end - time.monotonic()) > 0 and not cancelled():
                with suppress(subprocess.TimeoutExpired):
                    child.wait(min(left, 0.1))
                    break
        finally:
            child.kill()
            child.wait()
        answered.seek(0)
        return _outcome(answered.read())


def _file_in_memory() -> BinaryIO:
    """A file that takes all that is written: a pipe would block its writer while the other end does not read."""
    return os.fdopen(os.memfd_create("recycle-search"), "w+b")


def _outcome(answer: bytes) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The last schedule among the whole lines of an answer, and the statistics behind it."""
    best: dict[str, Any] | None = None
    for line in answer.split(b"\n")[:-1]:
        try:
            message = json.loads(line)
        except json.JSONDecodeError:
            break
        if message.pop("done", False):
            return best, {"killed": False, **message}
        best = message
    return best, {"killed": True, "cut": True}


def serve() -> None:
    """Answer one request from standard input on standard output: schedules, each better than the one before, then the
    statistics."""
    os.nice(10)
    request = json.loads(sys.stdin.readline())
    begin = time.monotonic()
    wall = float(request["wall"])
    signal.setitimer(signal.ITIMER_REAL, wall + 1.0)  # the default action ends the process, even inside the solver
    _Search(build(Problem.from_file(PlanFile.from_json(request["problem"]))), request, begin + wall).run()


class _Search:
    """Portfolio, then CP-SAT where the plan is small enough; only schedules that beat the incumbent are reported."""

    def __init__(self, instance: Instance, request: dict[str, Any], end: float) -> None:
        self.instance, self.end = instance, end
        self.budget, self.seed = float(request["budget"]), int(request["seed"])
        self.floor = lower_bound(instance.problem)
        self.best = timed(instance, request["route"], request["trace"], tuple(map(tuple, request["crossings"])))
        self.stats: dict[str, Any] = {"trials": 0, "cut": False}

    def run(self) -> None:
        """Search until the bound is met, the work is done or the time is over."""
        small = self.instance.actions <= CPSAT_ACTIONS
        share = 0.4 if small else 0.5  # of the budget; the rest is CP-SAT's, and a reserve
        if lent_schedules.helps(self.instance.problem) and not self._optimal():
            work = int(LENT_RATE * self.budget * 0.8)
            self._note(lent_schedules.search(self.instance, work, self.seed, self._over, self._offer))
            share /= 8  # orders without lent layers are seldom the best then
        if not self._optimal():
            self._note(search(self.instance, int(RATE * self.budget * share), self.seed, self._over, self._offer))
        if small and not (self._optimal() or self._over() or self.best.crossings):
            self._exact()  # it has not been seen to improve orders with lent layers
        self._say({"done": True, **self.stats})

    def _exact(self) -> None:
        if not cpsat.available():
            self.stats["cpsat"] = "missing"
            return
        limits = cpsat.Limits(work=self.budget * 0.3, wall=max(0.1, self.end - time.monotonic()), seed=self.seed)
        polish = replace(limits, work=self.budget * 0.1, merge_only=True)
        for chosen in (polish, limits):
            if self._optimal() or self._over():
                break
            outcome = cpsat.solve(
                self.instance, self.best.route, self.best.trace, self.floor, chosen,
                lambda trace: self._offer(timed(self.instance, self.best.route, trace), "cpsat"))
            self.stats["cpsat_work"] = round(self.stats.get("cpsat_work", 0.0) + outcome.work, 3)
            self.stats["cut"] = self.stats["cut"] or outcome.cut
            if not chosen.merge_only:
                self.stats.update(cpsat_bound=outcome.bound, cpsat_proven=outcome.proven)

    def _note(self, found: Found) -> None:
        self.stats["trials"] += found.trials
        self.stats["cut"] = self.stats["cut"] or found.cut

    def _optimal(self) -> bool:
        return goal(self.instance.problem, self.best) <= self.floor

    def _over(self) -> bool:
        return time.monotonic() > self.end

    def _offer(self, schedule: Schedule, source: str = "portfolio") -> None:
        problem = self.instance.problem
        if goal(problem, schedule) < goal(problem, self.best):
            self.best = schedule
            self._say({"route": schedule.route, "trace": schedule.trace, "crossings": schedule.crossings,
                       "source": source})

    @staticmethod
    def _say(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
