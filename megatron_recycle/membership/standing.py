"""Standing: the worker's half of the protocol, as `machine` is the coordinator's. Pure: no tensors, no clock, no
messages.

Every iteration passes the same points on every worker: it is begun, its actions are done, its reduced gradient is held,
it is stepped (on a guess, or when the verdict is known), and it is committed. `Standing` records which points this
worker has reached, refuses any other order, and decides the work after a verdict (`Settlement`) and after a failure
(`Reconciliation`). The owner of the tensors does that work and records it here.

No worker reduces an iteration before the previous one is committed. So stages are never more than one step apart, and
one snapshot and one kept gradient per worker suffice to go back or forward after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_recycle.membership.names import Process, workers_of
from megatron_recycle.membership.promises import Promises
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.verdict import StepMode, Verdict, differ
from megatron_recycle.plan.action import Action
from megatron_recycle.plan.grid import Worker

_PASSES = 2**20
"""Limit of passes before one iteration."""


class Epoch(NamedTuple):
    """One set of process groups. A ``renewal`` is a new set within a generation, made where the transfers that a wrong
    guess voided could not be drained on the old one."""

    generation: int = 0
    renewal: int = 0


@dataclass(frozen=True)
class Settlement:
    """The work that settles an iteration by its verdict: `undo` the step with another coefficient, then `step` with the
    right one."""

    undo: bool
    step: bool


@dataclass(frozen=True)
class Reconciliation:
    """The work that brings a worker to the end of the iteration after which a generation goes on, in this order.

    Attributes:
        enter: the worker holds nothing: it takes all state from its peers, and skips the rest.
        undo: undo the last step: some stage has lost that gradient.
        drop: discard the gradient of that step's iteration.
        copies: (receiver, sender) of each copy of the reduced gradient that this worker takes part in, in the order
            that all peers keep to.
        slices: likewise for one shard's slice each (-1: the numbers that belong to the gradient).
        verdict: the verdict to settle the iteration by; None: it is committed here, or to be committed `anew` by all.
        anew: no survivor knows the verdict.
        give: peers of this stage come in and take all state.
        back: some stage is lost: this worker goes back to its own copy of an earlier state, and skips the rest.
    """

    enter: bool = False
    undo: bool = False
    drop: bool = False
    copies: tuple[tuple[Worker, Worker], ...] = ()
    slices: tuple[tuple[Worker, Worker, int], ...] = ()
    verdict: Verdict | None = None
    anew: bool = False
    give: bool = False
    back: bool = False


@dataclass
class Standing:
    """The position of one worker in training; written by the training thread only. Illegal moves raise AssertionError.

    Attributes:
        me: this process.
        mode: whether the next iteration is stepped at once.
        epoch: the process groups in use, the last ones between two sets; generation 0 before the first.
        iteration, attempt: the last that were begun; `next_attempt` is the number of the next one.
        under_way: whether that attempt is: its actions count until its gradient is held, or it is given up.
        done: its finished actions, in order; `earlier` counts those of the previous iteration until that is committed.
        held: the uncommitted iteration whose complete reduced gradient is kept; None: there is none.
        stepped: the last iteration that this worker has stepped, for good or not; -1 for none.
        committed: the last iteration stepped for good; -1 for none.
        saved: the iteration whose step can be undone; None: there is none.
        used: the coefficient of the last step.
        early: whether the last held iteration is stepped before its verdict.
        verdict, before: of the last two committed iterations, as far as this worker was there.
        closed: the last iteration whose stage was found closed (`runtime.comm.acknowledgements`), for good or not; -1
            for none.
        joined_after: the last committed iteration when this worker came in (again); None if it began with all.
        verified: the iteration before which the peers of this stage were last found equal; -1 for none.
        unverified: whether a recovery still requires that comparison.
        passes: the number of the last evaluation pass or checkpoint that the script has asked for. Numbers derive from
            the iteration that follows, so that joiners agree. `evaluated`: the number of the last one done everywhere,
            as far as this worker knows.
        asked: the last iteration that the script has asked for.
        promises: this worker's promises in the generation.
    """

    me: Process
    mode: StepMode = field(default_factory=StepMode)
    epoch: Epoch = field(default_factory=Epoch)
    iteration: int = 0
    attempt: int = 1
    next_attempt: int = 1
    under_way: bool = False
    done: list[Action] = field(default_factory=list)
    earlier: int = 0
    held: int | None = None
    stepped: int = -1
    committed: int = -1
    saved: int | None = None
    used: float | None = None
    early: bool = False
    verdict: Verdict | None = None
    before: Verdict | None = None
    closed: int = -1
    joined_after: int | None = None
    verified: int = -1
    unverified: bool = False
    passes: int = 0
    evaluated: int = 0
    asked: int = -1
    promises: Promises = field(default_factory=lambda: Promises(0))

    # ---- reports

    @property
    def holds(self) -> int:
        """The last iteration whose complete reduced gradient this worker has, or has stepped for good."""
        return self.committed if self.held is None else self.held

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the last two committed iterations, as far as this worker was there, the last one first."""
        return [verdict for verdict in (self.verdict, self.before) if verdict is not None]

    def report(self, **kept: Any) -> Report:
        """This worker's report to the coordinator, with what it has ``kept``."""
        return Report(self.iteration, self.attempt, self.holds, self.stepped, self.verdict, len(self.done),
                      self.committed, self.earlier, self.asked, **kept)

    # ---- the process groups

    def stand_at(self, iteration: int) -> None:
        """Training begins with ``iteration``; all earlier ones are committed."""
        self.iteration, self.attempt = iteration, 0
        self.stepped = self.committed = iteration - 1
        self.held = self.saved = None
        self.closed = min(self.closed, self.stepped)
        self.under_way, self.earlier = False, 0
        self.done.clear()

    def join(self, generation: int) -> None:
        """A generation begins, without promises."""
        assert generation > self.epoch.generation, f"generation {generation} comes after generation {self.epoch}"
        self.epoch = Epoch(generation)
        self.promises = Promises(generation)

    def roll_back(self) -> int:
        """Roll back after a wrong guess: the attempt under way is void on all workers. Returns the number of lost
        actions of the next iteration."""
        assert self.held is None and self.stepped == self.committed, "the right step is made before all meet again"
        begun = self.iteration == self.committed + 1
        self.under_way = False
        self.next_attempt = 1 + (self.attempt if begun else self.next_attempt)
        return len(self.done) if begun else 0

    def renew(self) -> None:
        """The generation's members meet again on new groups."""
        self.epoch = Epoch(self.epoch.generation, self.epoch.renewal + 1)

    # ---- requests of the script

    def ask(self, iteration: int) -> None:
        """The script asks for this iteration."""
        self.asked = iteration

    def ask_pass(self, iteration: int) -> None:
        """The script asks for another pass before ``iteration`` is trained."""
        self.passes = max(self.passes, iteration * _PASSES) + 1

    # ---- an iteration

    @property
    def may_begin(self) -> bool:
        """Whether this worker may begin the iteration after the last stepped one."""
        return self.epoch.generation > 0 and not self.under_way and (self.held is None or self.held == self.stepped)

    def begin(self, iteration: int) -> None:
        """Begin an attempt at ``iteration``, the one after the last stepped."""
        assert iteration == self.stepped + 1, f"iteration {iteration} begins after {iteration - 1}, not {self.stepped}"
        assert self.committed >= iteration - 2, f"iteration {iteration} begins when {iteration - 2} is committed"
        assert self.may_begin, f"an iteration begins in a generation, and with the one before it stepped: {self}"
        assert not self.promises.ends_before(iteration), f"all wait before iteration {iteration}, as agreed"
        self.earlier = len(self.done) if iteration == self.iteration + 1 and self.committed < self.iteration else 0
        self.iteration, self.attempt, self.next_attempt = iteration, self.next_attempt, 1
        self.under_way = True
        self.done.clear()

    def take_up(self, done: Sequence[Action]) -> None:
        """The new attempt resumes an earlier one after its ``done`` actions."""
        assert self.under_way and not self.done, f"an attempt is taken up at its beginning: {self}"
        self.done[:] = done

    def give_up(self) -> None:
        """The attempt under way, if any, ends here; its actions do not count here any more."""
        self.under_way = False

    def did(self, action: Action) -> None:
        """An action of the attempt under way is done."""
        assert self.under_way, f"{action} belongs to no attempt: {self}"
        self.done.append(action)

    def check_complete(self, planned: Sequence[Action]) -> None:
        """Assert that all planned actions were done once, in order, before the reduction (promise P1)."""
        if self.done != [action for action in planned if action.kind != "S"]:
            raise AssertionError(f"iteration {self.iteration}: did {self.done}, the plan says {list(planned)}")

    @property
    def may_reduce(self) -> bool:
        """Whether the iteration under way may be reduced: the previous one is committed here."""
        return self.under_way and self.held is None and self.committed == self.stepped == self.iteration - 1

    def hold(self, iteration: int) -> None:
        """The complete reduced gradient of the iteration under way is there."""
        assert iteration == self.iteration and self.may_reduce, (
            f"iteration {iteration} is reduced when {iteration - 1} is committed: {self}")
        self.held, self.early, self.under_way = iteration, self.mode.staggered, False

    def save(self) -> None:
        """A snapshot of the state that the held iteration's step changes has been taken."""
        assert self.held == self.stepped + 1, f"saved is what is about to be stepped: {self}"
        self.saved = self.held

    def step(self, coefficient: float) -> None:
        """The held iteration has been stepped."""
        assert self.held == self.stepped + 1, f"a step is made of the iteration that is held, once: {self}"
        self.stepped, self.used = self.stepped + 1, coefficient

    def undo(self) -> None:
        """The last step has been undone."""
        assert self.saved == self.stepped > self.committed, f"only a step that is not final is undone: {self}"
        self.stepped, self.saved = self.stepped - 1, None
        self.closed = min(self.closed, self.stepped)

    def settlement(self, iteration: int, right: float) -> Settlement:
        """The work to be done once the verdict on ``iteration`` asks for the coefficient ``right``."""
        assert self.held == iteration == self.committed + 1, f"iteration {iteration} is held and not committed: {self}"
        undo = self.stepped == iteration and differ(self.used, right)
        return Settlement(undo, step=undo or self.stepped < iteration)

    def close(self) -> None:
        """This worker's stage has closed the last iteration: its script may leave it."""
        assert self.held in (self.stepped, None) and not self.under_way, f"what is closed is stepped: {self}"
        self.closed = self.stepped

    @property
    def rejoins(self) -> bool:
        """Whether the held iteration is closed here, and others still need parts of it after a failure."""
        return self.held is not None and self.held == self.stepped and not self.under_way

    def rejoin(self) -> None:
        """Rejoin the held iteration, which this worker's stage has closed and others go on with."""
        assert self.rejoins and self.held == self.committed + 1, f"a closed iteration is stepped and not final: {self}"
        assert self.held is not None
        self.iteration, self.attempt, self.next_attempt = self.held, self.next_attempt, 1
        self.earlier = 0
        self.done.clear()

    def commit(self, verdict: Verdict, right: float) -> bool:
        """The step of the held iteration is final: ``verdict`` asks for it, with the coefficient ``right``. Returns
        whether the step mode (staggered or not) changes."""
        assert self.held == self.stepped == verdict.iteration and not differ(self.used, right), (
            f"final is what the verdict asks for, {right} for iteration {verdict.iteration}: {self}")
        self.committed = verdict.iteration
        self.held = self.saved = None
        self.verdict, self.before = verdict, self.verdict
        mode, self.mode = self.mode, self.mode.after(verdict.refutes(right))
        return mode.staggered != self.mode.staggered

    # ---- after a failure

    def reconciliation(self, resume: Resume) -> Reconciliation:
        """The work that brings this worker to the resume point."""
        worker, part, target = self.me.worker, self.me.part or 0, resume.target
        joined = workers_of(resume.joined)
        if worker in joined:
            return Reconciliation(enter=True)
        if resume.restored:
            return Reconciliation(back=True)
        if worker.stage in resume.closed:
            return Reconciliation()
        assert target <= self.stepped + 1 and self.committed <= target <= self.committed + 1, (
            f"{target} cannot be reached by undoing or making one step: {self}")
        pairs = sorted((Process.parse(to), Process.parse(source).worker) for to, source in resume.copies.items())
        copies = tuple((to.worker, source) for to, source in pairs
                       if (to.part or 0) == part and worker in (to.worker, source))
        among = sorted((Process.parse(to), Process.parse(source).worker, shard) for to, source, shard in resume.slices)
        slices = tuple((to.worker, source, shard) for to, source, shard in among
                       if (to.part or 0) == part and worker in (to.worker, source))
        behind = self.committed < target
        verdict = resume.verdict if behind else None
        return Reconciliation(
            undo=self.stepped > target, drop=self.held is not None and self.held > target, copies=copies,
            slices=slices,
            verdict=verdict, anew=behind and verdict is None, give=any(other.stage == worker.stage for other in joined))

    def drop(self) -> None:
        """The held gradient is discarded: its iteration is trained again."""
        assert self.held is not None and self.stepped < self.held, f"nothing that is stepped is dropped: {self}"
        self.held = None

    def receive(self, iteration: int) -> None:
        """A peer's reduced gradient of ``iteration`` is there whole."""
        assert self.held is None and iteration == self.stepped + 1 == self.committed + 1, (
            f"a worker that lacks iteration {iteration} has committed {iteration - 1}: {self}")
        self.held = iteration

    def enter(self, verdict: Verdict, mode: StepMode) -> None:
        """All of a peer's state is here: this worker stands where the peer stood, after ``verdict.iteration``."""
        self.verdict, self.mode = verdict, mode
        if verdict.iteration > self.committed:  # else no iteration was missed: its state was wrong, say
            self.joined_after = verdict.iteration
        self.stand_at(verdict.iteration + 1)

    def go_on(self, resume: Resume) -> None:
        """All stand at the same place; the coordinator has numbered the next attempt."""
        ahead = self.me.worker.stage in resume.closed
        assert self.committed == resume.target == self.stepped - ahead and (
            self.held == (resume.next if ahead else None)), (
            f"all go on after iteration {resume.target}, who has closed the next one after that: {self}")
        self.next_attempt = resume.attempt

    # ---- checks and evaluations between two iterations

    def due(self, iteration: int, every: int) -> bool:
        """Whether peers are compared before ``iteration``: once before every ``every``-th (0: none), or because a
        recovery has not done it."""
        return self.unverified or (bool(every) and iteration % every == 0 and self.verified != iteration)

    def evaluate(self) -> None:
        """A pass that the script asked for is done everywhere."""
        assert self.evaluated < self.passes, "a pass that is done is not done again"
        self.evaluated = self.passes
