"""One attempt at an iteration: a worker's actions, in order.

Results are discarded with the attempt, unless it is resumable, but for the complete gradient, which the stepper keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType

import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Action, Message, Worker, is_read, results_in
from megatron_recycle.policy import POLICIES
from megatron_recycle.runtime.actions import execute
from megatron_recycle.runtime.activity import REDUCE
from megatron_recycle.runtime.comm.acknowledgements import Acknowledgements
from megatron_recycle.runtime.comm.levelling import Levelling
from megatron_recycle.runtime.comm.losses import LossRelay
from megatron_recycle.runtime.comm.partial_gradients import fold_parts
from megatron_recycle.runtime.comm.reduction import ChunkedReduction, per_token
from megatron_recycle.runtime.comm.sharded_reduction import ShardedReduction
from megatron_recycle.runtime.comm.trained_alike import Agreement
from megatron_recycle.runtime.commit import Held
from megatron_recycle.runtime.compute.accumulate import Accumulators, Copies
from megatron_recycle.runtime.compute.data import Batch, digest, read_everywhere
from megatron_recycle.runtime.compute.device import Logged
from megatron_recycle.runtime.compute.random_state import seed_of
from megatron_recycle.runtime.compute.split import WeightQueue
from megatron_recycle.runtime.computed import Computed
from megatron_recycle.runtime.first_forward import first_forward
from megatron_recycle.runtime.generation import Exchanges, Generation, Program
from megatron_recycle.runtime.lent.loans import Loans, acceptable
from megatron_recycle.runtime.lent.terms import Span
from megatron_recycle.runtime.phases import OF_ACTION
from megatron_recycle.runtime.resumable_attempt import AttemptLog, ResumableAttempt
from megatron_recycle.runtime.shards import norms
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stage import Forward
from megatron_recycle.runtime.stepper import Stepper, only_failures


def opened(site: Site, generation: Generation, iteration: int, attempt: int) -> Exchanges:
    """Begin an attempt's exchanges with other workers: receives are posted, and comparisons and sums beside gradients
    are under way. Raises GenerationOver."""
    groups, transport = generation.groups, generation.transport
    program = generation.program_of(iteration)
    transport.follow(program.plan)
    if site.grids.reshapes(iteration):
        transport.forget_shapes()
    agreement = Agreement(site.trainable.trained, groups)
    carried = generation.scope.carried_in(iteration)
    losses = LossRelay(groups, site.grids.of(iteration), site.stage.report_width, generation.reduction_of(iteration),
                       iteration, attempt, generation.left_out_of(iteration), site.place.loss_stage,
                       known=None if carried is None else carried.loss)
    closes = may_close(site, generation, iteration)
    acknowledgements = Acknowledgements(groups, program.readers if closes else (), program.last_reads if closes else {},
                                        iteration, attempt, site.tied)
    loans = Loans(program.terms, groups, site.trainable.neighbours)
    if len(generation.shared) > 1:  # messages of the last attempt but one have been read
        generation.shared[0].loans.let_go()
    found = Exchanges(agreement, losses, loans, acknowledgements)
    generation.shared.append(found)
    with site.phases.waiting("the last messages"):
        transport.begin((iteration, attempt))
    loans.begin()
    return found


def may_close(site: Site, generation: Generation, iteration: int) -> bool:
    """Whether stages find out when they are closed for ``iteration``; the same on all workers.

    The rest of an iteration with left out micro-batches cannot be planned: after a failure it would begin anew.
    With lent layers a stage would need parameters of another stage that has stepped.
    """
    program = generation.program_of(iteration)
    closes = site.closes and generation.scope.closes
    return closes and not program.terms.crossings and _may_keep(site, generation, program, iteration)


def _may_keep(site: Site, generation: Generation, program: Program, iteration: int) -> bool:
    """Whether an attempt with this program is kept when it is given up, to go on after a failure."""
    plain = not generation.scope.poisoned(iteration)
    if POLICIES[site.config.policy].in_flight == "whole":
        # There no worker runs another pipeline's micro-batches.
        return plain and program.of_one_pipeline and not program.terms.crossings
    return plain and site.keeps_messages


class Attempt:
    """An attempt at the iteration after the last one stepped. A context manager: its exit keeps the results of a
    resumable attempt and discards all others; after an error, it drops the gradients on the parameters too.

    Args:
        site: the worker's surroundings.
        stepper: makes the step.
        generation: in force.

    Attributes:
        computed: its results so far.
    """

    def __init__(self, site: Site, stepper: Stepper, generation: Generation) -> None:
        self._site, self._stepper, self._generation = site, stepper, generation
        standing, iteration = stepper.standing, stepper.standing.stepped + 1
        program = self._program = generation.program_of(iteration)
        self._reduction = generation.reduction_of(iteration)
        backwards = [action for action in program.full if action.kind == "FB"]
        if backwards and not site.may_be_full:
            raise AssertionError(f"{site.place.me} runs B and W apart, the plan has {min(backwards)}")
        standing.begin(iteration)
        self._iteration = iteration
        self._shared = opened(site, generation, iteration, standing.attempt)
        carried, kept = generation.scope.carried_in(iteration), stepper.current.kept.get(iteration)
        counted = program.actions[:program.plan.done.get(site.place.me, 0)]
        if kept is not None and site.place.parts > 1:
            kept = stepper.current.kept[iteration] = kept.levelled(counted, site.place, site.meters.memory)
        if counted != (() if kept is None else kept.done):
            raise AssertionError(f"{site.place.me} goes on after {counted}, and has kept {kept}")
        self._keeping = AttemptLog(standing.attempt if carried is None else carried.chain,
                                   _may_keep(site, generation, program, iteration), site.meters.device)
        if kept is None:
            site.meters.memory.begin()
            self.computed = Computed(self._room())
        else:
            self._take_up(kept)
        self._share_losses_if_complete()
        stepper.current.kept.pop(iteration, None)  # this attempt owns it now
        if self._levelling is not None:
            self._levelling.begin(iteration, standing.attempt, len(standing.done))

    @property
    def _levelling(self) -> Levelling | None:
        """The levelling of this worker's parts."""
        return self._generation.groups.levelling

    def _room(self) -> Accumulators:
        """The accumulators for gradients."""
        reduction, layout = self._reduction, self._site.trainable.layout
        chunks, block = self._site.place.chunks, self._program.plan.problem.block
        apart = reduction.apart if isinstance(reduction, ShardedReduction) else reduction
        if isinstance(apart, ChunkedReduction):
            modules = [chunk.module for chunk in self._site.stage.chunks]
            return apart.sums(layout, modules, lambda chunk, own, place: (
                self._shared.loans.sums(chunks[chunk:chunk + 1], own, place, block)))
        return self._shared.loans.sums(chunks, layout, reduction.place, block)

    def _take_up(self, kept: ResumableAttempt) -> None:
        """Resume an earlier attempt. Messages that a remaining action reads are sent again. Raises GenerationOver: the
        kept attempt can be taken up once more."""
        if not kept.computed.under_way:  # the next iteration may have been under way, which begins anew
            self._site.meters.memory.give_up()
        self._stepper.standing.take_up(kept.done)
        self.computed = kept.computed
        self.computed.sums.regroup(self._room())
        self._keeping.log.update(kept.log)
        self._generation.transport.know(kept.metas)
        for action in kept.done:
            result = results_in(self._program.plan, self._site.place.me, action)
            if result is not None:
                self._deliver(*result, kept.log[action])

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._site.trainable.neighbours.end()
        if kind is not None:
            self._stepper.standing.give_up()
            self._site.trainable.drop_gradients()
        keeping, standing = self._keeping, self._stepper.standing
        given_up = standing.committed < self._iteration and (kind is None or isinstance(error, GenerationOver))
        if self._levelling is not None:
            self._levelling.stand()
        if keeping.wanted and not keeping.torn and given_up:
            problem = self._program.plan.problem
            kept = ResumableAttempt(self._iteration, keeping.chain, tuple(standing.done), self.computed, keeping.log,
                        self._generation.transport.metas, max(problem.grid.microbatches), problem.block,
                        self._program.plan.digest if self._program.terms.crossings else "")
            if keeping.used is not None:  # an unfinished backward has used up its forward
                kept = kept.levelled(tuple(action for action in kept.done if action != keeping.used), self._site.place,
                                     self._site.meters.memory)
            self._stepper.current.kept[self._iteration] = kept
        else:
            self.computed.discard()
        self._stepper.current.kept.torn = keeping.torn

    def run(self) -> None:
        """Run all actions. Raises GenerationOver, WrongGuess, DataError, and user code's errors."""
        self._stepper.begin()
        handlers = {**dict.fromkeys(self._COMPUTES, self._micro_batch), "S": self._reduce_and_step}
        rest = self._program.actions[len(self._stepper.standing.done):]
        execute(self._site, self._stepper.standing, rest, handlers, self._enter, f"iteration {self._iteration}")

    def close(self) -> None:
        """Wait until the stage is closed for the iteration, if it `may_close`. Raises FailureMet."""
        if may_close(self._site, self._generation, self._iteration):
            with self._site.phases.waiting("the readers of its messages"), only_failures():
                self._shared.acknowledgements.close()
            self._stepper.standing.close()

    def _enter(self, action: Action) -> None:
        # Full backwards, and their forwards, take other times than split ones, and are compiled apart.
        phase = OF_ACTION[action.kind]
        work = f"full {phase.value}" if action in self._program.full else None
        self._site.phases.enter(phase, self._iteration, action, work)

    # ---- micro-batches

    def _micro_batch(self, action: Action) -> None:
        """One F, B, W or FB."""
        self.do(action)
        self._stepper.standing.did(action)
        if self._levelling is not None:
            self._levelling.did()
        self._keeping.done()
        self._shared.acknowledgements.did(action)
        self._generation.transport.post()
        self._shared.losses.poll()
        self._stepper.poll()

    def do(self, action: Action) -> None:
        """The computation of one F, B, W or FB. Raises GenerationOver."""
        # What is kept has been computed from whole inputs only (`_receive`, `_together`): an abort spoils none of it.
        counting = nullcontext() if self._keeping.wanted else self._generation.groups.counting(action)
        with self._site.phases.doing(action), counting:
            self._COMPUTES[action.kind](self, action)
            self._site.meters.pace.keep()

    def _forward(self, action: Action) -> None:
        _, pipeline, microbatch, chunk = action
        site, place = self._site, self._site.place
        first, last, batch = place.first(chunk), place.last(chunk), None
        if first or last or read_everywhere(site.framework.data):
            # The worker's first part may read for all parts.
            with self._site.phases.working("data"), self._generation.groups.together():
                batch = site.framework.data.batch(pipeline, site.grids.number(self._iteration, microbatch))
        inputs = None
        if not first:
            inputs = tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in self._read(action))
        self._arrive(action)
        self._stepper.enter_action()
        run = partial(self._run, action)
        unchecked = chunk in site.unchecked
        forward = (first_forward(site, self._generation.groups, chunk, run, inputs, batch) if unchecked
                   else run(inputs, batch))
        self._pass_on(action, forward.outputs)
        self._keeping.torn = True
        if batch is not None:  # not before: an action not yet run may go to another worker after a failure
            number = digest(batch)
            self.computed.digests.update({(pipeline, microbatch, end): number
                                          for end, present in ((False, first), (True, last)) if present})
        self.computed.add(action, forward)
        with self._keeping.telling():
            self._share_losses_if_complete()

    def _run(self, action: Action, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None,
             metered: bool = True) -> Forward:
        """The forward of ``action``, with the random numbers of its place. Raises GenerationOver, and user code's
        errors."""
        site, place, (_, pipeline, microbatch, chunk) = self._site, self._site.place, action
        layers = site.framework.splitter.whole() if action in self._program.full else nullcontext()
        measured = self._measured(action) if metered else nullcontext()
        held = site.meters.memory.forward(action[1:], inputs) if metered else nullcontext()
        site.framework.generators.seed(
            seed_of(site.config.seed, self._iteration, pipeline, microbatch, place.chunks[chunk]))
        with (self._together(), layers, site.stage.running_chunk(chunk),
              self._running(action), measured, held):
            return site.stage.forward(inputs, batch)

    def _arrive(self, action: Action) -> None:
        """Wait for the lent layers of ``action``, on their first use. Raises GenerationOver, UnsupportedError."""
        chunk, span = self._span(action)
        if any(span.borrowed):
            with self._site.phases.waiting("lent layers"):
                self._shared.loans.arrive(chunk, span)

    def _span(self, action: Action) -> tuple[int, Span]:
        """The model's chunk that ``action`` belongs to, and the layers that run here for it."""
        chunk = self._site.place.chunks[action.chunk]
        return chunk, self._shared.loans.span(chunk, (action.pipeline, action.microbatch))

    def _together(self) -> AbstractContextManager[None]:
        """A block in which this worker's parts compute together. If its results may be kept after a failure, the device
        has them then: on a GPU an abort ends collectives under way as if they had succeeded. Raises GenerationOver."""
        return self._generation.groups.together(self._site.meters.pace.catch_up if self._keeping.wanted else None)

    def _running(self, action: Action) -> AbstractContextManager[None]:
        """A block in which the stage runs exactly the layers of ``action`` that are due here. Raises GenerationOver,
        UnsupportedError."""
        site, (_, pipeline, microbatch, _) = self._site, action
        chunk, span = self._span(action)
        at = (site.config.seed, self._iteration, pipeline, microbatch, "layer")
        return self._shared.loans.running(
            chunk, span, lambda layer: site.framework.generators.seed(seed_of(*at, layer)))

    def _read(self, action: Action) -> list[torch.Tensor]:
        """The input of ``action``, from another worker or from another chunk of this one. Raises GenerationOver."""
        message = Message("F" if action.kind == "F" else "B", *action[1:])
        handed = self.computed.handed.pop(message, None)
        return self._receive(message) if handed is None else handed

    def _pass_on(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Send the result of ``action`` to its reader, if there is one."""
        result = results_in(self._program.plan, self._site.place.me, action)
        if result is not None:
            self._keeping.made(action, tensors)
            with self._keeping.telling():
                self._deliver(*result, Logged(tensors))

    def _deliver(self, to: Worker, message: Message, made: Logged) -> None:
        """Send ``message`` to the worker that reads it, unless that was done before a failure. Raises
        GenerationOver."""
        transport, me = self._generation.transport, self._site.place.me
        if is_read(self._program.plan, to, message):
            if to != me:
                transport.note(to, message, made.tensors)
        elif to == me:
            self.computed.hand(message, made.back())
        else:
            transport.send(message, made.back())

    def _measured(self, action: Action) -> AbstractContextManager[None]:
        """A block that is timed as ``action``. The time is scaled to the stage's own layers: lent layers are no reason
        to plan for a slower stage, or a faster one."""
        plan, me = self._program.plan, self._site.place.me
        whole = plan.problem.duration(action.kind, me, action.chunk) if plan.crossings else 0
        share = plan.duration(me, action) / whole if whole else 1.0
        return self._site.meters.watch.measure(action.kind, share or 1.0, action.chunk)

    def _receive(self, message: Message) -> list[torch.Tensor]:
        """The tensors of ``message``, waiting for them if need be. Raises GenerationOver."""
        counting = self._generation.groups.counting(message) if self._keeping.wanted else nullcontext()
        with self._site.phases.waiting(str(message)), counting:
            return self._generation.transport.receive(message)

    def _backward(self, action: Action) -> None:
        site = self._site
        forward, gradients = self._begin_backward(action)
        queue = WeightQueue()
        later = queue if self._program.plan.problem.split_backward else None
        with (site.framework.splitter.into(later, forward.roots), self._together(),
              site.stage.running_chunk(action.chunk), self._running(action),
              self._measured(action)):
            for_inputs = site.stage.backward(forward, gradients)
        self._keeping.torn = True
        self._end_backward(action, for_inputs, queue)
        self.computed.queues[action[1:]] = queue

    def _full_backward(self, action: Action) -> None:
        _, pipeline, microbatch, _ = action
        site = self._site
        forward, gradients = self._begin_backward(action)
        self._keeping.torn = True
        # Layers recomputed by activation checkpointing have to be those that F ran.
        with (site.framework.splitter.whole(), self._together(),
              site.stage.running_chunk(action.chunk), self._running(action),
              self.computed.sums.of(action.chunk).lent(pipeline, microbatch)):
            for_inputs = site.stage.backward(forward, gradients)
        self._end_backward(action, for_inputs, WeightQueue())
        site.meters.memory.weight(action[1:])

    def _begin_backward(self, action: Action) -> tuple[Forward, list[torch.Tensor]]:
        place, seed = self._site.place, self._site.config.seed
        gradients = [] if place.last(action.chunk) else self._read(action)
        self._stepper.enter_action()
        self._keeping.used = action._replace(kind="F")
        forward = self.computed.forwards.pop(action[1:])
        self._site.meters.memory.begin_backward(action[1:], gradients)
        at = (self._iteration, action.pipeline, action.microbatch, place.chunks[action.chunk])
        # Activation checkpoints restore torch's generators to their forward's state, but no other generators. Those
        # begin where their forward began, so that at least a single checkpoint draws the same numbers again.
        self._site.framework.generators.seed(seed_of(seed, *at), first=seed_of(seed, *at, "backward"))
        return forward, gradients

    def _end_backward(self, action: Action, for_inputs: list[torch.Tensor], queue: WeightQueue) -> None:
        self._pass_on(action, for_inputs)
        self.computed.harvest(action, queue)
        self._site.meters.memory.end_backward(action[1:], queue)

    def _weight(self, action: Action) -> None:
        self._stepper.enter_action()
        with torch.no_grad(), self._measured(action):
            if self._keeping.wanted:  # nothing is added up before all inputs are here
                queue = self.computed.queues[action[1:]]
                with self._together():
                    whole = queue.gathered()
                self.computed.queues[action[1:]] = whole
                self._site.meters.memory.gather(queue, whole)
            self._keeping.torn = True
            with self._generation.groups.together():
                self.computed.weigh(action)
        self._site.meters.memory.weight(action[1:])

    # Of the class: an object that kept its own methods would live until the next garbage collection, with all it holds.
    _COMPUTES: Mapping[str, Callable[[Attempt, Action], None]] = {
        "F": _forward, "B": _backward, "W": _weight, "FB": _full_backward}

    def _share_losses_if_complete(self) -> None:
        """On the loss stage: announce the loss to all workers, once the last forward that contributes has run."""
        place, complete = self._site.place, len(self.computed.losses) == self._program.of_loss
        if place.me.stage == place.loss_stage and complete and not self._shared.losses.added:
            self._shared.losses.add(self.computed.losses, self.computed.reports)

    # ---- reduce, commit, step

    def _reduce_and_step(self, action: Action) -> None:
        site, stage, iteration = self._site, self._site.stage, self._iteration
        groups, standing = self._generation.groups, self._stepper.standing
        self._stepper.wait()
        standing.check_complete(self._program.actions)
        with (torch.no_grad(), site.phases.waiting(REDUCE), site.meters.watch.measure("reduce"),
              groups.counting("the reduced gradient")):
            self._shared.agreement.check(iteration)
            sums = self._shared.loans.collect(self.computed.sums)
            copied = self._keeping.wanted and not self._reduction.keeps_sums and sums is self.computed.sums
            gradient = self._reduction.gradient(Copies(sums) if copied else sums, groups, stage.ties)
            fold_parts(getattr(stage, "partial", ()), site.trainable.layout, gradient, groups, self._generation.cuts)
            site.meters.pace.catch_up()  # the gradient is held once it is computed, not once it is launched
        with site.phases.waiting("the loss"):
            loss, weight = self._shared.losses.wait()
        if stage.averaging == "tokens":
            per_token(gradient, weight)
        elif self._generation.scope.without:
            gradient.mul_(self._generation.share)
        with site.phases.waiting("gradient norms"):
            squares, zeros = norms(stage, self._generation.cuts, groups, site.trainable.layout, gradient)
        held = Held(iteration, gradient, squares, loss, weight, self.computed.digests, self._shared.losses.reports,
                    zeros)
        offer = standing.promises.new(site.agent.offer)
        offer = acceptable(offer, site.trainable.neighbours, site.agent, site.place.me)
        promised = standing.promises.promise(iteration, offer)
        self._stepper.hold(held, groups, promised, self._program.number)
