"""Bamboo: each worker also holds the next stage of its pipeline, and computes its forwards in its own idle time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_recycle.tools.simulate.cluster import Change, Unit
from megatron_recycle.tools.simulate.policies.base import NEVER, STANDS, Answer, Cause, Course, Policy, Setting

Place = tuple[int, int]


@dataclass(frozen=True)
class BambooConstants:
    """Constants of the simulator in Bamboo's repository (uclasystem/bamboo, project_pactum/simulation/simulator.py,
    8080929): seconds until a new machine is ready, until all have met again after a fatal failure and after any other,
    the factor by which iterations are longer while a stage is computed by its shadow, and the risk above which it puts
    the machines together anew.

    ``rolls_back``: a fatal failure goes back to the last checkpoint, as the paper says; that simulator only loses the
    time to meet. ``save``, ``save_every``: checkpoints, as in our own policies.
    """

    creation: float = 45.0
    fatal: float = 30.0
    meeting: float = 20.0
    slowdown: float = 1.5
    risk: float = 0.05
    rolls_back: bool = True
    save: float = 30.0
    save_every: float = 3600.0


class Bamboo(Policy):
    """Thorpe et al., "Bamboo: Making preemptible instances resilient for affordable training of large DNNs", NSDI 2023.

    A lost worker's stage is computed by the worker of the stage before it, which holds a copy. Fatal: that worker is
    lost with it, or has a second stage already. At the end of an iteration all meet anew if enough spares wait, if a
    fatal failure has become likelier than 5 %, or if there are machines for a further pipeline. The global batch is
    kept.

    Without failures an iteration is 1F1B's, plus the time of redundant forwards beyond the bubble: with M micro-batches
    and S stages, max(0, M F - (S - 1)(F + B + W)).
    """

    name = "bamboo"

    def __init__(self, constants: BambooConstants | None = None) -> None:
        self.constants = constants or BambooConstants()
        self.save_takes = self.constants.save
        self.save_every = self.constants.save_every if self.save_takes else NEVER
        self._holds: dict[Unit, list[Place]] = {}
        self._waiting: dict[Unit, None] = {}
        self._creating: set[Unit] = set()
        self._pipelines = 0
        self._slow = False

    def begin(self, setting: Setting) -> Answer:
        self.setting = setting
        self._place(setting.units)
        return Answer(self._course())

    def changed(self, change: Change, iteration: int) -> Answer:
        for unit in change.lost:
            self._waiting.pop(unit, None)
            self._creating.discard(unit)
        hit = [unit for unit in change.lost if unit in self._holds]
        fatal = sum(not self._shadowed(unit) for unit in hit) > 0
        self._creating |= set(change.gained)
        wakes = tuple((self.constants.creation, unit) for unit in change.gained)
        if fatal:
            return replace(self._meet(self.constants.fatal), fatal=True, back=self.constants.rolls_back, again=1.0,
                           wakes=wakes)
        if not hit:
            return Answer(wakes=wakes)
        self._slow = True
        return Answer(self._course(), survived=1, wakes=wakes, boundary=self._should_meet())

    def woken(self, now: float, token: object, iteration: int) -> Answer:
        if token == "boundary":
            return self._meet(self.constants.meeting) if self._pipelines and self._should_meet() else Answer()
        if isinstance(token, Unit) and token in self._creating:
            self._creating.discard(token)
            self._waiting[token] = None
            if not self._pipelines and len(self._waiting) + len(self._holds) >= self.setting.job.stages:
                return self._meet(self.constants.fatal)
            return Answer(boundary=bool(self._pipelines) and self._should_meet())
        return Answer()

    def _shadowed(self, unit: Unit) -> bool:
        """The unit's stage goes to the one before, if that has a copy of it and no other stage yet."""
        places = self._holds.pop(unit)
        if len(places) > 1:
            return False
        pipeline, stage = places[0]
        before = pipeline, (stage - 1) % self.setting.job.stages
        shadow = next((other for other, held in self._holds.items() if before in held), None)
        if shadow is None or len(self._holds[shadow]) > 1:
            return False
        self._holds[shadow].append(places[0])
        return True

    def _meet(self, seconds: float) -> Answer:
        self._place([*self._holds, *self._waiting])
        return Answer(self._course(), ((Cause.RECONFIGURE, seconds),))

    def _place(self, units: Iterable[Unit]) -> None:
        job, ordered = self.setting.job, sorted(units)
        self._pipelines = min(job.pipelines, len(ordered) // job.stages)
        used = self._pipelines * job.stages
        self._holds = {unit: [divmod(number, job.stages)] for number, unit in enumerate(ordered[:used])}
        self._waiting = dict.fromkeys(ordered[used:])
        self._slow = False

    def _should_meet(self) -> bool:
        """As its simulator decides at the end of each step."""
        job = self.setting.job
        double = sum(len(held) > 1 for held in self._holds.values())
        live = self._pipelines * job.stages - double
        if double and (len(self._waiting) >= double or 2 * double / live > self.constants.risk):
            return True
        return min(job.pipelines, (live + len(self._waiting)) // job.stages) > self._pipelines

    def _course(self) -> Course:
        if not self._pipelines:
            return STANDS
        job = self.setting.job
        dealt = job.dealt(self._pipelines)
        seconds = self.setting.plans.stock(dealt).period + redundant(self.setting, max(dealt))
        seconds *= self.constants.slowdown if self._slow else 1.0
        return Course(seconds, seconds, job.batch)


def redundant(setting: Setting, microbatches: int) -> float:
    """Seconds by which the redundant forwards of an iteration exceed the bubble."""
    job, costs = setting.job, setting.job.costs
    each = max(f + b + w for f, b, w in zip(costs.forward, costs.backward_input, costs.backward_weight))
    return max(0.0, microbatches * max(costs.forward) - (job.stages - 1) * each) * job.unit
