"""A worker's site: everything that lives as long as the worker, and never changes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Agent
from megatron_recycle.membership import Standing
from megatron_recycle.policy import POLICIES
from megatron_recycle.runtime.checkpoint_clock import CheckpointClock
from megatron_recycle.runtime.comm.backend import BACKENDS
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.network import Network
from megatron_recycle.runtime.compute.data import DataSource
from megatron_recycle.runtime.compute.device import Pace, device_of
from megatron_recycle.runtime.compute.memory import ActivationMemory
from megatron_recycle.runtime.compute.random_state import Generators
from megatron_recycle.runtime.compute.split import Deferring
from megatron_recycle.runtime.compute.stopwatch import Stopwatch
from megatron_recycle.runtime.evaluation import Evaluations
from megatron_recycle.runtime.facts import Past
from megatron_recycle.runtime.grids import Grids
from megatron_recycle.runtime.iteration_history import History
from megatron_recycle.runtime.phases import Phases
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.registered import Registered
from megatron_recycle.runtime.script_collectives import Collectives
from megatron_recycle.runtime.script_transfers import Transfers
from megatron_recycle.runtime.setup_record import SetUp
from megatron_recycle.runtime.stage import Stage
from megatron_recycle.runtime.trainable import Trainable


@dataclass(frozen=True)
class Framework:
    """The script's framework, as a backend shows it to its worker.

    Attributes:
        stage: the model's part, and its optimizer.
        splitter: defers weight gradients of the stage's linear layers.
        data: micro-batches by place.
        generators: the sources of random numbers of the user's code.
        save_last: called between two iterations by all workers alike when the job cannot go on; writes this worker's
            part of a checkpoint and returns its place, or nothing if another worker could not write its own. It may
            raise anything. None: not supported.
        restore: called between two iterations by all workers alike, also by a joiner; loads this worker's part of the
            checkpoint of this run that is at a place, or that the try of a name (`Save.name`) wrote for that place
            before the worker that was to name it died. It may raise anything. None: not supported.
        folder: where a worker writes its held state of a job that has lost another stage for good; None: nowhere.
        setup: records or replays the results of this process's set-up; None: no process joins later.
        grids: of iterations.
        registered: the script's state beside the model.
    """

    stage: Stage
    splitter: Deferring
    data: DataSource
    generators: Generators
    grids: Grids
    save_last: Callable[[], str] | None = None
    restore: Callable[[str, str], None] | None = None
    folder: Callable[[], str | None] | None = None
    setup: SetUp | None = None
    registered: Registered = field(default_factory=Registered)


class Meters:
    """The measurements that plans are made from.

    Attributes:
        device: the device that they are made on.
        memory: bytes that micro-batches hold there.
        watch: durations of actions there.
        pace: of the thread that launches them.
        checkpoints: duration of a checkpoint, and how often there should be one.
    """

    def __init__(self, device: torch.device, mtbf: float | None = None) -> None:
        self.device = device_of(device)
        self.memory = ActivationMemory(self.device)
        self.watch = Stopwatch(self.device)
        self.pace = Pace(self.device)
        self.checkpoints = CheckpointClock(mtbf)
        self._before = self.device.outside()

    @property
    def communicators(self) -> int:
        """Bytes of the device that communicators have taken since training began, as far as that can be measured."""
        return max(0, self.device.outside() - self._before)


class Asked(NamedTuple):
    """The script's requests to all workers between two iterations.

    Attributes:
        evaluations: reports of an evaluation's last pass.
        collectives: the script's own.
        transfers: the script's messages from rank to rank.
        iterations: the script's results of each committed iteration.
    """

    evaluations: Evaluations
    collectives: Collectives
    transfers: Transfers
    iterations: History

    def reconcile(self, groups: Groups, epoch: object, joined: Collection[int] = (),
                  back: Collection[int] = ()) -> None:
        """After a failure: bring all workers to the end of calls that some have completed. ``epoch``: of ``groups``.
        ``joined``: processes that come in; ``back``: those that do so while others, whose scripts are further, are
        between two iterations. Raises GenerationOver."""
        self.evaluations.reconcile(groups)
        self.collectives.reconcile(groups, joined, back)
        self.transfers.reconcile(groups, epoch, joined)


@dataclass(frozen=True)
class Site:
    """A worker's surroundings: its inputs, and its means to measure and report.

    Attributes:
        place: position, grid, ranks.
        config: settings.
        framework: the script's, with the model and its data.
        agent: this process's link to the coordinator.
        network: builds each generation's communicators.
        phases: follows everything that the training thread does.
        trainable: the stage's parameters that are trained.
        meters: memory and time of micro-batches.
        asked: the script's requests to all workers between two iterations.
    """

    place: Place
    config: RecycleConfig
    framework: Framework
    agent: Agent
    network: Network
    phases: Phases
    trainable: Trainable
    meters: Meters
    asked: Asked

    @property
    def past(self) -> Past:
        """The past, as a joiner needs it."""
        return Past(self.asked.iterations.told(), self.asked.evaluations.told(), list(self.trainable.guard.saved))

    @property
    def stage(self) -> Stage:
        """The framework's part of the model."""
        return self.framework.stage

    @property
    def grids(self) -> Grids:
        """The grid of each iteration."""
        return self.framework.grids

    @cached_property
    def may_be_full(self) -> bool:
        """Whether the plan may have full backwards (FB) here, as the worker reports when it begins. They are faster
        where splitting costs something and autograd can add to the sums itself. But their gradients may differ in the
        last bit from a B's and a W's, so never where bits must not depend on the worker."""
        return not self.exact and self.framework.splitter.deferring_costs and self.trainable.layout.sums_in_place

    @cached_property
    def unchecked(self) -> set[int]:
        """The chunks, counted within the stage, whose first forward here is yet to come, and to run twice."""
        return set(range(len(self.place.chunks))) if self.config.check_forward else set()

    @property
    def exact(self) -> bool:
        """Whether gradients must have the same bits whichever worker computes them."""
        return self.config.reduction == "exact"

    @cached_property
    def keeps_messages(self) -> bool:
        """Whether an iteration's messages and sums are kept until it is committed, so that its rest can be planned
        after a failure. On a GPU that has never run: there it has to be asked for."""
        wanted = self.config.keep_messages
        return POLICIES[self.config.policy].reroutes and (
            wanted == "all" or (wanted == "auto" and self.stage.device.type == "cpu"))

    @property
    def keeps_attempts(self) -> bool:
        """Whether an attempt that is given up goes on after a failure, if its plan allows it."""
        return self.keeps_messages or POLICIES[self.config.policy].in_flight == "whole"

    @cached_property
    def closes(self) -> bool:
        """Whether training returns to the script once the worker's stage is closed for an iteration; otherwise once all
        workers have committed it. The same on all workers.

        Not on a GPU: there an abort may find a worker's parts in different actions. Then nothing counts of what they
        have done, and the messages that it was computed from are needed again.
        Shards of a worker's parts are not followed through a closed iteration.
        """
        apart = self.place.parts == 1 or self.stage.shards is None
        return self.keeps_messages and apart and BACKENDS[self.place.backend].host

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """The other stages that contribute to this one's gradient by ties, directly or by way of others."""
        found = {self.place.me.stage}
        ties = [{*tie} for tie in self.stage.tied_stages]
        while more := [tie for tie in ties if tie & found and tie - found]:
            found.update(*more)
        return tuple(sorted(found - {self.place.me.stage}))

    @property
    def goes_on(self) -> bool:
        """Whether this process is a member of the next generation, as far as it knows."""
        return not self.agent.outside and self.agent.ended is None

    def interrupted(self, standing: Standing) -> bool:
        """Whether a newer generation than the one in force has been announced, or the end of the job."""
        return self.agent.stop_generation > standing.epoch.generation or self.agent.ended is not None

    def forget_data(self, iteration: int) -> None:
        """``iteration`` and all before it are final: their data is not read again."""
        self.grids.forget(iteration)
        for pipeline in range(self.place.grid.pipelines):
            self.framework.data.forget(pipeline, self.grids.number(iteration + 1))
