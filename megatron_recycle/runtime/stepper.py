"""When a stage steps, and when the step is final.

A worker that holds an iteration's reduced gradient steps at once, with the coefficient (clipping) that its own
numbers suggest, and goes on to the next iteration. The verdict arrives meanwhile. If every stage guessed
right, the step is final. If any guessed wrong, those that did undo it and step again, and *all* workers
throw away what they have of the next iteration, since it was computed from wrong parameters somewhere.

No worker reduces an iteration before the one ahead of it is committed: so stages are never more than one step
apart, and one snapshot and one kept gradient per worker suffice to go back or forward after a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_recycle.errors import RecycleError
from megatron_recycle.membership import Process, Resume, Verdict
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import HELD
from megatron_recycle.runtime.commit import Commit, Committer, Held
from megatron_recycle.runtime.compute.accumulate import Layout
from megatron_recycle.runtime.compute.stopwatch import Stopwatch
from megatron_recycle.runtime.ledger import Ledger
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.stage import Stage
from megatron_recycle.runtime.step_mode import Pace
from megatron_recycle.runtime.undo import Undo


class WrongGuess(Exception):
    """A verdict showed that some stage's step was wrong; the work on the next iteration is void."""


class Listener(Protocol):
    """What the stepper tells the worker."""

    def observe(self, phase: str, iteration: int) -> None: ...

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A block in which the training thread waits for other workers."""

    def stepping(self, iteration: int) -> AbstractContextManager[None]:
        """A block in which the training thread steps; what it was in before goes on afterwards."""

    def committed(self, verdict: Verdict, adopt: bool) -> None:
        """The iteration is final; ``adopt``: every worker has the plan on offer."""


@dataclass
class Stepper:
    """The commit protocol of one worker.

    Args:
        stage: the framework's side.
        layout: of the flat gradient.
        place: position and grid.
        ledger: where the worker stands; ``holds``, ``stepped`` and ``committed`` are kept here.
        staggered: whether to step before the verdict is known.
        listener: told of phases and commits.
        stopwatch: takes the steps' times.

    Attributes:
        held: the reduced gradient of an iteration that is not committed yet.
        verdict, reports: of the last committed one.
        read: the data that this worker has read of it, as `Held.digests`.
        entered: the last one that was committed when this worker came in, or came in again; None if it began with all.
    """

    stage: Stage
    layout: Layout
    place: Place
    ledger: Ledger
    staggered: bool
    listener: Listener
    stopwatch: Stopwatch
    held: Held | None = None
    verdict: Verdict | None = None
    reports: torch.Tensor | None = None
    entered: int | None = None
    read: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.undo = Undo(self.stage)
        self.pace = Pace(self.staggered, self._right,
                         announce=self.place.me == Worker(0, 0) and self.place.part == 0)
        self.pending: Commit | None = None
        self._committer = Committer()
        self._before: Verdict | None = None
        self._used = 1.0
        self._asked: tuple[Verdict, float] | None = None
        self._early = False

    # ---- an iteration

    def hold(self, held: Held, groups: Groups, offer: int, plan: int) -> None:
        """The stage's gradient is complete: begin the commit, and step, now or when the verdict is known.

        Raises GenerationOver if the generation ends before that.
        """
        self.held, self.ledger.holds = held, held.iteration
        self.listener.observe("reduced", held.iteration)
        early = self._early = self.pace.staggered
        guess = self.guess()

        def wake(commit: Commit) -> None:
            # The training thread may be waiting for an activation that nobody is going to send any more.
            if early and commit.known and self._is_wrong(commit):
                groups.abort_transfers()

        self.pending = Commit(held, self.place.grid, groups, guess=guess, offer=offer, plan=plan,
                              notify=wake)
        self._committer.start(self.pending)
        if early:
            self.undo.save(held.iteration)
            self._step(guess)
        else:
            self.wait()

    def wait(self) -> None:
        """Wait for the verdict on the last step, if that is still out, and make the step final.

        Raises WrongGuess, GenerationOver (the generation ended), DataError, VerificationError.
        """
        if self.pending is not None:
            with self.listener.waiting("a verdict"):
                self.pending.done.wait()
            self.poll()

    def poll(self) -> None:
        """Make the last step final if its verdict has arrived. Raises as `wait`."""
        commit = self.pending
        if commit is None or not commit.done.is_set():
            return
        verdict, adopt = commit.verdict()
        self.pending = None
        wrong = self._early and self.pace.wrong(verdict)
        self.settle(verdict, adopt)
        if wrong:
            raise WrongGuess(f"iteration {verdict.iteration}")

    def settle(self, verdict: Verdict, adopt: bool = False) -> None:
        """Make the update of ``verdict.iteration`` what the verdict asks for, and final."""
        right = self._right(verdict)
        if self.ledger.stepped == verdict.iteration and str(self._used) != str(right):
            self.undo.restore()
            self.ledger.stepped -= 1
        if self.ledger.stepped < verdict.iteration:
            self._step(right)
        self.undo.forget()
        assert self.held is not None
        self.reports, self.read = self.held.reports, self.held.digests
        self.held, self.verdict, self._before = None, verdict, self.verdict
        self.ledger.committed = verdict.iteration
        self.pace.learn(verdict)
        self.listener.committed(verdict, adopt)

    @property
    def verdicts(self) -> list[Verdict]:
        """Of the last two committed iterations, as far as this worker was there, the last one first."""
        return [verdict for verdict in (self.verdict, self._before) if verdict is not None]

    def guess(self) -> float:
        """The coefficient that this stage's own numbers suggest."""
        assert self.held is not None
        place = self.place
        known = [0.0] * (place.grid.stages * place.parts)
        known[place.me.stage * place.parts + place.part] = self.held.norm_square
        return self.stage.coefficient(known, self.held.weight)

    def _right(self, verdict: Verdict) -> float:
        # Asked several times an iteration, for the same verdict, and by the thread that waits for it too.
        known = self._asked
        if known is None or known[0] != verdict:
            known = self._asked = verdict, self.stage.coefficient(verdict.norm_squares, verdict.weight)
        return known[1]

    def _step(self, coefficient: float) -> None:
        """One update of the held iteration; nothing interrupts it."""
        assert self.held is not None
        iteration = self.held.iteration
        with self.listener.stepping(iteration):
            self.listener.observe("step", iteration)
            views = self.layout.views(self.held.gradient)
            if coefficient != 1.0 and self.pending is not None and self._early:
                views = [view.clone() for view in views]  # the raw gradient may be needed again
            with torch.no_grad(), self.stopwatch.measure("step"):
                self.stage.step(views, coefficient)
            self._used, self.ledger.stepped = coefficient, iteration
            self.listener.observe("stepped", iteration)

    def remake(self) -> None:
        """Make the last step, which is not final, again from what was before it: whatever was written to since is as
        that step had left it."""
        iteration = self.undo.iteration
        assert iteration is not None
        self.undo.restore()
        self.ledger.stepped = iteration - 1
        self.undo.save(iteration)
        self._step(self._used)

    def _is_wrong(self, commit: Commit) -> bool:
        try:
            return self.pace.wrong(commit.verdict()[0])
        except RecycleError:
            return True  # the training thread will meet the same error, but has to wake up for it

    def close(self) -> None:
        """Nothing more is committed here."""
        self._committer.close()

    # ---- a failure

    def leave(self) -> None:
        """The generation is over: take in a verdict that has arrived, and forget the commit that has not."""
        commit, self.pending = self.pending, None
        if commit is not None and commit.known:
            self.settle(commit.verdict()[0])

    def reconcile(self, resume: Resume, groups: Groups) -> None:
        """Bring this worker to the end of ``resume.target``, committed.

        Raises GenerationOver if yet another generation begins.
        """
        target, ledger = resume.target, self.ledger
        if ledger.stepped > target:
            self.undo.restore()
            ledger.stepped = target
        if self.held is not None and self.held.iteration > target:
            self.held = None
        self._copy(resume.copies, target, groups)
        if ledger.committed < target:
            if resume.verdict is not None:
                self.settle(Verdict.from_json(resume.verdict))
            else:
                assert self.held is not None
                commit = Commit(self.held, self.place.grid, groups, guess=self.guess(), offer=0, plan=0,
                                notify=lambda _: None)
                self._committer.start(commit)
                commit.done.wait()
                self.settle(commit.verdict()[0])
        ledger.holds = target

    # ---- a worker that comes in

    def facts(self) -> dict[str, Any]:
        """What a new peer of this stage must know beside the stage's tensors, between two iterations."""
        assert self.pending is None and self.held is None and self.verdict is not None
        return {"counters": self.stage.counters(), "verdict": self.verdict.to_json(), "reports": self.reports,
                "pace": self.pace.to_json(), "read": dict(list(self.read.items())[:1])}

    def enter(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Stand where the peer stands that gave ``tensors`` and `facts`."""
        self.undo.forget()
        self.stage.load_state(tensors, facts["counters"])
        self.held, self.pending = None, None
        self.verdict, self.reports = Verdict.from_json(facts["verdict"]), facts["reports"]
        self.pace.follow(facts["pace"])
        self.entered = self.verdict.iteration
        self.ledger.stand_at(self.entered + 1)

    def _copy(self, copies: Mapping[str, str], target: int, groups: Groups) -> None:
        """Peers that do not hold ``target`` get its reduced gradient from one that does (receiver -> giver).

        A copy lands in a spare buffer and counts only once it is whole.
        """
        me, total = self.place.me, self.place.grid.total
        peers = groups.peers(me.stage)
        pairs = sorted((Process.parse(to), Process.parse(source).worker) for to, source in copies.items())
        for receiver, giver in ((to.worker, source) for to, source in pairs if (to.part or 0) == self.place.part):
            if receiver == me:
                gradient = self.layout.empty()
                numbers = torch.empty(Held.count(total, self.stage.report_width), dtype=torch.float64)
                groups.stage.receive(gradient, peers.index(giver), HELD[0]).wait()
                groups.stage_control.receive(numbers, peers.index(giver), HELD[1]).wait()
                self.held = Held.from_numbers(target, gradient, numbers, total)
                self.ledger.holds = target
            elif giver == me:
                assert self.held is not None and self.held.iteration == target
                groups.stage.send(self.held.gradient, peers.index(receiver), HELD[0]).wait()
                groups.stage_control.send(self.held.numbers(), peers.index(receiver), HELD[1]).wait()
