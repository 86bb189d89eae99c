"""The work on micro-batches: what a worker's F, B, W and FB do, within one attempt at an iteration."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from megatron_recycle.membership import Standing
from megatron_recycle.plan import Action, Microbatch, Plan
from megatron_recycle.runtime.activity import WAITING, WORKING, Activity
from megatron_recycle.runtime.comm.activations import Message, Transport
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.losses import LossRelay
from megatron_recycle.runtime.compute.accumulate import Accumulators, Layout
from megatron_recycle.runtime.compute.data import DataSource, digest
from megatron_recycle.runtime.compute.memory import ActivationMemory
from megatron_recycle.runtime.compute.random_state import Generators, seed_of
from megatron_recycle.runtime.compute.split import Deferring, WeightQueue
from megatron_recycle.runtime.compute.stopwatch import Stopwatch
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.stage import Forward, Stage


@dataclass
class Attempt:
    """Everything of one attempt at an iteration that is thrown away if the attempt is."""

    sums: Accumulators
    relay: LossRelay
    forwards: dict[Microbatch, Forward] = field(default_factory=dict)
    queues: dict[Microbatch, WeightQueue] = field(default_factory=dict)
    losses: dict[Microbatch, torch.Tensor] = field(default_factory=dict)
    digests: dict[Microbatch, int] = field(default_factory=dict)
    reports: dict[Microbatch, tuple[float, ...]] = field(default_factory=dict)


class Actions:
    """Runs the F, B, W and FB of one worker.

    Args:
        place: position and grid.
        stage: the framework's side.
        splitter: defers weight gradients of the stage's linear layers.
        data: micro-batches by place.
        layout: of the flat gradient.
        generators: what the user's code may draw random numbers from.
        seed: of the job.
        standing: says which iteration is under way.
        activity, watch, memory: told of what goes on, how long it takes, and what is held.
        exact: whether gradients have to have the same bits whoever computes them.

    Attributes:
        layout: as given; another when other parameters are trained.
        may_be_full: whether the plan may have full backwards (FB) here. They are faster where splitting costs something
            and autograd can add to the sums itself; but their gradients may differ in the last bit from a B's and a
            W's, so never where bits have to be the same whoever computes them.
        full: the forwards and backwards of those micro-batches whose backward the plan has in full.
    """

    def __init__(self, *, place: Place, stage: Stage, splitter: Deferring, data: DataSource, layout: Layout,
                 generators: Generators, seed: int, standing: Standing, activity: Activity, watch: Stopwatch,
                 memory: ActivationMemory, exact: bool) -> None:
        self._place = place
        self._stage = stage
        self._splitter = splitter
        self._data = data
        self.layout = layout
        self._generators = generators
        self._seed = seed
        self._standing = standing
        self._activity = activity
        self._watch = watch
        self._memory = memory
        self._handlers = {"F": self._forward, "B": self._backward, "W": self._weight, "FB": self._full_backward}
        self._attempt: Attempt | None = None
        self._relay_before: LossRelay | None = None
        self._forwards = 0
        self.running: Action | None = None
        """What is being done; stays where that has raised, until the attempt is forgotten."""
        self._split = True
        self.may_be_full = not exact and splitter.deferring_costs and layout.sums_in_place
        self.full: frozenset[Action] = frozenset()
        self._groups: Groups
        self._transport: Transport

    def use(self, plan: Plan, groups: Groups, transport: Transport) -> None:
        """Follow ``plan`` on these handles from the next attempt on."""
        actions = plan.actions(self._place.me)
        self._groups, self._transport = groups, transport
        self._forwards = sum(action.kind == "F" for action in actions)
        self._split = plan.problem.split_backward
        backwards = frozenset(action for action in actions if action.kind == "FB")
        if backwards and not self.may_be_full:
            raise AssertionError(f"{self._place.me} runs B and W apart, the plan has {min(backwards)}")
        self.full = backwards | {action._replace(kind="F") for action in backwards}

    def begin(self, sums: Accumulators, relay: LossRelay) -> None:
        """A new attempt, whose gradients go to ``sums`` and whose losses to ``relay``."""
        # An idle worker may be an iteration late: a loss that is let go of before it has been read is lost.
        self._relay_before = self._attempt.relay if self._attempt is not None else None
        self._attempt = Attempt(sums, relay)
        self.running = None
        self._share_losses_if_complete()

    def run(self, action: Action) -> None:
        """One F, B, W or FB. Raises GenerationOver."""
        self.running = action
        self._handlers[action.kind](action)
        self.running = None

    def forget(self) -> None:
        """The attempt is given up."""
        self._attempt = self.running = None

    @property
    def now(self) -> Attempt:
        """The attempt under way."""
        assert self._attempt is not None
        return self._attempt

    def _forward(self, action: Action) -> None:
        _, pipeline, microbatch = action
        place, iteration = self._place, self._standing.iteration
        batch, inputs = None, None
        if place.first or place.last:
            with self._activity.during(WORKING, "data"):
                batch = self._data.batch(pipeline, iteration * place.grid.microbatches[pipeline] + microbatch)
            if batch is not None:
                self.now.digests[pipeline, microbatch] = digest(batch)
        if not place.first:
            inputs = tuple(tensor.requires_grad_(tensor.is_floating_point())
                           for tensor in self._receive(("F", pipeline, microbatch)))
        layers = self._splitter.whole() if action in self.full else nullcontext()
        self._generators.seed(seed_of(self._seed, iteration, pipeline, microbatch, place.me.stage))
        with (self._groups.together(), layers, self._watch.measure("F"),
              self._memory.forward((pipeline, microbatch), inputs)):
            forward = self._stage.forward(inputs, batch)
        if forward.loss is not None:
            self.now.losses[pipeline, microbatch] = forward.loss.detach()
            self.now.reports[pipeline, microbatch] = forward.report
        if not place.last:
            self._transport.send(("F", pipeline, microbatch), forward.outputs)
        self.now.forwards[pipeline, microbatch] = replace(forward, outputs=())  # sent: not to be kept until B
        self._share_losses_if_complete()

    def _receive(self, message: Message) -> list[torch.Tensor]:
        """The tensors of ``message``, waiting for them if need be. Raises GenerationOver."""
        kind, pipeline, microbatch = message
        with self._activity.during(WAITING, f"{kind}{pipeline}.{microbatch}"):
            return self._transport.receive(message)

    def _backward(self, action: Action) -> None:
        _, pipeline, microbatch = action
        forward, gradients = self._begin_backward(pipeline, microbatch)
        queue = WeightQueue()
        with (self._splitter.into(queue if self._split else None, forward.roots), self._groups.together(),
              self._watch.measure("B")):
            for_inputs = self._stage.backward(forward, gradients)
        self._end_backward(pipeline, microbatch, for_inputs, queue)
        self.now.queues[pipeline, microbatch] = queue

    def _full_backward(self, action: Action) -> None:
        _, pipeline, microbatch = action
        forward, gradients = self._begin_backward(pipeline, microbatch)
        # Layers that it runs again, after a checkpoint, have to be those that F ran.
        with self._splitter.whole(), self._groups.together(), self.now.sums.lent(pipeline, microbatch):
            for_inputs = self._stage.backward(forward, gradients)
        self._end_backward(pipeline, microbatch, for_inputs, WeightQueue())
        self._memory.weight((pipeline, microbatch))

    def _begin_backward(self, pipeline: int, microbatch: int) -> tuple[Forward, list[torch.Tensor]]:
        forward = self.now.forwards.pop((pipeline, microbatch))
        gradients = [] if self._place.last else self._receive(("B", pipeline, microbatch))
        self._memory.begin_backward((pipeline, microbatch), gradients)
        place = (self._standing.iteration, pipeline, microbatch, self._place.me.stage)
        # Checkpoints put torch's generators back to what their forward met. Nobody does so for the others: they begin
        # where their forward began, so that at least a single checkpoint draws the same numbers again.
        self._generators.seed(seed_of(self._seed, *place), first=seed_of(self._seed, *place, "backward"))
        return forward, gradients

    def _end_backward(self, pipeline: int, microbatch: int, for_inputs: list[torch.Tensor], queue: WeightQueue) -> None:
        if not self._place.first:
            self._transport.send(("B", pipeline, microbatch), for_inputs)
        self._harvest(pipeline, microbatch, queue)
        self._memory.end_backward((pipeline, microbatch), queue)

    def _harvest(self, pipeline: int, microbatch: int, queue: WeightQueue) -> None:
        """Take the gradients that a backward formed off the parameters; those that W adds to wait in ``queue``."""
        later = queue.identities()
        now = []
        for parameter in self.layout.parameters:
            if parameter.grad is None:
                continue
            if id(parameter) in later:
                queue.formed.append((parameter, parameter.grad))
            else:
                now.append((parameter, parameter.grad))
            parameter.grad = None
        self.now.sums.add(pipeline, microbatch, now)

    def _weight(self, action: Action) -> None:
        _, pipeline, microbatch = action
        queue = self.now.queues.pop((pipeline, microbatch))
        with torch.no_grad(), self._watch.measure("W"):
            self.now.sums.add(pipeline, microbatch, queue.contributions())
        self._memory.weight((pipeline, microbatch))

    def _share_losses_if_complete(self) -> None:
        """At the last stage, once its last forward has run: tell everybody the loss."""
        if self._place.last and len(self.now.losses) == self._forwards:
            self.now.relay.add(self.now.losses, self.now.reports)
