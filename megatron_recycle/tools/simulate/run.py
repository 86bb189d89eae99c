"""One run of a policy through a trace: an event heap, and the account of where the time went.

Time is spent on iterations that stay (useful), on parts of iterations that were begun anew (redone), on iterations that
a return to a checkpoint took back (rolled back), on pauses by cause, and without enough workers (stopped). These add up
to the duration. Samples are those of committed iterations that stay.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_recycle.tools.simulate.cluster import Change
from megatron_recycle.tools.simulate.policies.base import STANDS, Answer, Cause, Course, Policy, Setting

SAVE = object()
"""The token of a wake for a checkpoint."""


@dataclass
class Outcome:
    """The result of a simulated job.

    Attributes:
        samples: of iterations that stay.
        spent: seconds by cause; they add up to `duration`.
        lost: iterations that were begun or done, and are not in `iterations`, in parts of one.
        survived: losses that were got over without going back.
        rate: (second, samples per second from then on).
        marks: seconds of failures, moments at which the cluster lost machines or GPUs; several outages of a trace may
            begin at one.
        fatal_marks: seconds of fatal events.
        commits: seconds of commits, where they were asked for.
        said: by the policy, for people.
        plans: distinct plans that were needed.
        cpu: seconds of processor time that the simulation took.
    """

    name: str
    duration: float
    marks: list[float]
    iterations: int = 0
    samples: int = 0
    spent: dict[str, float] = field(default_factory=dict)
    lost: float = 0.0
    survived: int = 0
    rate: list[tuple[float, float]] = field(default_factory=list)
    fatal_marks: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    plans: int = 0
    cpu: float = 0.0

    @property
    def failures(self) -> int:
        """Number of failures."""
        return len(self.marks)

    @property
    def fatal(self) -> int:
        """Number of fatal events."""
        return len(self.fatal_marks)

    @property
    def throughput(self) -> float:
        """Samples per second of the whole duration."""
        return self.samples / self.duration

    @property
    def useful(self) -> float:
        """Share of the time that was spent on iterations that stay."""
        return self.spent.get(Cause.USEFUL, 0.0) / self.duration

    def to_json(self) -> dict[str, Any]:
        return {"policy": self.name, "duration": self.duration, "iterations": self.iterations,
                "samples": self.samples, "throughput": self.throughput, "spent": dict(self.spent),
                "iterations_lost": self.lost, "failures": self.failures, "survived": self.survived,
                "fatal": self.fatal, "plans": self.plans, "cpu_seconds": round(self.cpu, 3),
                "rate": self.rate, "failed_at": self.marks, "fatal_at": self.fatal_marks, "said": self.said}


class Run:
    """A policy's run, which fills `outcome`. Use `simulate`."""

    def __init__(self, policy: Policy, setting: Setting, outcome: Outcome, commits: bool) -> None:
        self.policy = policy
        self.setting = setting
        self.outcome = outcome
        self.now = 0.0
        self._course: Course = STANDS
        self._elapsed, self._length = 0.0, float("inf")  # of the iteration in flight
        self._pauses: list[list[Any]] = []
        self._kept = (0, 0, 0.0)  # iterations, samples and useful seconds at the last saved point
        self._wakes: list[tuple[float, int, object]] = []
        self._number = itertools.count()
        self._boundary = self._saving = False
        self._commits = commits

    def go(self, changes: Sequence[Change], progress: Callable[[float], None]) -> None:
        """Run from the start to the end."""
        begin, end = self.policy.begin(self.setting), self.outcome.duration
        self._wake(self.policy.save_every, SAVE)
        self._follow(replace(begin, saved=True))
        due = [change for change in changes if 0 < change.at < end]
        at = 0
        while True:
            commit = self._next_commit() if self._boundary else float("inf")
            change = due[at].at if at < len(due) else float("inf")
            wake = self._wakes[0][0] if self._wakes else float("inf")
            moment = min(commit, change, wake, end)
            self._advance(moment, commit <= moment)
            if moment >= end:
                break
            if commit <= moment:
                self._boundary = False
                if self._saving:
                    self._save()
                self._follow(self.policy.woken(self.now, "boundary", self.outcome.iterations))
            elif change <= moment:
                self._follow(self.policy.changed(due[at], self.outcome.iterations))
                at += 1
                progress(self.now / end)
            else:
                _, _, token = heapq.heappop(self._wakes)
                if token is SAVE:
                    self._saving = self._boundary = True
                else:
                    self._follow(self.policy.woken(self.now, token, self.outcome.iterations))
        self._spend(Cause.UNFINISHED, self._elapsed)
        progress(1.0)

    def _save(self) -> None:
        """Write a checkpoint; all stand between two iterations."""
        self._saving = False
        self._wake(self.policy.save_every, SAVE)
        self._follow(Answer(saved=True, pauses=((Cause.CHECKPOINT, self.policy.save_takes),)))

    def _wake(self, seconds: float, token: object) -> None:
        heapq.heappush(self._wakes, (self.now + seconds, next(self._number), token))

    def _next_commit(self) -> float:
        """Commit time of the iteration in flight, if no change comes before."""
        return self.now + sum(seconds for _, seconds in self._pauses) + self._length - self._elapsed

    def _advance(self, to: float, committing: bool) -> None:
        """Let time pass without changes. ``committing``: an iteration ends exactly then."""
        left = to - self.now
        while self._pauses and left > 0:
            cause, seconds = self._pauses[0]
            passed = min(left, seconds)
            self._spend(cause, passed)
            left -= passed
            if passed == seconds:
                self._pauses.pop(0)
                self._note_rate(to - left)
            else:
                self._pauses[0][1] -= passed
        self.now = to
        if committing:
            self._pauses.clear()
            self._commit(1, self._length, to)
            self._elapsed, self._length = 0.0, self._course.period
        elif left > 0 and self._length == float("inf"):
            self._spend(Cause.STOPPED, left)
        elif left > 0:
            self._train(left)

    def _train(self, left: float) -> None:
        if left < self._length - self._elapsed:
            self._elapsed += left
            return
        left -= self._length - self._elapsed
        self._commit(1, self._length, self.now - left)
        period = self._course.period
        whole = int(left / period)
        if whole:
            self._commit(whole, whole * period, self.now - left + whole * period)
        self._elapsed, self._length = max(0.0, left - whole * period), period

    def _commit(self, count: int, seconds: float, at: float) -> None:
        self.outcome.iterations += count
        self.outcome.samples += count * self._course.samples
        self._spend(Cause.USEFUL, seconds)
        if self._commits:
            self.outcome.commits += [at - (count - 1 - number) * self._course.period for number in range(count)]

    def _spend(self, cause: str, seconds: float) -> None:
        if seconds:
            self.outcome.spent[cause] = self.outcome.spent.get(cause, 0.0) + seconds

    def _follow(self, answer: Answer) -> None:
        done = self.outcome
        if answer.fatal:
            done.fatal_marks.append(self.now)
        done.survived += answer.survived
        if answer.said:
            done.said.append(f"{answer.said} after {self.now:.0f} s")
        if answer.back:
            self._go_back()
        elif answer.again:
            self._redo(answer.again)
        if answer.saved:
            self._kept = (done.iterations, done.samples, done.spent.get(Cause.USEFUL, 0.0))
        if answer.course is not None:
            self._change_to(answer.course)
        if answer.again or answer.back:
            self._pauses = []
        self._pauses += [[cause, seconds] for cause, seconds in answer.pauses if seconds > 0]
        self._boundary |= answer.boundary
        for seconds, token in answer.wakes:
            self._wake(seconds, token)
        self._note_rate(self.now)

    def _redo(self, share: float = 1.0) -> None:
        """Redo this share of the done part of the iteration in flight."""
        if self._elapsed:
            self.outcome.lost += share * self._elapsed / self._length
            self._spend(Cause.REDONE, share * self._elapsed)
        self._elapsed *= 1 - share
        if share == 1:
            self._length = self._course.first

    def _go_back(self) -> None:
        """Go back to the last saved point: useful time since then counts as rolled back."""
        self._redo()
        done, (iterations, samples, useful) = self.outcome, self._kept
        done.lost += done.iterations - iterations
        taken = done.spent.get(Cause.USEFUL, 0.0) - useful
        if taken:
            done.spent[Cause.USEFUL] -= taken
            self._spend(Cause.ROLLED_BACK, taken)
        done.iterations, done.samples = iterations, samples

    def _change_to(self, course: Course) -> None:
        """Switch the course. The iteration in flight keeps its done fraction, and the time that this took."""
        before, self._course = self._length, course
        if not self._elapsed:
            self._length = course.first
        elif course.period == float("inf") or before == float("inf"):
            self._redo()
        else:
            left = (1 - self._elapsed / before) * course.period
            self._length = self._elapsed + left

    def _note_rate(self, at: float) -> None:
        """Note the rate from now on, if it has changed."""
        course, rates = self._course, self.outcome.rate
        rate = 0.0 if self._pauses or course.period == float("inf") else course.samples / course.period
        if not rates or rates[-1][1] != rate:
            if rates and rates[-1][0] == at:
                rates.pop()
            rates.append((at, rate))


def simulate(policy: Policy, setting: Setting, changes: Sequence[Change], duration: float,
             progress: Callable[[float], None] = lambda share: None, commits: bool = False) -> Outcome:
    """A policy's job through these changes, for ``duration`` seconds.

    Args:
        progress: called with the done share of the duration.
        commits: keep the time of every commit, to compare with a real run.
    """
    began, plans = time.process_time(), len(setting.plans)
    outcome = Outcome(policy.name, duration,
                      [change.at for change in changes if change.lost and 0 < change.at < duration])
    Run(policy, setting, outcome, commits).go(changes, progress)
    outcome.plans, outcome.cpu = len(setting.plans) - plans, time.process_time() - began
    return outcome
