"""One process on paper: its script, its attempts, its steps and its recoveries, as `megatron_recycle.runtime` has them
(`loop`, `attempt`, `stepper`, `recovery`), with the real `Standing` and plain values.

A process is a generator. It yields where others may come between: a label, and what it waits for. There it may die;
where it waits it may also hear of the end of its generation (`Over`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_recycle.membership import Process as Name
from megatron_recycle.membership import Resume, Standing, StepMode, Verdict
from megatron_recycle.membership.protocol import Carry, Go
from megatron_recycle.membership.report import ClosedReport, KeptReport, Report
from megatron_recycle.membership.shards import ShardTable
from megatron_recycle.plan import (
    Action,
    Message,
    Plan,
    Worker,
    is_read,
    last_reads,
    needs,
    passes_on,
    readers,
    results_in,
)
from tests.redo_model import values
from tests.redo_model.cut import Cut
from tests.redo_model.values import GUESS, WRONG, Sums
from tests.redo_model.wires import Together, Wires

if TYPE_CHECKING:
    from tests.redo_model.model import Job


class Pause(NamedTuple):
    """Where a process may be left alone. ``ready``: None where it waits for nothing."""

    label: str
    ready: Callable[[], bool] | None = None


Life = Generator[Pause, None, None]


class Over(Exception):
    """The generation is over, as a process notices."""


class WrongGuess(Exception):
    """Some stage has stepped wrongly: the next iteration is void."""


class Violation(AssertionError):
    """A rule is broken."""


@dataclass(frozen=True)
class Rules:
    """The rules of "redo only lost work". Each can be left out, to see that the model notices."""

    acknowledge: bool = True
    """A worker leaves an iteration only once all its messages are used."""
    together: bool = True
    """... and all workers of its stage hold the gradient."""
    log: bool = True
    """Messages are kept until the iteration is committed."""
    log_unread: bool = True
    """... also those that nobody reads at that moment."""
    out_of_place: bool = True
    """A reduction leaves the sums as they are."""
    once: bool = True
    """What is done is reported."""
    void: bool = True
    """What was computed on a wrong guess is thrown away."""
    idle: bool = True
    """Who has had nothing to do of a closed iteration goes on with it all the same, as its stage does."""
    resend: bool = True
    """A closed stage sends what others are still to read."""
    stays: bool = True
    """A closed stage is not run again."""
    told_loss: bool = True
    """A loss that a script has been told stays."""
    groups: bool = True
    """Tied stages are closed together."""
    all_parts: bool = True
    """A worker's parts close together, with those of its peers."""
    parts_alike: bool = True
    """What a worker's parts have done counts as far as all of them have."""
    parts_level: bool = True
    """... and not only if they have come equally far: others have relied on it."""
    snapshot: bool = True
    """A stage that has stepped lends its layers as they were before."""
    lent_apart: bool = True
    """A principal keeps what helpers have added apart from its own sum."""
    lent_closing: bool = True
    """A helper's stage is closed once the stage is whose layers it runs."""
    adopt_late: bool = True
    """Shards of a closed stage are copied once its step is final."""
    had: bool = True
    """... and until then parameters come from those that have them."""


@dataclass
class Computed:
    """Results of an attempt's actions."""

    sums: Sums = field(default_factory=dict)
    made: dict[tuple[int, int, int], values.Activation] = field(default_factory=dict)
    """Activations by (pipeline, micro-batch, chunk), for the backward."""
    given: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Gradients that B has got, for W."""
    handed: dict[Message, int] = field(default_factory=dict)
    losses: dict[tuple[int, int], int] = field(default_factory=dict)
    borrowed: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Parameters of the lent layers that a micro-batch went through here."""
    lent: Sums = field(default_factory=dict)
    """What is added for the stage of lent layers."""


@dataclass
class Kept:
    """An attempt that may be taken up again."""

    iteration: int
    chain: int
    done: tuple[Action, ...]
    computed: Computed
    log: dict[Action, int]


@dataclass(frozen=True)
class Held:
    """A reduced gradient: as if it were exact, and as it is rounded."""

    iteration: int
    exact: int
    rounded: int
    loss: int
    tie: tuple[int, int] = (0, 0)
    slices: Mapping[int, int] = field(default_factory=dict)
    """Of the gradient, by shard."""
    by: frozenset[tuple[int, int]] = frozenset()
    """Chunks, and the parameters of each that this worker's activations were made with."""


@dataclass
class Commit:
    """A verdict under way; ``known``: it has come here."""

    held: Held
    together: Together
    known: bool = False


