"""One worker of the job: the calls that a script makes.

Iterations, and how they go on after failures, are in :mod:`megatron_recycle.runtime.loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch
from torch import nn

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Agent
from megatron_recycle.errors import GenerationOver, JobEnded
from megatron_recycle.membership import THE_END, Process, Standing, StepMode
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Plan, Worker
from megatron_recycle.runtime import recovery, refusals
from megatron_recycle.runtime.activity import RECOVERY, STANDING_BY, Activity
from megatron_recycle.runtime.admit import compare_later
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.network import Network, TorchNetwork
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.comm.sharded_reduction import Cuts
from megatron_recycle.runtime.comm.user_collectives.calls import Call
from megatron_recycle.runtime.comm.user_collectives.exchange import Group
from megatron_recycle.runtime.compute.data import DataSource
from megatron_recycle.runtime.evaluation import LOSS_WIDTH, Evaluations
from megatron_recycle.runtime.evaluation_pass import evaluate
from megatron_recycle.runtime.iteration_history import History
from megatron_recycle.runtime.lent.layers import said
from megatron_recycle.runtime.lent.neighbourhood import Neighbourhood
from megatron_recycle.runtime.loop import Loop
from megatron_recycle.runtime.memory_budget import announce
from megatron_recycle.runtime.phases import Observer, Phases
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.saving import Tries, Write, save
from megatron_recycle.runtime.script_calls import share_registered
from megatron_recycle.runtime.script_collectives import Collectives
from megatron_recycle.runtime.script_transfers import Message, Transfers, raise_if_lost
from megatron_recycle.runtime.site import Asked, Framework, Meters, Site
from megatron_recycle.runtime.stepper import Stepper
from megatron_recycle.runtime.trainable import Trainable
from megatron_recycle.runtime.user_edits import UserEdits


class StageWorker:
    """Trains one stage of the model together with all other workers.

    Args:
        place, framework, agent, config: as in `Site`.
        observer: called at every phase; None: no observer.
        network: builds each generation's communicators; None: torch's.

    Attributes:
        site: the part that never changes.
        standing: where the worker stands.
        stepper: makes steps and commits.
    """

    def __init__(self, *, place: Place, framework: Framework, agent: Agent, config: RecycleConfig,
                 observer: Observer | None = None, network: Network | None = None) -> None:
        refusals.check(framework, place, config)
        me = Process(place.me, place.part if place.parts > 1 else None)
        self.standing = Standing(me, StepMode.of(config.step == "staggered"))
        phases = Phases(self.standing, agent, Activity(config.stall_floor), observer)
        stage = framework.stage
        self.site = Site(
            place=place, config=config, framework=framework, agent=agent, network=network or TorchNetwork(),
            phases=phases, trainable=Trainable(stage, _neighbours(framework, place, config)),
            meters=Meters(stage.device, config.mtbf),
            asked=Asked(Evaluations(self.standing, place.grid, stage.report_width or LOSS_WIDTH),
                        Collectives(place), Transfers(place), History()))
        self.stepper = Stepper(self.site, self.standing)
        self._between = UserEdits(self.site, self.stepper)
        self._loop = Loop(self.site, self.standing, self.stepper, self._between)
        agent.doing, agent.progress = phases.activity.told, phases.where  # last: the agent's thread calls them at once

    # ---- the script's calls

    def begin(self, iteration: int) -> None:
        """Join the job, if this worker has not done so yet. Raises JobEnded."""
        if self.standing.epoch.generation == 0:
            self.standing.stand_at(iteration)
            # A joiner reads data to compare it; the script still finds its random numbers as it left them.
            with self.site.phases.waiting(RECOVERY), self.site.framework.generators.kept(), self._loop.telling():
                generation = recovery.join(self.site, self.stepper)
            announce(self.site, generation)
            if self.site.config.lend == "auto" and self.site.place.me.pipeline == 0 and self.site.place.part == 0:
                for chunk, neighbours in self.site.trainable.neighbours.of.items():
                    get_logger().info("megatron-recycle: %s %d: %s", "chunk" if self.site.place.placement else "stage",
                                      chunk, said(neighbours.lending, self.site.config.lend_layers))

    def has_done(self, iteration: int) -> bool:
        """Whether the job had done ``iteration`` before this worker came in: `train` then does nothing."""
        return iteration <= self.standing.stepped

    def train(self, iteration: int) -> float:
        """Run ``iteration``, through any failures; returns the mean loss of its global batch.

        It is then committed, or closed at this worker's stage (see `settle`).

        Raises:
            JobEnded: training cannot go on.
            DataError: first and last stage read different data.
            UnsupportedError: the script has changed something that cannot be followed.
        """
        with self._inside():
            self.begin(iteration)
            self.standing.ask(iteration)
            if self.has_done(iteration):
                return self._pass_over(iteration)
            self._between.take_in(self.settle)
            with self.site.framework.registered.inside((iteration, 0)):
                self._loop.through_failures(lambda: self._loop.run_to(iteration))
            if self._between.trained():
                with self._loop.telling():
                    self._between.find_generators()
            self._between.leave()
            return self._loss_of(iteration)

    def evaluate(self, iteration: int, data: DataSource, number: int, limit: int | None = None) -> torch.Tensor:
        """Forwards of one global batch, through any failures, before ``iteration`` is trained.

        Args:
            iteration: the next one to be trained.
            data: micro-batches by place.
            number: of the global batch in ``data``, from 0.
            limit: number of micro-batches of each pipeline in ``data``; None: as many as are asked for.

        Returns:
            The last stage's reports of each micro-batch, (total, width), the same on all workers; `loss_report` if the
            stage has none. NaN if the data could not be read everywhere (`Shared`).

        Raises JobEnded if the job cannot go on.
        """
        def run() -> None:
            # Done already: learnt in a recovery, or done before this worker came in.
            while self._loop.stand_again() and self.standing.evaluated < self.standing.passes:
                share_registered(self.site, self.current_groups())
                evaluate(self.site, self.standing, self._loop.sized(self.site.place.grid), data, number, limit)

        with self._inside():
            self.begin(iteration)
            self.settle()
            self.standing.ask_pass(iteration)
            with self._between.evaluated(), self._inside_pass(iteration):
                self._loop.apart(run)
        return self.site.asked.evaluations.of(self.standing.passes)

    def save(self, iteration: int, write: Write, clear: Callable[[], None]) -> str | None:
        """Write a checkpoint together with all live workers, before ``iteration`` is trained, through any failures.
        Does nothing if that was done before this worker came in.

        Args:
            clear: removes the remains of a checkpoint that cannot be written.

        Returns:
            Why it could not be written, the same on all workers; None: it was written.

        Raises JobEnded if the job cannot go on, SaveError if a failed checkpoint ends it, and ``write``'s errors.
        """
        tries = Tries()

        def run() -> None:
            while self._loop.stand_again() and self.standing.evaluated < self.standing.passes:
                share_registered(self.site, self.current_groups())
                save(self.site, self.stepper, write, clear, tries)

        with self._inside():
            self.begin(iteration)
            self.settle()
            self.standing.ask_pass(iteration)
            with self._between.saved(), self._inside_pass(iteration):
                self._loop.apart(run)
        return self.site.asked.evaluations.failed.get(self.standing.passes)

    def give_up_checkpoint(self, iteration: int) -> None:
        """The checkpoint of the state after ``iteration``, which `save` has begun, will not be completed."""
        self.site.trainable.guard.unsave(iteration)

    def reshape(self, iteration: int, what: str) -> None:
        """From ``iteration`` on, the next to be trained, activations may have other shapes. All workers make this call,
        by the name ``what``, and wait for each other, through any failures. Raises JobEnded."""
        def run() -> None:
            while self._loop.stand_again() and self.standing.evaluated < self.standing.passes:
                with self.site.phases.waiting(f"{what} on all ranks"):
                    count(self.current_groups().control, True)
                self.standing.evaluate()

        with self._inside():
            self.begin(iteration)
            self.settle()
            self.standing.ask_pass(iteration)
            self.site.grids.reshape(iteration)
            self.site.meters.memory.measure_again()
            with self._between.saved(), self._inside_pass(iteration):
                self._loop.apart(run)

    def collective(self, group: Group, call: Call, after: int) -> None:
        """Make the script's ``call``, which follows iteration ``after``, through any failures.

        Raises:
            JobEnded: the job cannot go on.
            UnsupportedError: a member is gone, and no other can answer for it.
        """
        site, collectives = self.site, self.site.asked.collectives

        def run() -> None:
            self._loop.stand_again()
            site.phases.tell_resumed()  # after a failure: the next action may be far away
            entered = self.standing.joined_after
            if entered is not None and entered >= after:  # a part that was stranded: the others have made the call
                collectives.pass_over()
                return
            with site.phases.waiting(f"the script's {call.what}()"):
                collectives.attempt(self.current_groups(), lambda phase: site.phases.enter(phase, after))

        with self._inside():
            self.settle()
            collectives.begin(group, call, after)
            self._loop.apart(run)
        collectives.end()

    def recall(self, group: Group, call: Call, after: int) -> None:
        """As `collective`, for a ``call`` that the others made before this worker came in."""
        collectives = self.site.asked.collectives
        with self._inside():
            collectives.begin(group, call, after)
            collectives.pass_over()
        collectives.end()

    def collective_once(self, group: Group, call: Call) -> None:
        """Make a ``call`` that is given up with the generation. Raises GenerationOver, and UnsupportedError."""
        with self._inside(), self.site.phases.waiting(f"the script's {call.what}()"):
            self.site.asked.collectives.once(group, call, self.current_groups(), self.standing.epoch.generation)

    def transfer(self, group: Group, peer: int, tensor: torch.Tensor, tag: int, sends: bool, after: int) -> Message:
        """Begin to send ``tensor`` to position ``peer`` of ``group``, or to receive it from there; see `arrive`.
        Nothing is started if that was done before this worker came in. Raises JobEnded, and UnsupportedError if the
        peer is gone."""
        transfers = self.site.asked.transfers

        def run() -> None:
            self._loop.stand_again()
            transfers.post(message, self.current_groups(), self.standing.epoch)

        with self._inside():
            self.settle()
            message = transfers.begin(group, peer, tensor, tag, sends)
            entered = self.standing.joined_after
            if entered is not None and entered >= after:
                message.done = True
            else:
                self._loop.apart(run)
        raise_if_lost(message)
        return message

    def arrive(self, message: Message, once: bool = False) -> None:
        """Wait until ``message`` has been received, or sent, through any failures. Raises JobEnded, and
        UnsupportedError if it never will be. ``once``: not through failures; raises GenerationOver instead."""
        site = self.site

        def run() -> None:
            self._loop.stand_again()
            site.phases.tell_resumed()
            with site.phases.waiting(f"the script's {message.what}()"):
                site.asked.transfers.arrive(message, self.current_groups(), self.standing.epoch)

        if once and not message.done:
            self.site.asked.transfers.arrive(message, self.current_groups(), self.standing.epoch)
        elif not message.done:
            with self._inside():
                self._loop.apart(run)
        raise_if_lost(message)

    def transfer_once(self, group: Group, peer: int, tensor: torch.Tensor, tag: int, sends: bool) -> Message:
        """As `transfer`, for a message that is given up with the generation. Raises GenerationOver."""
        message = self.site.asked.transfers.begin(group, peer, tensor, tag, sends, self.standing.epoch)
        self.site.asked.transfers.post(message, self.current_groups(), self.standing.epoch)
        raise_if_lost(message)
        return message

    def settle(self) -> None:
        """Wait until the last iteration is committed on this worker."""
        last = self.standing.stepped
        if self.standing.committed < last:
            with self._inside(), self._between.apart(last):
                self._loop.through_failures(lambda: self._loop.run_to(last, commit=True))

    def fail(self, error: BaseException) -> None:
        """Report that the script has failed with ``error``, in its own code or in handling an error beyond repair.
        Returns once the outcome is decided: the others go on, or the job is over, perhaps after a last checkpoint."""
        with self.site.phases.waiting("a decision"):
            kept = self.site.agent.raised(self.site.phases.fault(error, outside=True))
        if kept:
            with suppress(JobEnded):
                self._loop.into_the_next()

    def finish(self) -> None:
        """Call when the script ends well; returns when the whole job has ended. Raises JobEnded if it failed."""
        self.settle()
        last = self.standing.stepped
        with self.site.phases.activity.during(STANDING_BY, THE_END):
            self._loop.through_failures(lambda: self._stand_by(last))
        self.close()

    def _stand_by(self, last: int) -> None:
        """Wait until all workers' scripts are done: another worker may fail before its last step. Raises
        GenerationOver then."""
        self._loop.run_to(last, commit=True)  # all may have gone back
        self.site.phases.tell_resumed()
        if not self.site.agent.finished():
            raise GenerationOver("another worker has failed while this one stood by")

    def close(self) -> None:
        """Leave the job, to which a failure of the script has been reported already.

        Waits for the threads that are inside the communication library: an interpreter that exits before they end
        aborts the process.
        """
        self.leave()
        self.site.network.close()

    def leave(self) -> None:
        """Stop all work for the job; threads may still be inside the communication library."""
        self.stepper.current.retire()
        self.stepper.current.let_go()
        self.stepper.close()
        self.site.agent.close()

    # ---- its state

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        last = self.stepper.current.last
        assert last is not None
        return last.plan

    @property
    def store_prefix(self) -> str:
        """Prefix of the process groups in torch's store, a new one after each roll-back."""
        return self.stepper.current.get().store_prefix

    @property
    def final(self) -> int:
        """The last iteration that no failure can cause to be repeated; -1 for none."""
        oldest = self.site.trainable.guard.oldest
        return self.standing.committed if oldest is None else min(oldest, self.standing.committed)

    @property
    def comes_in(self) -> bool:
        """Whether this worker has come into the running job, and not trained since."""
        return self.site.trainable.initial_state is not None

    def live(self) -> tuple[Worker, ...]:
        """The live workers, in the order of their ranks; between two generations, those of the last one."""
        last = self.stepper.current.last
        return () if last is None else last.groups.members

    @property
    def cuts(self) -> Cuts | None:
        """The shards of this stage's optimizer state and their holders; None if it is not cut."""
        return self.stepper.current.get().cuts

    def current_groups(self) -> Groups:
        """The groups of the generation in force."""
        return self.stepper.current.get().groups

    def interrupted(self) -> bool:
        """Whether a newer generation than the one in force has been announced, or the end of the job."""
        return self.site.interrupted(self.standing)

    @contextmanager
    def among_those_left(self) -> Iterator[None]:
        """A block for code of the script's framework. It finds its random numbers as the script has left them, and in
        torch only the live workers, in the order of their ranks. A collective over all of them ends with the
        generation."""
        with self.site.network.renumbered(self.current_groups().control), self.site.framework.generators.of_script():
            yield

    # ---- another thread's call

    def abort(self, generation: int) -> None:
        """Free the training thread from every wait of a generation older than ``generation``, and from a wait of the
        script in torch's own group of all ranks.

        Called by the agent's thread.
        """
        self.stepper.current.abort(generation, level=self.site.goes_on)
        if self.site.agent.breaks_off:
            self.site.network.abort_default()

    # ---- parts of these calls

    def _loss_of(self, iteration: int) -> float:
        """The loss of ``iteration``, which this worker has trained, or after which it has come in."""
        known = self.stepper.held or self.standing.verdict
        assert known is not None and known.iteration >= iteration
        return known.loss if known.iteration == iteration else self._pass_over(iteration)

    def _inside_pass(self, iteration: int) -> AbstractContextManager[None]:
        """A block in which the script is inside the call of its last pass, before ``iteration``."""
        return self.site.framework.registered.inside((iteration, self.standing.passes))

    def _pass_over(self, iteration: int) -> float:
        """The loss of an iteration that was over when this worker came in; its script gets the others' results."""
        loss, summary = self.stepper.told(iteration)
        self.site.stage.recall(summary)
        if iteration == self.standing.joined_after:
            compare_later(self.site, self.stepper)
        return loss

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """A block outside the script's own code: the script's random numbers stay as it left them."""
        with self.site.phases.working("begin"), self.site.framework.generators.kept():
            yield


def _neighbours(framework: Framework, place: Place, config: RecycleConfig) -> Neighbourhood:
    """Copies of other stages' layers on this worker: none yet."""
    def adopt(module: nn.Module) -> None:
        framework.splitter.adopt(module)
        framework.generators.adopt("a lent layer", module)

    lendings = {chunk: each.lending for chunk, each in zip(place.chunks, framework.stage.chunks, strict=True)}
    return Neighbourhood(lendings, place.stage_of, adopt, config.lend == "auto")
