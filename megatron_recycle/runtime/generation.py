"""A generation as a value: its process groups, its plan, and all that follows from both.

A recovery makes the next generation. What is decided for a generation never changes: it is replaced as a whole.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megatron_recycle.membership.standing import Epoch
from megatron_recycle.plan import Action, Microbatch, Plan, Worker, last_reads, readers
from megatron_recycle.runtime.comm.acknowledgements import Acknowledgements
from megatron_recycle.runtime.comm.activations import Transport
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.losses import LossRelay
from megatron_recycle.runtime.comm.reduction import Reduction, reduction_of
from megatron_recycle.runtime.comm.reuse import ReusableGroups
from megatron_recycle.runtime.comm.sharded_reduction import Cuts, ShardedReduction, sharded
from megatron_recycle.runtime.comm.trained_alike import Agreement
from megatron_recycle.runtime.lent.loans import Loans
from megatron_recycle.runtime.lent.terms import Terms, terms_of
from megatron_recycle.runtime.resumable_attempt import KeptAttempts, ResumedIteration
from megatron_recycle.runtime.stage import Stage


@dataclass(frozen=True)
class Program:
    """A plan as one worker runs it.

    Attributes:
        plan: of all workers.
        me: the worker.
        actions: this worker's, in order.
        full: the forwards and backwards of the micro-batches that the plan gives a full backward.
        number: below 2**20; shows when workers follow different plans.
    """

    plan: Plan
    me: Worker
    actions: tuple[Action, ...]
    full: frozenset[Action]
    number: int

    @classmethod
    def of(cls, plan: Plan, me: Worker) -> Program:
        actions = tuple(plan.actions(me))
        backwards = frozenset(action for action in actions if action.kind == "FB")
        return cls(plan, me, actions, backwards | {action._replace(kind="F") for action in backwards},
                   int(plan.digest.rpartition(":")[2][:5], 16))

    @cached_property
    def terms(self) -> Terms:
        """The plan's loans of layers."""
        return terms_of(self.plan)

    @cached_property
    def readers(self) -> tuple[Worker, ...]:
        """The workers that read this one's messages."""
        return readers(self.plan, self.me)

    @cached_property
    def last_reads(self) -> Mapping[Action, tuple[Worker, ...]]:
        """The actions with which this worker has read the last message of other workers, and those workers."""
        return last_reads(self.plan, self.me)

    @cached_property
    def of_loss(self) -> int:
        """How many of the actions are forwards that end with a loss."""
        return sum(action.kind == "F" and self._ends(action) for action in self.actions)

    def _ends(self, action: Action) -> bool:
        return self.plan.chunk(self.me, action) == self.plan.problem.chunks - 1

    @cached_property
    def of_one_pipeline(self) -> bool:
        """Whether no worker runs another pipeline's micro-batches."""
        return all(action.pipeline == worker.pipeline for worker, actions in self.plan.workers.items()
                   for action in actions if action.kind != "S")

    def without(self, microbatches: Iterable[tuple[int, int]], me: Worker) -> Program:
        """The program without these micro-batches."""
        return Program.of(self.plan.without(list(microbatches)), me)


class Course(NamedTuple):
    """A plan as one worker follows it: its program, and how the plan's gradients become one."""

    program: Program
    reduction: Reduction

    @classmethod
    def of(cls, plan: Plan, me: Worker, exact: bool, stage: Stage, cuts: Cuts | None) -> Course:
        """The course of worker ``me``; ``cuts``: of its stage's optimizer state."""
        reduction = reduction_of(exact, plan, me, stage.averaging) if cuts is None else sharded(
            exact, plan, me, stage.averaging, cuts)
        return cls(Program.of(plan, me), reduction)