@dataclass(frozen=True)
class Generation:
    """As a process knows it."""

    number: int
    wires: Wires
    members: tuple[str, ...]
    plan: Plan
    carried: Mapping[int, Carry]
    rests: Mapping[int, Plan]
    closed: tuple[int, ...]
    table: ShardTable | None = None
    """Of this process' stage."""

    def plan_of(self, iteration: int) -> Plan:
        return self.rests.get(iteration, self.plan)

    def stage(self, *stages: int) -> list[str]:
        """The members of these stages."""
        return [name for name in self.members if Name.parse(name).worker.stage in stages]


class Process:
    """One worker, or one part of one.

    Attributes:
        left: the last iteration that the script has left.
        losses: that the script was told.
        stop, go: the last that the coordinator has said.
    """

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.name = job, name
        self.me, self.part = Name.parse(name).worker, Name.parse(name).part or 0
        self.standing = Standing(Name.parse(name), StepMode.of(True))
        self.left = -1
        self.losses: list[int] = []
        self.finished = False
        self.stop = 0
        self.go: Go | None = None
        self._exact = self.rounded = values.first(self.me.stage)
        asked = job.shape.asked
        self.cut = Cut(self.me.stage, len(asked.microbatches), asked.shards(self.me)) if asked.copies else None
        self.tie = (values.first(-1),) * 2
        self.held: Held | None = None
        self.kept: dict[int, Kept] = {}
        self._saved: tuple[Any, ...] = ()
        self._pending: Commit | None = None
        self._generation: Generation | None = None
        self.log: dict[Action, int] = {}
        """Of the attempt under way."""
        self.inside = False
        """Whether one is."""

    @property
    def exact(self) -> int:
        """The stage's parameters."""
        return self._exact if self.cut is None else self.cut.whole

    @property
    def shards(self) -> list[int]:
        """Of the optimizer's state, those that this process has."""
        return [] if self.cut is None else [*self.cut.state]

    # ---- what the scheduler asks

    @property
    def commits(self) -> bool:
        """Whether a verdict is on its way here."""
        return self._pending is not None and not self._pending.known and self._pending.together.complete

    def hear_verdict(self) -> None:
        """It comes."""
        assert self._pending is not None
        self._pending.known = True

    @property
    def interrupted(self) -> bool:
        return self.stop > self.standing.epoch.generation

    # ---- waiting

    def _until(self, label: str, ready: Callable[[], bool], halts: bool = False) -> Life:
        """Raises Over, also where a verdict voids what is waited for (``halts``)."""
        yield Pause(label, lambda: ready() or self.interrupted or (halts and self._is_refuted))
        if ready() and not (self.interrupted and self.job.draw.random() < 0.7):
            return
        if self.interrupted or halts:
            raise Over

    def _look(self, label: str) -> Life:
        """Raises Over if the generation is over."""
        yield Pause(label)
        if self.interrupted:
            raise Over

    def _all(self, label: str, tag: Any, members: list[str] | None, part: Any = None, halts: bool = False) -> Life:
        """Take part in what several make together, and wait for it."""
        together = self._now.wires.together(tag, members)
        together.given[self.name] = part
        yield from self._until(label, lambda: together.complete, halts)

    @property
    def _now(self) -> Generation:
        assert self._generation is not None
        return self._generation

    # ---- the script

    def life(self) -> Life:
        """From the first generation to the end of the script."""
        yield from self._recover()
        for iteration in range(self.job.shape.iterations):
            yield Pause("script")
            self.standing.ask(iteration)
            yield from self._through(lambda: self._run_to(self.standing.asked))
            assert self.told is not None
            self.left = iteration
            self.losses.append(self.told)
        yield from self._through(lambda: self._run_to(self.standing.asked, commit=True))
        self.finished = True
        yield from self._through(self._stand_by)

    def _stand_by(self) -> Life:
        """Until all scripts have ended."""
        yield Pause("end", lambda: self.job.all_finished or self.interrupted)
        if not self.job.all_finished:
            raise Over

    @property
    def told(self) -> int | None:
        """The loss of the last iteration that is stepped here."""
        return self._loss

    _loss: int | None = None

    def _through(self, run: Callable[[], Life]) -> Life:
        while True:
            try:
                if self._rejoins:
                    yield from self._rejoin()
                yield from run()
                return
            except WrongGuess:
                yield from self._roll_back()
            except Over:
                yield from self._leave_generation()

    def _run_to(self, iteration: int, commit: bool = False) -> Life:
        while self.standing.stepped < iteration:
            self._poll()
            if self.cut is not None and self.cut.owed:
                yield from self._wait_verdict()
                yield from self._adopt(self.cut)
            yield from self._attempt()
        if commit or self.standing.closed < iteration:
            yield from self._wait_verdict()

    def _leave_generation(self) -> Life:
        commit = self._pending
        yield Pause("verdict", lambda: self.interrupted or commit is None or commit.known)
        try:
            if commit is not None and commit.known and not self.interrupted:
                self._poll()
        except WrongGuess:
            yield from self._roll_back()
        else:
            yield from self._recover()

    def _roll_back(self) -> Life:
        committed = self.standing.committed
        if self.job.rules.void:
            self.kept.clear()
        self.standing.roll_back()
        try:
            yield from self._all("rolling back", ("renew", committed), None)
            self.standing.renew()
            old = self._now
            self._generation = replace(old, wires=self.job.wires(old.number, self.standing.epoch.renewal, old.members))
            self._begin_anew()
            yield from self._gather()
        except Over:
            yield from self._recover()

    # ---- an attempt

    def _attempt(self) -> Life:
        standing = self.standing
        iteration = standing.stepped + 1
        yield from self._look("begin")
        plan, generation = self._now.plan_of(iteration), self._now
        standing.begin(iteration)
        self._open(iteration)
        yield from self._look("opened")
        kept = self.kept.get(iteration)
        counted = plan.done.get(self.me, 0)
        if self.job.shape.parts > 1 and kept is not None:
            self._level(plan, kept, plan.actions(self.me)[:counted])
        if counted != (0 if kept is None else len(kept.done)):
            raise Violation(f"{self.name} goes on after {counted} actions, and has kept {kept}")
        self._lend(plan, iteration, self.exact)
        carried = generation.carried.get(iteration)
        chain = standing.attempt if carried is None else carried.chain
        computed, self.log = Computed(), {}
        if kept is not None:
            standing.take_up(kept.done)
            computed = kept.computed
            self.log = dict(kept.log)
            for action in kept.done:
                result = results_in(plan, self.me, action)
                if result is not None:
                    self._deliver(plan, computed, iteration, *result, self._logged(action, result[1]))
        self._share_losses(plan, computed, iteration)
        self.kept.pop(iteration, None)
        self._torn, self.inside = False, True
        try:
            for action in plan.actions(self.me)[len(standing.done):]:
                if action.kind in "WS" or not plan.chunk(self.me, action):
                    yield from self._look("before")
                if action.kind == "S":
                    yield from self._reduce_and_step(plan, computed, iteration)
                else:
                    yield from self._micro_batch(plan, computed, iteration, action)
            yield from self._close(plan, iteration)
        except (Over, WrongGuess) as error:
            standing.give_up()
            self._keep(iteration, chain, computed, isinstance(error, Over))
            raise
        finally:
            self.inside = False
        self._keep(iteration, chain, computed, True)

    def _level(self, plan: Plan, kept: Kept, counted: Sequence[Action]) -> None:
        """Of what another part of this worker has not come to forwards are dropped; W that it has done is run."""
        computed = kept.computed
        for action in {*kept.done} - {*counted}:
            item = (action.pipeline, action.microbatch, plan.chunk(self.me, action))
            if action.kind != "F" or item in computed.given:
                raise Violation(f"{self.name} cannot undo {action}")
            self._forget(computed, item)
        for action in counted:
            if action not in kept.done and action.kind == "W":
                item = (action.pipeline, action.microbatch, plan.chunk(self.me, action))
                self._compute(computed, kept.iteration, item, action, 0)
            elif action not in kept.done:
                raise Violation(f"{self.name} cannot catch up with {action}")
        kept.done = tuple(counted)

    def _forget(self, computed: Computed, item: tuple[int, int, int]) -> None:
        """The item's forward is as if it had not been run."""
        del computed.made[item]
        if item[2] == self.job.problem.chunks - 1:
            del computed.losses[item[:2]]

    def _keep(self, iteration: int, chain: int, computed: Computed, may: bool) -> None:
        if may and not self._torn and self.standing.committed < iteration:
            done = tuple(self.standing.done)
            if not self.job.rules.once and done and self.job.draw.random() < 0.3:
                done = done[:-1]
            self.kept[iteration] = Kept(iteration, chain, done, computed, self.log if self.job.rules.log else {})

    def _logged(self, action: Action, message: Message) -> int:
        """Messages are kept by the action that has made them: those to two chunks of one place have the same name."""
        if action not in self.log:
            raise Violation(f"{self.name} is to send {message} again, which is not in its log")
        return self.log[action]

    def _open(self, iteration: int) -> None:
        self._now.wires.together(("agreement", iteration, self.standing.attempt)).given[self.name] = True

    def _tag(self, iteration: int, *what: Any) -> Any:
        return (iteration, self.standing.attempt, *what)

    def _alike(self, *stages: int) -> list[str]:
        """The equal parts of these stages."""
        return [name for name in self._now.stage(*stages) if (Name.parse(name).part or 0) == self.part]

    def _peer(self, worker: Worker) -> str:
        """The equal part of another worker."""
        return str(Name(worker, self.part if self.job.shape.parts > 1 else None))

    def _deliver(self, plan: Plan, computed: Computed, iteration: int, to: Worker, message: Message,
                 value: int) -> None:
        if is_read(plan, to, message):
            return
        if to == self.me:
            computed.handed[message] = value
        else:
            self._now.wires.send(self.name, self._peer(to), self._tag(iteration, message), value)

    def _micro_batch(self, plan: Plan, computed: Computed, iteration: int, action: Action) -> Life:
        wires, kind = self._now.wires, PASS[action.kind]
        chunk = plan.chunk(self.me, action)
        item = (action.pipeline, action.microbatch, chunk)
        message, given = Message(kind or "W", *action[1:]), 0
        reads = kind and not ((kind == "F" and chunk == 0) or (kind == "B" and chunk == plan.problem.chunks - 1))
        if reads and message in computed.handed:
            given = computed.handed.pop(message)
        elif reads:
            tag = self._tag(iteration, message)
            if needs(plan, self.me, action) is None:
                raise Violation(f"{self.name} needs {message}, which nobody sends")
            self._torn = self.job.shape.spoils
            yield from self._until("waits", lambda: wires.came(self.name, tag), halts=True)
            self._torn = False
            if not wires.came(self.name, tag):
                raise Over
            given = wires.take(self.name, tag)
        if item in self.job.lent and kind == "F":
            yield from self._borrow(plan, computed, iteration, item)
        if self._is_refuted:
            raise Over
        if self.job.shape.parts > 1 and action.kind != "W":
            yield from self._with_siblings(iteration, action, computed, item)
        self.job.runs(self, iteration, item, action)
        result = self._compute(computed, iteration, item, action, given)
        sent = results_in(plan, self.me, action)
        if sent is not None and (self.job.rules.log_unread or not is_read(plan, *sent)):
            self.log[action] = result
        if self.job.watches("made"):
            yield Pause("made")
        if sent is not None:
            self._deliver(plan, computed, iteration, *sent, result)
        if action.kind == "F":
            self._share_losses(plan, computed, iteration)
        self.standing.did(action)
        if self.job.watches("did"):
            yield Pause("did")
        for sender in self._last_reads(plan).get(action, ()):
            wires.send(self.name, self._peer(sender), self._tag(iteration, "used", self.name), True)
        self._poll()

    def _last_reads(self, plan: Plan) -> Mapping[Action, tuple[Worker, ...]]:
        return self.job.of_plan(last_reads, plan, self.me)

    def _with_siblings(self, iteration: int, action: Action, computed: Computed, item: tuple[int, int, int]) -> Life:
        """A collective of tensor parallelism in the midst of the action: no sum is touched before it. It comes to its
        end as long as all parts of the worker come to it, also when the generation is over. One that has left the
        attempt does not: then a backward that was begun has used up its forward, and a full one has spoilt the sums."""
        members = [name for name in self._now.members if Name.parse(name).worker == self.me]
        together = self._now.wires.together(self._tag(iteration, "parts", self.me, action), members)
        together.given[self.name] = True

        def alone() -> bool:
            return self.interrupted and any(not self.job.processes[name].inside for name in members)

        yield Pause("parts", lambda: together.complete or self._is_refuted or alone())
        if together.complete:
            return
        if action.kind == "B" and self.interrupted:
            self._forget(computed, item)
            self.standing.done.remove(action._replace(kind="F"))
        self._torn = action.kind == "FB" and self.interrupted
        raise Over

    def _compute(self, computed: Computed, iteration: int, item: tuple[int, int, int], action: Action,
                 given: int) -> int:
        """The message that the action makes."""
        if action.kind == "F":
            own = self.exact if item not in self.job.lent else values.with_lent(self.exact, computed.borrowed[item])
            made = computed.made[item] = values.Activation.through(
                given if isinstance(given, values.Activation) else values.Activation(given),
                values.forward(iteration, item, own, given), self.exact if self.job.problem.block else self.rounded)
            if item[2] == self.job.problem.chunks - 1:
                computed.losses[item[:2]] = values.loss(made)
            return made
        if action.kind != "W":
            computed.given[item] = given
        made, given = computed.made[item], computed.given[item]
        for kind in values.halves(action.kind):
            key = (kind, *item)
            if key in computed.sums:
                raise Violation(f"{self.name} adds {key} of iteration {iteration} twice")
            computed.sums[key] = values.contribution(kind, made, given)
        if item in self.job.lent and (action.kind != "B" or not self.job.problem.split_backward):
            computed.lent["L", item[0], item[1], 1] = values.contribution("L", made, computed.borrowed[item])
        return values.backward(made, given)

    # ---- lent layers: the first one of chunk 1, which chunk 0's workers run for some micro-batches

    def _lend(self, plan: Plan, iteration: int, parameters: int) -> None:
        """Copies of a lent layer go to its helpers."""
        if self.me.stage != 1:
            return
        route, helpers = self.job.routes(plan), set[Worker]()
        for d, m, _ in self.job.lent:
            helper = route[d, m, 0]
            if route[d, m, 1] == self.me and not is_read(plan, helper, Message("F", d, m)):
                helpers.add(helper)
        for helper in helpers:
            self._now.wires.send(self.name, self._peer(helper), self._tag(iteration, "lent", self.me), parameters)

    def _borrow(self, plan: Plan, computed: Computed, iteration: int, item: tuple[int, int, int]) -> Life:
        principal, wires = self.job.routes(plan)[item[0], item[1], 1], self._now.wires
        tag = self._tag(iteration, "lent", principal)
        yield from self._until("lent layers", lambda: wires.came(self.name, tag), halts=True)
        if not wires.came(self.name, tag):
            raise Over
        computed.borrowed[item] = wires.read(self.name, tag)

    def _collect(self, plan: Plan, computed: Computed, iteration: int) -> Generator[Pause, None, Sums]:
        """What this worker adds to its stage's gradient: its own sums and those of its helpers, which get theirs."""
        route, wires, generation = self.job.routes(plan), self._now.wires, self._now
        holds = iteration == min(generation.carried, default=-1) and 1 in generation.closed
        if self.me.stage == 0 and not holds:
            for principal in {route[d, m, 1] for d, m, _ in self.job.lent if route[d, m, 0] == self.me}:
                part = {key: value for key, value in computed.lent.items() if route[key[1], key[2], 1] == principal}
                wires.send(self.name, self._peer(principal), self._tag(iteration, "lent sum", self.me), part)
        if self.me.stage != 1:
            return computed.sums
        found = computed.sums if not self.job.rules.lent_apart else dict(computed.sums)
        for helper in sorted({route[d, m, 0] for d, m, _ in self.job.lent if route[d, m, 1] == self.me}):
            tag = self._tag(iteration, "lent sum", helper)
            yield from self._until("lent sum", lambda tag=tag: wires.came(self.name, tag))
            if not wires.came(self.name, tag):
                raise Over
            for key, value in wires.take(self.name, tag).items():
                if key in found:
                    raise Violation(f"{self.name} adds {key} of iteration {iteration}, which {helper} has sent, twice")
                found[key] = value
        return found

    def _share_losses(self, plan: Plan, computed: Computed, iteration: int) -> None:
        last = plan.problem.stage_of(plan.problem.chunks - 1)
        if self.me.stage != last:
            return
        count = sum(action.kind == "F" and plan.chunk(self.me, action) == plan.problem.chunks - 1
                    for action in plan.actions(self.me))
        if len(computed.losses) == count:
            self._losses(iteration).given[self.name] = dict(computed.losses)

    def _losses(self, iteration: int) -> Together:
        last = self.job.problem.stage_of(self.job.problem.chunks - 1)
        return self._now.wires.together(self._tag(iteration, "losses", self.part), self._alike(last))

    def _wait_loss(self, iteration: int) -> Generator[Pause, None, int]:
        """The loss, or that which some script knows."""
        carried = self._now.carried.get(iteration)
        known = None if carried is None else carried.loss
        together = self._losses(iteration)
        if known is not None and self.job.rules.told_loss:
            return int(known[0])
        yield from self._until("loss", lambda: together.complete)
        return self.job.loss(iteration, together.given)

    # ---- reduce, step, commit

    def _reduce_and_step(self, plan: Plan, computed: Computed, iteration: int) -> Life:
        standing, generation = self.standing, self._now
        yield from self._wait_verdict()
        standing.check_complete(plan.actions(self.me))
        yield from self._agree(iteration)
        addend = yield from self._collect(plan, computed, iteration)
        tag = self._tag(iteration, "reduce", self.me.stage, self.part)
        together = generation.wires.together(tag, self._alike(self.me.stage))
        together.given[self.name] = dict(addend)
        yield from self._until("reduce", lambda: together.complete)
        sums = self.job.reduced(self, iteration, together.given)
        if not self.job.rules.out_of_place:
            computed.sums = sums
        exact = values.whole(sums)
        rounded = hash(frozenset(values.whole(each) for each in together.given.values()))
        tie = (0, 0)
        group = self.job.shape.tied
        if self.me.stage in group:
            together = generation.wires.together(self._tag(iteration, "tie", self.part), self._alike(*group))
            together.given[self.name] = (self.me.stage, exact, rounded)
            yield from self._until("tie", lambda: together.complete)
            by = {stage: found for stage, *found in together.given.values()}
            tie = (values.tied(tuple(by[stage][0] for stage in group)),
                   values.tied(tuple(by[stage][1] for stage in group)))
        loss = yield from self._wait_loss(iteration)
        slices: dict[int, int] = {}
        if self.cut is not None and generation.table is not None:
            yield from self._all("norms", self._tag(iteration, "norms", self.me.stage), self._alike(self.me.stage))
            own = [shard for shard, names in enumerate(generation.table.holders) if self.name in names]
            slices = {shard: values.part(exact, shard) for shard in own}
            self.cut.keep_only(own)
        yield Pause("reduced")
        standing.hold(iteration)
        by = frozenset(each for made in computed.made.values() for each in enumerate(made.by))
        self.held, early = Held(iteration, exact, rounded, loss, tie, slices, by), standing.early
        self._loss = loss
        self._begin_commit()
        if early:
            self._save()
            self._step(GUESS)
            yield Pause("stepped")
            yield from self._gather()
        else:
            yield from self._wait_verdict()
            yield from self._gather()

    # ---- shards

    def _gather(self, holders: Sequence[Sequence[str]] | None = None, label: str = "gather") -> Life:
        """Parameters come from those that hold their shards; returns once all peers have them."""
        cut, iteration = self.cut, self.standing.stepped
        if cut is None:
            return
        if holders is None:
            assert self._now.table is not None
            holders = self._now.table.holders
            if cut.had is not None and self.job.rules.had:
                holders = cut.had
        peers = self._alike(self.me.stage)
        together = self._now.wires.together((label, iteration, self.me.stage), peers)
        spoken_for = [shard for shard, names in enumerate(holders) if names[0] == self.name]
        if not cut.state.keys() >= {*spoken_for}:
            raise Violation(f"{self.name} is to give shards {spoken_for}, and has {sorted(cut.state)}")
        together.given[self.name] = {shard: cut.state[shard] for shard in spoken_for}
        yield from self._until("gather", lambda: together.complete)
        for given in together.given.values():
            for shard, value in given.items():
                cut.pieces[shard] = value
        cut.gathered = iteration
        yield from self._all("gathered", (label, iteration, self.me.stage, "all"), peers)

    def _adopt(self, cut: Cut) -> Life:
        """Copy the shards that are owed."""
        wires, tag = self._now.wires, ("adopt", self.me.stage)
        for shard, giver, taker in cut.owed:
            if giver == self.name:
                wires.send(self.name, taker, (*tag, shard), cut.state[shard])
        for shard, _, taker in cut.owed:
            if taker == self.name:
                yield from self._until("adopt", lambda shard=shard: wires.came(self.name, (*tag, shard)))
                if not wires.came(self.name, (*tag, shard)):
                    raise Over
                cut.state[shard] = wires.take(self.name, (*tag, shard))
        cut.owed, cut.had = (), None

    def _reconcile_shards(self, cut: Cut, resume: Resume) -> Life:
        """Parameters that some have not got; then shards go to those that are to hold them."""
        wires, standing, stage = self._now.wires, self.standing, self.me.stage
        table, peers = self._now.table, self._alike(stage)
        assert table is not None
        if self._now.number > 1:
            lacking = wires.together(("lacking", stage), peers)
            lacking.given[self.name] = cut.gathered != standing.stepped
            yield from self._until("lacking", lambda: lacking.complete)
            if any(lacking.given.values()):
                yield from self._gather(table.had, "reconcile")
        cut.owe(table)
        if not cut.owed or (stage in resume.closed and self.job.rules.adopt_late):
            return
        between = wires.together(("between", stage), peers)
        between.given[self.name] = self._now.number > 1 and standing.asked <= standing.stepped
        yield from self._until("lacking", lambda: between.complete)
        if not any(between.given.values()) or not self.job.rules.adopt_late:
            yield from self._adopt(cut)

    def _agree(self, iteration: int) -> Life:
        together = self._now.wires.together(("agreement", iteration, self.standing.attempt))
        yield from self._until("agreement", lambda: together.complete)

    def _begin_commit(self) -> None:
        assert self.held is not None
        together = self._now.wires.together(("commit", self.held.iteration))
        together.given[self.name] = True
        self._pending = Commit(self.held, together)

    def _close(self, plan: Plan, iteration: int) -> Life:
        """Wait until the stage is closed."""
        rules, wires = self.job.rules, self._now.wires
        if not self.job.shape.closes:
            return
        if rules.acknowledge:
            for reader in self.job.of_plan(readers, plan, self.me):
                tag = self._tag(iteration, "used", self._peer(reader))
                yield from self._until("acknowledgement", lambda tag=tag: wires.came(self.name, tag))
        if rules.together:
            group = self.job.closes_with(self.me.stage)
            members = self._now.stage(*group)
            if not rules.all_parts:
                members = self._alike(*group)
            part = None if rules.all_parts else self.part
            yield from self._all("close", self._tag(iteration, "close", *group, part), members)
        if self.job.lent and rules.lent_closing:
            self._principal_is_closed(iteration)
            if self.me.stage == 0:
                yield from self._all("close", self._tag(iteration, "closed principals"), self._now.stage(0, 1))
        self.standing.close()
        yield Pause("closed")

    def _principal_is_closed(self, iteration: int) -> None:
        """Tell those who run layers of this stage."""
        if self.me.stage == 1:
            tag = self._tag(iteration, "closed principals")
            self._now.wires.together(tag, self._now.stage(0, 1)).given[self.name] = True

    def _wait_verdict(self) -> Life:
        commit = self._pending
        if commit is not None:
            yield from self._until("verdict", lambda: commit.known)
            self._poll()

    def _poll(self) -> None:
        """Make the last step final if its verdict has come. Raises WrongGuess."""
        commit, early = self._pending, self.standing.early
        if commit is None or not commit.known:
            return
        self._pending = None
        found = self._verdict(commit.held.iteration)
        self._settle(found)
        if early and found.refutes(self._right(found)):
            raise WrongGuess

    def _verdict(self, iteration: int) -> Verdict:
        right = WRONG if iteration in self.job.shape.wrong else GUESS
        return Verdict(iteration, 0.0, 0.0, (right,), (GUESS,))

    @staticmethod
    def _right(found: Verdict) -> float:
        return found.norm_squares[0]

    @property
    def _is_refuted(self) -> bool:
        """Whether the next iteration is known to be void."""
        commit = self._pending
        if commit is None or not commit.known or not self.standing.early:
            return False
        found = self._verdict(commit.held.iteration)
        return found.refutes(self._right(found))

    def _settle(self, found: Verdict) -> None:
        right = self._right(found)
        todo = self.standing.settlement(found.iteration, right)
        if todo.undo:
            self._undo()
        if todo.step:
            self._step(right)
        assert self.held is not None
        by, self.held = self.held.by, None
        self.standing.commit(found, right)
        for each in [each for each in self.kept if each <= found.iteration]:
            del self.kept[each]
        self.job.committed(self, found.iteration, by)

    def _save(self) -> None:
        self._saved = (self.exact, self.rounded, self.tie)
        if self.cut is not None:
            self.cut.save()
        self.standing.save()

    def _undo(self) -> None:
        self.standing.undo()
        self._exact, self.rounded, self.tie = self._saved
        if self.cut is not None:
            self.cut.undo()

    def _step(self, coefficient: float) -> None:
        assert self.held is not None
        if self.cut is None:
            self._exact = values.stepped(self._exact, self.held.exact, coefficient)
        elif self.held.slices.keys() >= self.cut.state.keys():
            self.cut.step(self.held.slices, coefficient)
        else:
            raise Violation(f"{self.name} has shards {self.shards}, and slices {sorted(self.held.slices)}")
        self.rounded = values.stepped(self.rounded, self.held.rounded, coefficient)
        if self.me.stage in self.job.shape.tied:
            one, other = (values.stepped(*pair, coefficient) for pair in zip(self.tie, self.held.tie))
            self.tie = one, other
        self.standing.step(coefficient)

    # ---- a failure

    @property
    def _rejoins(self) -> bool:
        return self._pending is None and self.standing.rejoins

    def _rejoin(self) -> Life:
        """Others go on with an iteration that is closed here."""
        standing, generation = self.standing, self._now
        standing.rejoin()
        iteration = standing.iteration
        plan = generation.plan_of(iteration)
        if iteration not in self.kept:
            raise Violation(f"{self.name} rejoins iteration {iteration}, of which it has kept nothing")
        self.log = self.kept[iteration].log
        self._open(iteration)
        yield from self._look("rejoining")
        for action in plan.actions(self.me) if self.job.rules.resend else ():
            sent = passes_on(plan, self.me, action)
            if sent is not None:
                self._deliver(plan, Computed(), iteration, *sent, self._logged(action, sent[1]))
        self._lend(plan, iteration, self._saved[0] if self.job.rules.snapshot else self.exact)
        self._principal_is_closed(iteration)
        yield from self._agree(iteration)
        yield from self._wait_loss(iteration)
        self._begin_commit()

    def _recover(self) -> Life:
        while True:
            yield Pause("stop", lambda: self.interrupted)
            self._retire()
            number = self.stop
            yield Pause("retired")
            self.job.report(self, number, self._report())
            yield Pause("go", lambda number=number: self._goes(number) or self.stop > number)
            if self.go is None or not self._goes(number):
                continue
            try:
                yield from self._rebuild(self.go)
                yield from self._reconcile(self.go.resume)
                self.standing.go_on(self.go.resume)
                yield Pause("resumed")
                return
            except Over:
                continue

    def _goes(self, number: int) -> bool:
        return self.go is not None and self.go.generation == number

    def _retire(self) -> None:
        commit, self._pending = self._pending, None
        if commit is not None and commit.known:
            found = self._verdict(commit.held.iteration)
            self._settle(found)
            if self._refuted and self.job.rules.void:
                self.kept.clear()
        self.standing.give_up()

    @property
    def _refuted(self) -> bool:
        """Whether the last committed step was another one than some stage had guessed."""
        found = self.standing.verdict
        return found is not None and found.refutes(self._right(found))

    def _report(self) -> Report:
        standing, held, closed = self.standing, self.held, None
        kept = tuple(KeptReport(each.iteration, each.chain, tuple(map(str, each.done)),
                                standing.committed < each.iteration - 1,
                                max(self.job.problem.grid.microbatches), 0) for each in self.kept.values())
        shards = None if self.cut is None else self.cut.told(standing.holds, self.job.shape.asked.copies)
        if held is not None and standing.closed == held.iteration and self.job.rules.stays:
            closed = ClosedReport(held.iteration, held.loss, 0.0, tuple(self.job.closed_where(self.me.stage)))
            if held.iteration not in self.kept and self.job.rules.idle:
                raise Violation(f"{self.name} has closed iteration {held.iteration}, of which it has kept nothing")
        return standing.report(kept=kept, closed=closed, shards=shards)

    def _rebuild(self, go: Go) -> Life:
        standing, resume = self.standing, go.resume
        standing.join(go.generation)
        members = tuple(go.members)
        plan = self.job.plan(go.plan)
        wires = self.job.wires(go.generation, 0, members)
        carried = {each.iteration: each for each in (go.carried, go.ahead) if each is not None}
        rests = {iteration: self.job.plan(each.plan) for iteration, each in carried.items()}
        table = next((each for each in resume.shards if each.stage == self.me.stage), None)
        self._generation = Generation(go.generation, wires, members, plan, carried, rests, resume.closed, table)
        yield from self._all("connect", "connect", None)

    def _reconcile(self, resume: Resume) -> Life:
        standing, target = self.standing, resume.target
        todo = standing.reconciliation(resume)
        if todo.undo:
            self._undo()
        if todo.drop:
            standing.drop()
            self.held = None
        wires = self._now.wires
        for receiver, giver in todo.copies:
            if receiver == self.me:
                yield from self._until("copy", lambda: wires.came(self.name, "copy"))
                if not wires.came(self.name, "copy"):
                    raise Over
                self.held = wires.take(self.name, "copy")
                assert self.held is not None
                self._loss = self.held.loss
                standing.receive(target)
            else:
                assert giver == self.me and self.held is not None and self.held.iteration == target
                wires.send(self.name, self._peer(receiver), "copy", self.held)
        if self.cut is not None and todo.slices:
            yield from self._copy_slices(todo.slices, target)
        if todo.verdict is not None:
            self._settle(todo.verdict)
        elif todo.anew:
            yield from self._all("anew", ("anew", target), None)
            self._settle(self._verdict(target))
        mine = {iteration for iteration, rest in self._now.rests.items() if rest.done.get(self.me)}
        if self.me.stage in resume.closed and self.job.rules.idle:
            mine.add(resume.next)
        for each in [each for each in self.kept if each > target and each not in mine]:
            del self.kept[each]
        carried = self._now.carried.get(resume.next)
        if carried is not None and carried.provisional and self._refuted and self.job.rules.void:
            self.kept.clear()
            self._begin_anew()
        if self.cut is not None:
            yield from self._reconcile_shards(self.cut, resume)

    def _begin_anew(self) -> None:
        self._generation = replace(self._now, carried={}, rests={})

    def _copy_slices(self, slices: Sequence[tuple[Worker, Worker, int]], target: int) -> Life:
        """Who lacks the gradient of ``target`` gets its slices, and what belongs to it (shard -1)."""
        wires, mine = self._now.wires, dict[int, Any]()
        for receiver, giver, shard in slices:
            tag = "slice", shard
            if giver == self.me:
                assert self.held is not None and self.held.iteration == target
                wires.send(self.name, self._peer(receiver), tag, self.held if shard < 0 else self.held.slices[shard])
        for receiver, _, shard in slices:
            tag = "slice", shard
            if receiver == self.me:
                yield from self._until("copy", lambda tag=tag: wires.came(self.name, tag))
                if not wires.came(self.name, tag):
                    raise Over
                mine[shard] = wires.take(self.name, tag)
        if -1 in mine:
            numbers = mine.pop(-1)
            assert isinstance(numbers, Held) and self.cut is not None
            self.held, self._loss = replace(numbers, slices=mine), numbers.loss
            self.standing.receive(target)


PASS = {"F": "F", "B": "B", "FB": "B", "W": ""}
