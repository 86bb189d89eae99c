"""The loop of one worker: from iteration to iteration, and from one generation to the next.

:mod:`megatron_recycle.runtime.attempt` runs an iteration, :mod:`megatron_recycle.runtime.stepper` ends it, and
:mod:`megatron_recycle.runtime.recovery` handles a failure. This module goes from one to the other, for all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_recycle.errors import FailureMet, GenerationOver, JobEnded, LendingError, RecycleError
from megatron_recycle.membership import Standing
from megatron_recycle.membership.worker_events import RolledBack
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Grid, passes_on
from megatron_recycle.runtime import recovery
from megatron_recycle.runtime import worker_extensions as extensions
from megatron_recycle.runtime.activity import HANDLES, RECOVERY
from megatron_recycle.runtime.attempt import Attempt, opened
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.lent.loans import acceptable
from megatron_recycle.runtime.p2p_warmup import connect_partners
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.runtime.quiesce import drain
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stepper import Stepper, WrongGuess
from megatron_recycle.runtime.user_edits import UserEdits

_POLL_SECONDS = 0.001

class _Kept(Exception):
    """The script has raised, and the coordinator wants this worker in the next generation all the same."""


class RecoveryFailed(Exception):
    """A recovery has failed with an error, its cause, that is no end of a generation; the coordinator decides on it."""


class Loop:
    """The loop of one worker.

    Args:
        site, standing, stepper: of the worker.
        between: the script's edits between two iterations.
    """

    def __init__(self, site: Site, standing: Standing, stepper: Stepper, between: UserEdits) -> None:
        self.site, self.standing, self.stepper = site, standing, stepper
        self._between = between
        self._asked_apart = False

    def run_to(self, iteration: int, commit: bool = False) -> None:
        """Run all iterations up to this one. Returns when this worker's stage is closed for it, or, with ``commit``,
        when it is final. Raises GenerationOver and WrongGuess."""
        # More than one iteration to run: a failure has undone a step that train() had already returned from.
        while self.standing.stepped < iteration:
            generation = self._at_boundary(self.standing.stepped + 1)
            self.site.trainable.initial_state = None  # training goes on from it
            with Attempt(self.site, self.stepper, generation) as attempt:
                attempt.run()
                attempt.close()
        if commit or self.standing.closed < iteration:
            self.stepper.wait()

    def _at_boundary(self, iteration: int) -> Generation:
        """Do what is due before ``iteration``: a switch, the extensions' work, another plan."""
        site, standing, generation = self.site, self.standing, self.stepper.current.get()
        self.stepper.poll()
        for extension in extensions.ALL:
            extension.catch_up(site, self.stepper, generation)
        if standing.promises.ends_before(iteration):
            self._await_switch(iteration)
        for extension in extensions.ALL:
            extension.due(site, self.stepper, generation, iteration)
        return self._adopt(iteration)

    def _adopt(self, iteration: int) -> Generation:
        """The generation in force, with the plan that is agreed upon for ``iteration``."""
        site, standing, generation = self.site, self.standing, self.stepper.current.get()
        while plan := standing.promises.plan_from(iteration):
            generation = generation.follow(plan, site.exact, site.stage)
            self.stepper.current.set(generation)
            site.agent.adopted(standing.epoch.generation, iteration, plan.digest)
        return self.sized(site.grids.of(iteration))

    def sized(self, grid: Grid) -> Generation:
        """The generation in force, with its plan for as many micro-batches as ``grid`` has."""
        site, generation = self.site, self.stepper.current.get()
        plan = site.grids.plan(generation.plan, grid)
        if plan is not generation.plan:
            generation = generation.follow(plan, site.exact, site.stage)
            self.stepper.current.set(generation)
        # Other workers may still be in the script's own code.
        connect_partners(site, self.standing, generation, site.config.transport_timeout, site.phases.waiting(HANDLES))
        return generation

    def _await_switch(self, iteration: int) -> None:
        """Wait between two iterations, with nothing in flight, for the generation in which others join or leave."""
        number = self.standing.epoch.generation
        self.stepper.wait()
        self.site.phases.enter(Phase.BOUNDARY, iteration)
        self.stepper.current.get().groups.rest()
        self.site.agent.boundary(number, iteration)
        with self.site.phases.waiting("a switch"):
            self.site.agent.wait_stop(number)
        raise GenerationOver(f"generation {number} ends before iteration {iteration}, as agreed")

    def apart(self, run: Callable[[], None]) -> None:
        """Run a joint call of all workers between two iterations, through any failures."""
        self._asked_apart = True
        try:
            self.through_failures(run)
        finally:
            self._asked_apart = False

    def stand_again(self) -> bool:
        """Between two iterations: run again the iterations that all have gone back before. Returns True."""
        if self.standing.stepped < self.standing.asked:
            with self._between.again():
                self.run_to(self.standing.asked, commit=True)
        return True

    def through_failures(self, run: Callable[[], None]) -> None:
        """Run this, through any failures. Raises JobEnded, and ``run``'s error if that ends the job."""
        self._through(run, None)

    def into_the_next(self) -> None:
        """Go to the next generation: the script has raised, and the coordinator keeps this worker all the same."""
        self._through(lambda: None, _Kept())

    def _through(self, run: Callable[[], None], kept: _Kept | None) -> None:
        while True:
            try:
                with self.telling():
                    if kept is not None:
                        self._recover(GenerationOver(str(kept)))
                    return self._through_generations(run)
            except _Kept as again:
                kept = again

    def _through_generations(self, run: Callable[[], None]) -> None:
        while True:
            try:
                if self.stepper.rejoins:
                    self._rejoin()
                return run()
            except WrongGuess as guess:
                self._roll_back(guess.drains)
            except GenerationOver as error:
                self._leave_generation(error)

    def _rejoin(self) -> None:
        """Take part in the rest of an iteration for which this worker's stage is closed: a failure has lost some of it
        elsewhere. The script may have left the iteration, so no action is run here again, and the step stays. The
        others read messages that this worker has kept; then all commit. Raises GenerationOver."""
        site, stepper, standing, generation = self.site, self.stepper, self.standing, self.stepper.current.get()
        standing.rejoin()
        iteration = standing.iteration
        program, kept = generation.program_of(iteration), stepper.current.kept[iteration]
        if iteration + 1 not in stepper.current.kept:  # the next iteration may have been under way, and begins anew
            site.meters.memory.give_up()
        shared = opened(site, generation, iteration, standing.attempt)
        for action in program.actions:
            sent = passes_on(program.plan, site.place.me, action)
            if sent is not None:
                generation.transport.send(sent[1], kept.log[action].back())
        shared.agreement.check(iteration)
        shared.losses.wait()
        offer = acceptable(standing.promises.new(site.agent.offer), site.trainable.neighbours, site.agent,
                           site.place.me)
        stepper.commit_again(generation.groups, standing.promises.promise(iteration, offer), program.number)

    def _leave_generation(self, error: GenerationOver) -> None:
        """Handle a transfer that was given up: for a failure, or for a wrong guess that another worker knows of."""
        commit, site = None if isinstance(error, FailureMet) else self.stepper.pending, self.site
        with site.phases.waiting("a verdict"):
            while commit is not None and not commit.done.wait(_POLL_SECONDS) and not site.interrupted(self.standing):
                pass
        try:
            if commit is not None and commit.known and not site.interrupted(self.standing):
                self.stepper.poll()
        except WrongGuess as guess:
            self._roll_back(guess.drains)
        else:
            self._recover(error)

    def _recover(self, error: GenerationOver) -> None:
        if self._asked_apart:
            self._between.look_back()
        with self.site.phases.waiting(RECOVERY), _failing_alone():
            recovery.recover(self.site, self.stepper, error)

    def _roll_back(self, drains: bool) -> None:
        """Void the work on the next iteration, on all workers alike, and begin it again. ``drains``: all can drain
        it."""
        site, current, standing, committed = self.site, self.stepper.current, self.standing, self.standing.committed
        generation, begun = current.get(), not standing.promises.ends_before(committed + 1)
        generation.groups.reopen()
        # In an iteration that goes on where it stood, not all know the shapes of the transfers under way.
        drains = drains and committed + 1 not in generation.resumed
        self.stepper.current.kept.let_go()
        try:
            if drains and begun and standing.iteration == committed:  # others may have begun it: all end the same
                opened(site, self._adopt(committed + 1), committed + 1, standing.next_attempt)
            site.agent.event(RolledBack(committed, standing.roll_back()))
            site.phases.enter(Phase.RECOVERING, committed + 1)
            with site.phases.waiting(HANDLES):
                if not drains or (begun and not drain(current.get(), committed + 1)):
                    standing.renew()
                    recovery.renew(site, self.stepper)
            current.set(current.get().begun_anew())
            self.stepper.gather()
        except GenerationOver as error:
            self._recover(error)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A block whose errors are reported to the coordinator, which decides on them before the script gets them: the
        others know first."""
        try:
            yield
        except JobEnded:
            raise
        except (Exception, SystemExit) as error:
            cause = error.__cause__ if isinstance(error, RecoveryFailed) else None
            fault = self.site.phases.fault(error) if cause is None else self.site.phases.failed(cause)
            with self.site.phases.waiting("a decision"):
                kept = self.site.agent.raised(fault)
            if not kept:
                raise
            if isinstance(error, LendingError):
                get_logger().warning("megatron-recycle: layers are not lent any more, training goes on without: %s",
                                     error)
                raise _Kept(str(fault)) from None
            source = "a recovery" if fault.recovery else "the script"
            get_logger().error("megatron-recycle: %s has failed %s", source, fault.where, exc_info=error)
            raise _Kept(str(fault)) from None


@contextmanager
def _failing_alone() -> Iterator[None]:
    """A block of a recovery: an error in it is neither the script's nor another worker's. Refusals stay refusals."""
    try:
        yield
    except RecycleError:
        raise
    except Exception as error:
        raise RecoveryFailed(f"the recovery has failed: {error}") from error
