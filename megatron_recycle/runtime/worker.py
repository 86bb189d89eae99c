"""One worker of the job: runs its part of every iteration, and goes on after failures.

:class:`StageWorker` ties the pieces together and holds the state that they share; each piece knows only
its own business. The steps of a recovery are in :mod:`megatron_recycle.runtime.recovery`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import TransportAborted
from megatron_recycle.membership import Agent, Offer
from megatron_recycle.plan import Action, Plan, Worker, channels, pieces
from megatron_recycle.runtime.accumulate import Accumulators, Layout
from megatron_recycle.runtime.commit import Held, Verdict, commit, share_digests, share_reports
from megatron_recycle.runtime.data import DataSource, digest
from megatron_recycle.runtime.groups import Groups
from megatron_recycle.runtime.interpreter import Observer, execute
from megatron_recycle.runtime.ledger import Ledger
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.random_state import seed_of, seeded
from megatron_recycle.runtime.recovery import finish, join, recover
from megatron_recycle.runtime.reduce import ExactReduction, FastReduction, Reduction
from megatron_recycle.runtime.split import Deferring, WeightQueue
from megatron_recycle.runtime.stage import Forward, Stage
from megatron_recycle.runtime.tied import fold_ties
from megatron_recycle.runtime.transport import Transport


@dataclass
class Attempt:
    """Everything of one attempt at an iteration that is thrown away if the attempt is."""

    sums: Accumulators
    forwards: dict[tuple[int, int], Forward] = field(default_factory=dict)
    queues: dict[tuple[int, int], WeightQueue] = field(default_factory=dict)
    losses: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    digests: dict[tuple[int, int], int] = field(default_factory=dict)
    reports: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)


class StageWorker:
    """Trains one stage of the model together with all other workers.

    Args:
        place: position, grid, ranks.
        stage: the framework's side.
        splitter: defers weight gradients of the stage's linear layers.
        data: micro-batches by place.
        agent: this process's link to the coordinator, started.
        config: settings.
        observer: told of every phase; None for nobody.
    """

    def __init__(self, *, place: Place, stage: Stage, splitter: Deferring, data: DataSource, agent: Agent,
                 config: RecycleConfig, observer: Observer | None = None) -> None:
        self.place = place
        self.stage = stage
        self.agent = agent
        self.config = config
        self.ledger = Ledger()
        self.generation = 0
        self.groups: Groups | None = None
        self.held: Held | None = None
        self.verdict: Verdict | None = None
        self.reports: torch.Tensor | None = None
        """Of the last step: what the last stage reports of each micro-batch, (total, width)."""
        self.next_attempt = 1
        self._splitter = splitter
        self._data = data
        self._observer = observer
        self._layout = Layout(stage.parameters, stage.gradient_dtype)
        self._lock = threading.Lock()
        self._announce_resumed = False
        self._handlers = {"F": self._forward, "B": self._backward, "W": self._weight, "S": self._reduce_and_step}
        self._plan: Plan
        self._transport: Transport
        self._reduction: Reduction
        self._attempt: Attempt | None = None

    # ---- training

    def train(self, iteration: int) -> Verdict:
        """Run ``iteration`` to its commit, through any failures; returns what is known of it.

        Raises:
            JobEnded: training cannot go on.
            DataError: first and last stage read different data.
        """
        if self.generation == 0:
            self.ledger = Ledger(iteration, 0, iteration - 1, iteration - 1)
            join(self)
        while self.ledger.stepped < iteration:
            try:
                self._try(iteration)
            except TransportAborted as error:
                recover(self, error)
        assert self.verdict is not None and self.verdict.iteration == iteration
        return self.verdict

    def finish(self) -> None:
        """Call when the script ends well; returns when the whole job has. Raises JobEnded if it failed."""
        finish(self)
        self.uninstall()
        self.agent.close()

    def _try(self, iteration: int) -> None:
        self.ledger.begin(iteration, self.next_attempt)
        self.next_attempt = 1
        self._attempt = Attempt(Accumulators(self._layout, self._reduction.place))
        self._transport.begin()
        execute(self._plan.actions(self.place.me), self._handlers, iteration=iteration, observe=self.observe,
                interrupted=self.interrupted)

    def interrupted(self) -> bool:
        """Whether a newer generation than the one in force has been announced."""
        return self.agent.stop_generation > self.generation

    def observe(self, phase: str, iteration: int, action: Action | None = None) -> None:
        self.agent.progress = {"iteration": iteration, "attempt": self.ledger.attempt, "phase": phase,
                               "action": str(action) if action else None}
        if self._announce_resumed and action is not None:
            self._announce_resumed = False
            self.agent.resumed(self.generation)
        if self._observer is not None:
            self._observer.on(phase, iteration, action)

    def live(self) -> tuple[Worker, ...]:
        """The live workers, in the order of their ranks."""
        return self._groups().members

    # ---- actions

    def _forward(self, action: Action) -> None:
        _, pipeline, microbatch = action
        me, iteration = self.place.me, self.ledger.iteration
        batch, inputs = None, None
        if self.place.first or self.place.last:
            batch = self._data.batch(pipeline, iteration * self.place.grid.microbatches[pipeline] + microbatch)
            self._now.digests[pipeline, microbatch] = digest(batch)
        if not self.place.first:
            inputs = tuple(tensor.requires_grad_(tensor.is_floating_point())
                           for tensor in self._transport.receive(("F", pipeline, microbatch)))
        with seeded(seed_of(self.config.seed, iteration, pipeline, microbatch, me.stage), self.stage.device):
            forward = self.stage.forward(inputs, batch)
        if forward.loss is not None:
            self._now.losses[pipeline, microbatch] = forward.loss.detach()
            self._now.reports[pipeline, microbatch] = forward.report
        if not self.place.last:
            self._transport.send(("F", pipeline, microbatch), forward.outputs)
        self._now.forwards[pipeline, microbatch] = replace(forward, outputs=())  # sent: not to be kept until B
        self._done(action)

    def _backward(self, action: Action) -> None:
        _, pipeline, microbatch = action
        forward = self._now.forwards.pop((pipeline, microbatch))
        gradients = [] if self.place.last else self._transport.receive(("B", pipeline, microbatch))
        queue = WeightQueue()
        with self._splitter.into(queue if self._plan.problem.split_backward else None):
            for_inputs = self.stage.backward(forward, gradients)
        if not self.place.first:
            self._transport.send(("B", pipeline, microbatch), for_inputs)
        self._harvest(pipeline, microbatch, queue)
        self._done(action)

    def _harvest(self, pipeline: int, microbatch: int, queue: WeightQueue) -> None:
        """Take the gradients that B formed off the parameters; those that W adds to wait for it."""
        later = queue.parameters()
        now = []
        for parameter in self._layout.parameters:
            if parameter.grad is None:
                continue
            if parameter in later:
                queue.formed[parameter] = parameter.grad
            else:
                now.append((parameter, parameter.grad))
            parameter.grad = None
        self._now.sums.add(pipeline, microbatch, now)
        self._now.queues[pipeline, microbatch] = queue

    def _weight(self, action: Action) -> None:
        _, pipeline, microbatch = action
        queue = self._now.queues.pop((pipeline, microbatch))
        with torch.no_grad():
            self._now.sums.add(pipeline, microbatch, queue.contributions())
        self._done(action)

    def _done(self, action: Action) -> None:
        self.ledger.done.append(action)
        self._transport.post()

    # ---- reduce, commit, step

    def _reduce_and_step(self, action: Action) -> None:
        groups = self._groups()
        iteration = self.ledger.iteration
        self.ledger.check_complete(self._plan.actions(self.place.me))
        with torch.no_grad():
            gradient = self._reduction.gradient(self._now.sums, groups)
            fold_ties(self.stage.ties, self._layout, gradient, groups)
        loss = self._reduction.loss(self._now.losses, groups) if self.place.last else 0.0
        grid = self.place.grid
        digests = torch.zeros(grid.total, dtype=torch.float64)
        width = self.stage.report_width
        reports = torch.zeros(grid.total, width, dtype=torch.float64)
        if self.place.last:
            reports = share_reports(grid, width, self._now.reports, groups)
        if self.place.first or self.place.last:
            digests = share_digests(grid, self._now.digests, groups)
        self.held = Held(iteration, gradient, self.stage.norm_square(self._views(gradient)), loss, digests, reports)
        self.ledger.holds = iteration
        self.observe("reduced", iteration, action)
        self.commit_and_step()

    def commit_and_step(self) -> None:
        """Wait until every worker holds what this one holds, then step; adopts a better plan all have by then."""
        assert self.held is not None
        offer: Offer | None = self.agent.offer
        if offer is not None and offer.generation != self.generation:
            offer = None
        verdict, adopt = commit(self.held, self.place.grid, self._groups(), offer.number if offer else 0)
        self.step(verdict)
        if adopt and offer is not None:
            self.use_plan(Plan.from_json(offer.plan))
            self.agent.adopted(self.generation, verdict.iteration + 1, self._plan.digest)

    def step(self, verdict: Verdict) -> None:
        """Make the update of a committed iteration; nothing interrupts it."""
        assert self.held is not None and self.held.iteration == verdict.iteration
        self.observe("step", verdict.iteration)
        with torch.no_grad():
            self.stage.step(self._views(self.held.gradient), verdict)
        self.ledger.stepped = verdict.iteration
        self.verdict, self.reports, self.held = verdict, self.held.reports, None
        for pipeline, count in enumerate(self.place.grid.microbatches):
            self._data.forget(pipeline, (verdict.iteration + 1) * count)
        self.agent.committed(verdict.iteration, verdict.loss)
        self.observe("stepped", verdict.iteration)

    def _views(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        return [self._layout.view(gradient, parameter) for parameter in self._layout.parameters]

    # ---- what the recovery changes

    def description(self) -> dict[str, Any]:
        """Facts about the job that must be the same on all workers."""
        grid, config = self.place.grid, self.config
        return {"grid": {"stages": grid.stages, "microbatches": list(grid.microbatches)},
                "block": config.block_size(grid.pipelines, max(grid.microbatches)), "cap": config.cap,
                "tied": [list(stages) for stages in self.stage.tied_stages],
                "split_backward": True, "reduction": config.reduction, "planner_budget": config.planner_budget,
                "heartbeat_interval": config.heartbeat_interval, "heartbeat_timeout": config.heartbeat_timeout,
                "report_timeout": config.report_timeout,
                "seed": config.seed, "backend": self.place.backend, "torch": torch.__version__}

    def report(self) -> dict[str, Any]:
        """Where this worker stands, for the coordinator; called by the training thread standing still."""
        ledger = self.ledger
        return {"iteration": ledger.iteration, "attempt": ledger.attempt, "holds": ledger.holds,
                "stepped": ledger.stepped, "verdict": self.verdict.to_json() if self.verdict else None,
                "actions": len(ledger.done)}

    def abort(self, generation: int) -> None:
        """Free the training thread from whatever it waits for in a generation older than ``generation``.

        Called by the agent's thread.
        """
        with self._lock:
            groups = self.groups
        if groups is not None and groups.generation < generation:
            groups.abort()

    def discard_attempt(self) -> None:
        """Forget the iteration in flight; what is held of a complete one stays."""
        for parameter in self._layout.parameters:
            parameter.grad = None
        self._attempt = None

    def install(self, groups: Groups, plan: Plan) -> None:
        """Use the handles of a new generation, and its plan.

        Raises TransportAborted if a still newer generation was announced meanwhile.
        """
        with self._lock:
            self.groups = groups
        self._transport = Transport(groups, {}, self.stage.device)
        self.use_plan(plan)
        self.stage.regroup(groups)
        if self.interrupted():
            raise TransportAborted("a newer generation was announced while this one was being installed")

    def uninstall(self) -> None:
        """Take the handles of the old generation out of use and tear them down."""
        with self._lock:
            groups, self.groups = self.groups, None
        if groups is not None:
            groups.abort()
            groups.retire()

    def use_plan(self, plan: Plan) -> None:
        """Follow ``plan`` from the next attempt on."""
        grid, me = self.place.grid, self.place.me
        self._plan = plan
        self._transport.use(channels(plan))
        if self.config.reduction == "exact":
            self._reduction = ExactReduction(grid.pipelines, grid.microbatches, plan.problem.block,
                                             pieces(plan, me.stage), me, self.stage.averaging)
        else:
            self._reduction = FastReduction(grid.pipelines, max(grid.microbatches), self.stage.averaging)

    def copy_held(self, sources: Mapping[Worker, Worker], target: int) -> None:
        """Give peers that do not hold ``target`` the reduced gradient; ``sources`` maps receiver to giver.

        The copy lands in a spare buffer and counts only once it is whole.
        """
        groups = self._groups()
        peers = groups.peers(self.place.me.stage)
        for receiver, giver in sorted(sources.items()):
            if receiver == self.place.me:
                gradient = self._layout.empty()
                total = self.place.grid.total
                numbers = torch.empty(2 + total * (1 + self.stage.report_width), dtype=torch.float64)
                _exchange(groups, [gradient, numbers], peers.index(giver), receive=True)
                self.held = Held.from_numbers(target, gradient, numbers, total)
                self.ledger.holds = target
            elif giver == self.place.me:
                assert self.held is not None
                _exchange(groups, [self.held.gradient, self.held.numbers()], peers.index(receiver), receive=False)

    def announce_resumed(self) -> None:
        """Tell the coordinator when the next action begins."""
        self._announce_resumed = True

    @property
    def _now(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    def _groups(self) -> Groups:
        assert self.groups is not None
        return self.groups


def _exchange(groups: Groups, tensors: Sequence[torch.Tensor], peer: int, *, receive: bool) -> None:
    start = groups.stage.recv if receive else groups.stage.send
    try:
        for tag, tensor in enumerate(tensors):
            start([tensor], peer, tag).wait()
    except RuntimeError as error:
        raise TransportAborted(f"copying the reduced gradient failed: {error}") from error