@dataclass(frozen=True)
class Scope:
    """The micro-batches of the grid that are run, and until when scripts wait for an iteration.

    Attributes:
        left_out: micro-batches (``1.3``) that the job goes on without, each with its iteration.
        without: pipelines whose micro-batches are not run; the mean is over the others.
        carried: iterations that go on where they stood: a generation's first one, and the begun part of the next one.
        closes: whether scripts may leave an iteration before all workers have committed it.
    """

    left_out: Sequence[tuple[int, str]] = ()
    without: frozenset[int] = frozenset()
    carried: tuple[ResumedIteration, ...] = ()
    closes: bool = True

    def carried_in(self, iteration: int) -> ResumedIteration | None:
        """The part of ``iteration`` that goes on where it stood; None: it begins anew."""
        return next((carried for carried in self.carried if carried.iteration == iteration), None)

    def hit(self, plan: Plan) -> frozenset[Microbatch]:
        """The micro-batches of the pipelines that are left out."""
        return frozenset(each for each in plan.problem.grid.items() if each[0] in self.without)

    def poisoned(self, iteration: int) -> frozenset[Microbatch]:
        """The micro-batches that ``iteration`` does without."""
        return frozenset(_place_of(microbatch) for of, microbatch in self.left_out if of == iteration)


class Exchanges(NamedTuple):
    """Exchanges between workers in one attempt, beside activations and gradients.

    Attributes:
        agreement: on the parameters that are trained.
        losses: of the micro-batches.
        loans: of layers.
        acknowledgements: of messages that have been used.
    """

    agreement: Agreement
    losses: LossRelay
    loans: Loans
    acknowledgements: Acknowledgements

    def end(self) -> None:
        """Drain the exchanges of a void attempt, which all workers have begun. Raises GenerationOver."""
        for each in self:
            each.end()


@dataclass(frozen=True)
class Generation:
    """A generation as one worker knows it.

    Attributes:
        epoch: its number, and how often its members have made new groups.
        prefix: of its keys in torch's store, the same for all its groups.
        tries: generations with the same members in a row, before this one.
        scope: the part of its iterations that is run.
        groups: of its members.
        course: of the plan in use.
        resumed: courses of the iterations that go on where they stood.
        transport: of activations and gradients, on these groups.
        keepers: by stage with one worker, the worker of another stage that keeps a copy of it.
        shared: exchanges of the last two attempts. An idle worker may be an iteration late: a loss that is let
            go of before it has been read is lost.
    """

    epoch: Epoch
    prefix: str
    tries: int
    scope: Scope
    groups: Groups
    course: Course
    transport: Transport
    keepers: Mapping[int, Worker] = field(default_factory=dict)
    resumed: Mapping[int, Course] = field(default_factory=dict)
    shared: deque[Exchanges] = field(default_factory=lambda: deque(maxlen=2))

    @classmethod
    def of(cls, epoch: Epoch, prefix: str, tries: int, scope: Scope, groups: Groups, stage: Stage, plan: Plan,
           exact: bool, keepers: Mapping[int, Worker] | None = None, cuts: Cuts | None = None) -> Generation:
        """A new generation, which follows ``plan``."""
        hit = scope.hit(plan)
        resumed = {carried.iteration: Course.of(
            replace(carried.plan.without(hit), done=carried.done), groups.me, exact, stage, cuts)
            for carried in scope.carried}
        return cls(epoch, prefix, tries, scope, groups, Course.of(plan, groups.me, exact, stage, cuts),
                   Transport(groups, stage.device), keepers or {}, resumed)

    @property
    def program(self) -> Program:
        """The plan in use, as this worker runs it."""
        return self.course.program

    @property
    def reduction(self) -> Reduction:
        """The reduction of the gradients of the plan in use."""
        return self.course.reduction

    @property
    def cuts(self) -> Cuts | None:
        """The shards of this stage's optimizer state and their holders; None: each peer has all of it."""
        return self.reduction.cuts if isinstance(self.reduction, ShardedReduction) else None

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.program.plan

    @property
    def store_prefix(self) -> str:
        """Prefix of the groups in use; each renewal has its own."""
        return store_prefix(self.prefix, self.epoch)

    def follow(self, plan: Plan, exact: bool, stage: Stage) -> Generation:
        """The same generation with another plan."""
        me = self.groups.me
        return replace(self, course=Course.of(plan, me, exact, stage, self.cuts))

    def renewed(self, epoch: Epoch, groups: Groups, stage: Stage) -> Generation:
        """The same generation on other groups."""
        return replace(self, epoch=epoch, groups=groups, transport=Transport(groups, stage.device),
                       shared=deque(maxlen=2))

    def begun_anew(self) -> Generation:
        """The same generation, without iterations that go on where they stood."""
        return replace(self, scope=replace(self.scope, carried=()), resumed={})

    def program_of(self, iteration: int) -> Program:
        """The program of this worker for ``iteration``."""
        if iteration in self.resumed:
            return self.resumed[iteration].program
        left_out = self.scope.poisoned(iteration)
        return self._of_whole.without(left_out, self.groups.me) if left_out else self._of_whole

    def reduction_of(self, iteration: int) -> Reduction:
        """The reduction of the gradients of ``iteration``."""
        if iteration in self.resumed:
            return self.resumed[iteration].reduction
        return self.reduction

    def left_out_of(self, iteration: int) -> int:
        """Number of micro-batches that ``iteration`` goes without."""
        return len(self.scope.poisoned(iteration) | self.scope.hit(self.plan))

    @property
    def share(self) -> float:
        """Factor from a mean over all micro-batches to one over those of the pipelines that take part."""
        counts = self.plan.problem.grid.microbatches
        run = sum(count for pipeline, count in enumerate(counts) if pipeline not in self.scope.without)
        return sum(counts) / run

    @cached_property
    def _of_whole(self) -> Program:
        """The program of the pipelines that take part."""
        hit = self.scope.hit(self.plan)
        return self.program.without(hit, self.groups.me) if hit else self.program


