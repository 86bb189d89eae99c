"""One worker of the job: runs its part of every iteration, and goes on after failures.

:class:`StageWorker` ties the pieces together and holds the state that they share; each piece knows only
its own business. The steps of a recovery are in :mod:`megatron_recycle.runtime.recovery`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Agent
from megatron_recycle.errors import GenerationOver, JobEnded, UnsupportedError
from megatron_recycle.membership import THE_END, Fault, Process, Standing, StepMode, Verdict
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Action, Plan, Worker
from megatron_recycle.runtime.actions import Actions
from megatron_recycle.runtime.activity import HANDLES, RECOVERY, REDUCE, STANDING_BY, WAITING, WORKING, Activity
from megatron_recycle.runtime.comm.activations import Transport
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.losses import LossRelay
from megatron_recycle.runtime.comm.network import Network, TorchNetwork
from megatron_recycle.runtime.comm.reduction import Reduction, per_token, reduction_of
from megatron_recycle.runtime.comm.trained_alike import Agreement, Trained
from megatron_recycle.runtime.commit import Held
from megatron_recycle.runtime.compute.accumulate import Accumulators, Layout
from megatron_recycle.runtime.compute.data import DataSource
from megatron_recycle.runtime.compute.edits import Edits
from megatron_recycle.runtime.compute.memory import ActivationMemory
from megatron_recycle.runtime.compute.modes import Modes
from megatron_recycle.runtime.compute.random_state import Generators, seed_of
from megatron_recycle.runtime.compute.split import Deferring
from megatron_recycle.runtime.compute.stopwatch import Stopwatch
from megatron_recycle.runtime.equality import verify_boundary
from megatron_recycle.runtime.evaluation import Evaluations, run_pass
from megatron_recycle.runtime.interpreter import PHASES, Observer, execute
from megatron_recycle.runtime.memory_budget import announce
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.profiling import Profiling
from megatron_recycle.runtime.recovery import finish, join, recover, renew
from megatron_recycle.runtime.setup_record import SetUp
from megatron_recycle.runtime.stage import Stage
from megatron_recycle.runtime.stepper import Stepper, WrongGuess

_POLL_SECONDS = 0.001
_STEP = ("reduce", "reduced", "step")  # phases in which an error is the step's
_NO_WORK = ("recovering", "joining", "boundary", "step", "stepped")  # phases that are no work, or told by `stepping`


class _Kept(Exception):
    """The script has raised, and the coordinator wants this worker in the next generation all the same."""


class StageWorker:
    """Trains one stage of the model together with all other workers.

    Args:
        place: position, grid, ranks.
        stage: the framework's side.
        splitter: defers weight gradients of the stage's linear layers.
        data: micro-batches by place.
        agent: this process's link to the coordinator, started.
        generators: what the user's code may draw random numbers from.
        config: settings.
        observer: told of every phase; None for nobody.
        save_last: called between two iterations by all workers alike when the job cannot go on; writes this worker's
            part of a checkpoint and returns where that is, or nothing if another worker could not write its own. It may
            raise anything. None: there is no such thing.
        setup: the time until `begin`, as what this process is told in it; None: nobody joins later.
        network: builds each generation's communicators; None: torch's.
    """

    def __init__(self, *, place: Place, stage: Stage, splitter: Deferring, data: DataSource, agent: Agent,
                 generators: Generators, config: RecycleConfig, observer: Observer | None = None,
                 save_last: Callable[[], str] | None = None, setup: SetUp | None = None,
                 network: Network | None = None) -> None:
        self.setup = setup
        if config.on_leave == "checkpoint" and save_last is None:
            raise UnsupportedError("on_leave checkpoint has no way to save from this script: it is there with "
                                   "DeepSpeed, and with Megatron-LM's own training loop. Leave it out, and save often "
                                   "enough")
        self.save_last = save_last
        self.place = place
        self.stage = stage
        self.agent = agent
        self.config = config
        me = Process(place.me, place.part if place.parts > 1 else None)
        self.standing = Standing(me, StepMode.of(config.step == "staggered"))
        self.activity = Activity(config.stall_floor)
        self.groups: Groups | None = None
        self._members: tuple[Worker, ...] = ()
        self.prefix = ""
        self.tries = 0
        """Generations with the same members in a row, before this one."""
        self.generators = generators
        self._find_generators()
        self._look_again = True  # after the first iteration: some are made in the first forward
        self.data = data
        self._observer = observer
        self._observed: tuple[int, int, str, Action | None] | None = None
        self.layout = Layout(stage.parameters, stage.gradient_dtype)
        self._lock = threading.Lock()
        self._stopwatch = watch = Stopwatch(stage.device)
        self.stepper = Stepper(stage, self.layout, place, self.standing, self, watch)
        self._modes = Modes(stage.module)
        self._edits = Edits(stage)
        self._trained = Trained.of(stage.module, self.layout)
        self._agreement: Agreement
        self.brought: tuple[Mapping[str, torch.Tensor], Any] | None = None
        """The tensors and counters that this worker came in with, until it trains."""
        self.evaluations = Evaluations(self.standing, place.grid, stage.report_width)
        self.network = network or TorchNetwork()
        self._announce_resumed = False
        self._handlers = {**dict.fromkeys(("F", "B", "W", "FB"), self._micro_batch), "S": self._reduce_and_step}
        self._plan: Plan
        self._orders: Plan  # of the attempt under way: the plan, without what its iteration leaves out
        self._plan_number = 0
        self.left_out: Sequence[tuple[int, str]] = ()
        """Iterations and their micro-batches (``1.3``) that the job goes on without."""
        self._profiling = Profiling(watch)
        self.memory = ActivationMemory(stage.device)
        self.actions = Actions(place=place, stage=stage, splitter=splitter, data=data, layout=self.layout,
                               generators=generators, seed=config.seed, standing=self.standing, activity=self.activity,
                               watch=watch, memory=self.memory, exact=config.reduction == "exact")
        self._transport: Transport
        self._reduction: Reduction
        agent.doing, agent.progress = self.activity.told, self._where  # last: its thread asks at once

    # ---- training

    def train(self, iteration: int) -> float:
        """Run ``iteration``, through any failures; returns the mean loss of its global batch.

        With staggered steps the iteration may not be committed yet; see `settle`.

        Raises:
            JobEnded: training cannot go on.
            DataError: first and last stage read different data.
            UnsupportedError: the script has changed something that cannot be followed.
        """
        with self._inside():
            self.begin(iteration)
            if self.has_done(iteration):
                return self._through_failures(lambda: self._run_to(iteration))
            self._look()
            loss = self._through_failures(lambda: self._run_to(iteration))
            self.brought = None
            if self._look_again:
                self._look_again = False
                with self._telling():
                    self._find_generators()
            self._edits.leave(self.standing.committed < self.standing.stepped)
            return loss

    def _look(self) -> None:
        """Take in what the script has changed since the last iteration, before the next one is trained."""
        if self.brought is not None:  # the script has gone through its loop since: its peers' had before
            self.stage.load_state(*self.brought)
        changed = self._modes.look()
        if changed and self._modes.gone():
            self._edits.refuse_loss(self.standing.stepped)
        if changed or self._edits.found():
            self.settle()
        if self.stage.look() or changed:
            self.lay_out()
        self._modes.remember()

    def lay_out(self) -> None:
        """The stage's parameters may be others now."""
        self.layout = self.stepper.layout = self.actions.layout = Layout(
            self.stage.parameters, self.stage.gradient_dtype)
        self._trained = Trained.of(self.stage.module, self.layout)

    def evaluate(self, iteration: int, data: DataSource, number: int) -> torch.Tensor:
        """Forwards of one global batch, through any failures, before ``iteration`` is trained.

        Args:
            iteration: the one that training goes on with.
            data: micro-batches by place.
            number: of the global batch in ``data``, from 0.

        Returns:
            What the last stage reports of each micro-batch, (total, width), the same on all workers.

        Raises JobEnded if the job cannot go on.
        """
        def run() -> float:
            # Done already: a failure has told this worker so, or it was before this worker came in.
            while self.standing.evaluated < self.standing.passes:
                run_pass(self, self._transport, data, number)
            return 0.0

        with self._inside():
            self.begin(iteration)
            self.settle()
            self.standing.passes += 1
            self._through_failures(run)
        return self.evaluations.table

    def _find_generators(self) -> None:
        """Raises UnsupportedError."""
        self.generators.adopt("the model", self.stage.module)
        self.generators.adopt_trackers()

    def begin(self, iteration: int) -> None:
        """Take part in the job, if this is the first that this worker does in it. Raises JobEnded."""
        if self.generation == 0:
            self.standing.stand_at(iteration)
            # Who comes in reads data to compare it: the script finds its random numbers as it left them all the same.
            with self.waiting(RECOVERY), self.generators.kept(), self._telling():
                join(self)
            announce(self)

    def has_done(self, iteration: int) -> bool:
        """Whether the job had done ``iteration`` before this worker came in: `train` then does nothing."""
        return iteration <= self.standing.stepped

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Not in the script's own code, which finds its random numbers as it left them."""
        with self.activity.during(WORKING, "begin"), self.generators.kept():
            yield

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What is raised in the block has been told to the coordinator, which has decided what follows, when the script
        gets it: the others know first."""
        try:
            yield
        except JobEnded:
            raise
        except (Exception, SystemExit) as error:
            fault = self._fault(error)
            with self.waiting("a decision"):
                kept = self.agent.raised(fault)
            if not kept:
                raise
            get_logger().error("megatron-recycle: the script has failed %s", fault.where, exc_info=error)
            raise _Kept(str(fault)) from None

    def fail(self, error: BaseException) -> None:
        """The script has failed with ``error``, in its own code or by handling what it could not mend. Returns when it
        is decided what follows: the others go on, or the job is over, perhaps after a last checkpoint."""
        with self.waiting("a decision"):
            kept = self.agent.raised(Fault.of(error, None if self._observed is None else self._observed[0], whole=True))
        if kept:
            with suppress(JobEnded):
                self._through_failures(lambda: 0.0, _Kept())

    def _fault(self, error: BaseException) -> Fault:
        running = self.actions.running
        if running is not None:
            return Fault.of(error, self.standing.iteration, str(running), whole=True)
        iteration, _, phase, _ = self._observed or (None, 0, "", None)
        return Fault.of(error, iteration, "S" if phase in _STEP else None)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A block in which the training thread waits for other workers or the coordinator."""
        return self.activity.during(WAITING, what)

    @contextmanager
    def stepping(self, iteration: int) -> Iterator[None]:
        """A block of work inside a wait: who steps in a recovery waits for the others again afterwards, for as long as
        they take. An optimizer that draws random numbers draws the same on all peers, and again if it steps again."""
        number = seed_of(self.config.seed, "step", iteration, self.place.me.stage)
        with self.activity.during(WORKING, "step"), self.generators.at(number):
            yield

    def settle(self) -> None:
        """Wait until the last iteration is committed on this worker."""
        last = self.standing.stepped
        if self.standing.committed < last:
            with self._inside(), self._modes.of_training(), self._edits.apart(last, self.stepper.remake):
                self._through_failures(lambda: self._run_to(last, commit=True))

    def finish(self) -> None:
        """Call when the script ends well; returns when the whole job has. Raises JobEnded if it failed."""
        self.settle()
        with self.activity.during(STANDING_BY, THE_END), self._telling():
            finish(self)
        self.close()

    def close(self) -> None:
        """Leave the job, which knows already whether the script has failed.

        Waits for the threads that are inside the communication library: an interpreter that ends under them aborts
        the process.
        """
        self.uninstall()
        self.stepper.close()
        self.agent.close()
        self.network.close()

    def _run_to(self, iteration: int, commit: bool = False) -> float:
        # More than one iteration to run: a failure has undone a step that train() had already returned from.
        while self.standing.stepped < iteration:
            self._try(self.standing.stepped + 1)
        if commit:
            self.stepper.wait()
        known = self.stepper.held or self.standing.verdict
        # A later one: this worker has come in after it.
        assert known is not None and known.iteration >= iteration
        return known.loss

    def _through_failures(self, run: Callable[[], float], kept: _Kept | None = None) -> float:
        while True:
            try:
                with self._telling():
                    if kept is not None:
                        self._recover(GenerationOver(str(kept)))
                    return self._through_generations(run)
            except _Kept as again:
                kept = again

    def _through_generations(self, run: Callable[[], float]) -> float:
        while True:
            try:
                return run()
            except WrongGuess:
                self._roll_back()
            except GenerationOver as error:
                self._leave_generation(error)

    def _leave_generation(self, error: GenerationOver) -> None:
        """A transfer was given up: for a failure, or because another worker knows that a guess was wrong."""
        commit = self.stepper.pending
        with self.waiting("a verdict"):
            while commit is not None and not commit.done.wait(_POLL_SECONDS) and not self.interrupted():
                pass
        try:
            if commit is not None and commit.known and not self.interrupted():
                self.stepper.poll()
        except WrongGuess:
            self._roll_back()
        else:
            self._recover(error)

    def _recover(self, error: GenerationOver) -> None:
        with self.waiting(RECOVERY):
            recover(self, error)

    def _roll_back(self) -> None:
        """Void the work on the next iteration, on all workers alike, and begin it again on new handles."""
        committed = self.standing.committed
        self.agent.event("rolled_back", iteration=committed, actions=self.standing.roll_back())
        self.observe("recovering", committed + 1)
        self.discard_attempt()
        try:
            with self.waiting(HANDLES):
                renew(self)
        except GenerationOver as error:
            self._recover(error)

    def _try(self, iteration: int) -> None:
        self.stepper.poll()
        if self.standing.promises.ends_before(iteration):
            self._await_switch(iteration)
        verify_boundary(self, iteration)
        while plan := self.standing.promises.plan_from(iteration):
            self.use_plan(plan)
            self.agent.adopted(self.generation, iteration, plan.digest)
        left_out = frozenset(microbatch for of, microbatch in self.left_out if of == iteration)
        if left_out or self._orders is not self._plan:
            self._follow(self._plan.without([_place_of(each) for each in left_out]) if left_out else self._plan)
        self.standing.begin(iteration)
        relay = LossRelay(self.current_groups(), self.place.grid, self.stage.report_width, self._reduction, iteration,
                          self.standing.attempt, len(left_out))
        with self.waiting("the last messages"):
            self._transport.begin((iteration, self.standing.attempt))
        self._agreement = Agreement(self._trained, self.current_groups())
        self.memory.begin()
        self.actions.begin(Accumulators(self.layout, self._reduction.place), relay)
        execute(self._orders.actions(self.place.me), self._handlers, iteration=iteration, observe=self.observe,
                interrupted=self.interrupted)

    def _await_switch(self, iteration: int) -> None:
        """Wait between two iterations, with nothing in flight, for the generation that others come in or leave with."""
        self.stepper.wait()
        self.observe("boundary", iteration)
        self.agent.boundary(self.generation, iteration)
        with self.waiting("a switch"):
            self.agent.wait_stop(self.generation)
        raise GenerationOver(f"generation {self.generation} ends before iteration {iteration}, as agreed")

    def interrupted(self) -> bool:
        """Whether a newer generation than the one in force has been announced, or the end of the job."""
        return self.agent.stop_generation > self.generation or self.agent.ended is not None

    def observe(self, phase: str, iteration: int, action: Action | None = None) -> None:
        if phase not in _NO_WORK:
            # Full backwards, and forwards for one, take other times than split ones, and are compiled apart.
            full = action in self.actions.full and phase in PHASES.values()
            self.activity.work(f"full {phase}" if full else phase)
        self._observed = iteration, self.standing.attempt, phase, action
        if action is not None:
            self.tell_resumed()
        if self._observer is not None:
            self._observer.on(phase, iteration, action)

    def _where(self) -> dict[str, Any]:
        """What was observed last, for the agent."""
        if self._observed is None:
            return {}
        iteration, attempt, phase, action = self._observed
        return {"iteration": iteration, "attempt": attempt, "phase": phase, "action": str(action) if action else None}

    @property
    def generation(self) -> int:
        """The one in force; 0 before the first."""
        return self.standing.epoch.generation

    @property
    def store_prefix(self) -> str:
        """Of the process groups in torch's store, which are others after each roll-back."""
        renewal = self.standing.epoch.renewal
        return f"{self.prefix}-r{renewal}" if renewal else self.prefix

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._plan

    def live(self) -> tuple[Worker, ...]:
        """The live workers, in the order of their ranks; between two generations, those of the last one."""
        return self._members

    # ---- actions

    def _micro_batch(self, action: Action) -> None:
        """One F, B, W or FB."""
        self.actions.run(action)
        self.standing.did(action)
        self._transport.post()
        self.actions.now.relay.poll()
        self.stepper.poll()

    # ---- reduce, commit, step

    def _reduce_and_step(self, action: Action) -> None:
        self.stepper.wait()
        groups = self.current_groups()
        iteration, now = self.standing.iteration, self.actions.now
        self.standing.check_complete(self._orders.actions(self.place.me))
        with torch.no_grad(), self.activity.during(WAITING, REDUCE), self._stopwatch.measure("reduce"):
            self._agreement.check(iteration)
            gradient = self._reduction.gradient(now.sums, groups, self.stage.ties)
        with self.waiting("the loss"):
            loss, weight = now.relay.wait()
        if self.stage.averaging == "tokens":
            per_token(gradient, weight)
        views = self.layout.views(gradient)
        held = Held(iteration, gradient, self.stage.norm_square(views), loss, weight, now.digests,
                    now.relay.reports, self.stage.zeros(views))
        self.stepper.hold(held, groups, self.standing.promises.promise(iteration, self.agent.offer),
                          self._plan_number)

    def committed(self, verdict: Verdict, adopt: bool) -> None:
        """The stepper's news: an iteration is final."""
        self.forget_data(verdict.iteration)
        self.agent.committed(verdict.iteration, verdict.loss)
        self._profiling.committed(self, verdict.iteration, self._transport.lags)
        if adopt:
            self.standing.promises.agreed(verdict.iteration)

    def forget_data(self, iteration: int) -> None:
        """``iteration`` and all before it are final: their data is not read again."""
        for pipeline, count in enumerate(self.place.grid.microbatches):
            self.data.forget(pipeline, (iteration + 1) * count)

    # ---- what the recovery changes

    def abort(self, generation: int) -> None:
        """Free the training thread from whatever it waits for in a generation older than ``generation``.

        Called by the agent's thread.
        """
        with self._lock:
            groups = self.groups
        if groups is not None and groups.generation < generation:
            groups.abort()
        if self.agent.breaks_off:
            self.network.abort_default()

    def discard_attempt(self) -> None:
        """Forget the iteration in flight; what is held of a complete one stays."""
        self.standing.give_up()
        for parameter in self.layout.parameters:
            parameter.grad = None
        self.actions.forget()

    def install(self, groups: Groups, plan: Plan) -> None:
        """Use the handles of a new generation, and its plan.

        Raises GenerationOver if a still newer generation was announced meanwhile.
        """
        self._plan = plan
        self.reinstall(groups)

    def reinstall(self, groups: Groups) -> None:
        """Use other handles of the same generation, with the same plan. Raises as `install`."""
        with self._lock:
            self.groups = groups
        self._members = groups.members
        self._transport = Transport(groups, self.stage.device)
        self.use_plan(self._plan)
        self.network.become(groups.everybody)
        self.stage.regroup(groups)
        if self.interrupted():
            raise GenerationOver("a newer generation was announced while this one was being installed")

    def uninstall(self) -> None:
        """Take the handles of the old generation out of use and tear them down."""
        with self._lock:
            groups, self.groups = self.groups, None
        if groups is not None:
            self.network.become(None)
            groups.retire()

    def use_plan(self, plan: Plan) -> None:
        """Follow ``plan`` from the next attempt on."""
        self._plan = plan
        self._reduction = reduction_of(self.config.reduction == "exact", plan, self.place.me, self.stage.averaging)
        self._follow(plan)

    def _follow(self, orders: Plan) -> None:
        self._orders, self._plan_number = orders, number_of(orders)
        self._transport.follow(orders)
        self.actions.use(orders, self.current_groups(), self._transport)

    @contextmanager
    def among_those_left(self) -> Iterator[None]:
        """A block for code of the script's framework, which finds its random numbers as the script has left them, and
        in torch those that are left only, in the order of their ranks. What is done over all of them ends with the
        generation."""
        with self.network.renumbered(self.current_groups().control), self.generators.of_script():
            yield

    def announce_resumed(self) -> None:
        """Tell the coordinator when the next action begins."""
        self._announce_resumed = True

    def tell_resumed(self) -> None:
        """The next action begins, or there is none left to begin."""
        if self._announce_resumed:
            self._announce_resumed = False
            self.agent.resumed(self.generation)

    def current_groups(self) -> Groups:
        assert self.groups is not None
        return self.groups


def number_of(plan: Plan) -> int:
    """A number below 2**20 by which workers find out that they follow different plans."""
    return int(plan.digest.rpartition(":")[2][:5], 16)


def _place_of(microbatch: str) -> tuple[int, int]:
    pipeline, _, number = microbatch.partition(".")
    return int(pipeline), int(number)