class PendingShards(NamedTuple):
    """Shards of the optimizer's state that the peers of a stage are yet to copy.

    Attributes:
        moves: (shard, giver, taker).
        had: the shards and their holders until then.
    """

    moves: tuple[tuple[int, Worker, Worker], ...]
    had: Cuts


class Current:
    """The generation in force, which the training thread replaces and the agent's thread aborts: one lock, one
    reference.

    Attributes:
        last: the generation in force; between two, the previous one, with its members and its plan; None at first.
        reusable: communicators of older generations, which the next one may go on with.
        kept: attempts that can be taken up again.
        owed: shards to be copied before the next iteration; None: there are none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_force: Generation | None = None
        self.last: Generation | None = None
        self.reusable: ReusableGroups | None = None
        self.kept = KeptAttempts()
        self.owed: PendingShards | None = None

    def get(self) -> Generation:
        """The generation in force."""
        assert self._in_force is not None
        return self._in_force

    @property
    def broken(self) -> bool:
        """Whether no generation is in force: the last was given up, and the next does not stand yet."""
        return self._in_force is None

    def set(self, generation: Generation) -> None:
        """Put ``generation`` in force. From now on it may be aborted."""
        with self._lock:
            self._in_force = self.last = generation

    def take(self) -> Generation | None:
        """Take the generation in force out of force, and return it."""
        with self._lock:
            taken, self._in_force = self._in_force, None
        return taken

    def retire(self, given_up: Callable[[], bool] = lambda: True) -> None:
        """Take the generation in force out of force, and tear its groups down, but for communicators that the next one
        may go on with. ``given_up()`` as in `Groups.park`."""
        old = self.take()
        if old is not None:
            self.reusable = old.groups.park(given_up)

    def let_go(self) -> None:
        """Tear down the communicators that the next generation could have gone on with."""
        reusable, self.reusable = self.reusable, None
        if reusable is not None:
            reusable.retire()

    def abort(self, generation: int, level: bool = False) -> None:
        """Free the training thread from every wait of a generation older than ``generation``; ``level`` as in
        `Groups.abort`.

        Called by the agent's thread.
        """
        with self._lock:
            current = self._in_force
        if current is not None and current.epoch.generation < generation:
            current.groups.abort(level)


def store_prefix(prefix: str, epoch: Epoch) -> str:
    """Prefix of an epoch's process groups in torch's store."""
    return f"{prefix}-r{epoch.renewal}" if epoch.renewal else prefix


def _place_of(microbatch: str) -> tuple[int, int]:
    pipeline, _, number = microbatch.partition(".")
    return int(pipeline), int(number)
