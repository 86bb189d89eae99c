"""megatron-recycle itself: the real membership machine and the real planner, for each of the product's policies.

Stalls are those of the recovery benchmark (`scripts/bench/recovery.py`: medians, from the event to the last survivor's
first action).

A job begins when the hosts for its whole grid are there: the launcher waits for them, and so does a cluster's queue. If
they never come it is started on the present hosts, with as many whole pipelines as divide the global batch, and that is
its grid for good: later hosts fill empty places, and make no new pipeline. A stage that has lost its last worker comes
back from the last checkpoint on the same grid (`guard: checkpoint`). Simplification: all remaining workers are put
together anew then, whole pipelines first, and it costs as much as a restart.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from megatron_recycle.checkpoint_period import young_daly
from megatron_recycle.control.moves import moves_of
from megatron_recycle.control.planning import problem_of
from megatron_recycle.control.searches import Plans as Callables
from megatron_recycle.membership.description import Job as Described
from megatron_recycle.membership.next_life import Shape, plan_life
from megatron_recycle.membership.policies import left_out
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.policy import POLICIES, PolicyName
from megatron_recycle.tools.simulate.cluster import Change, Slots, Unit, packed
from megatron_recycle.tools.simulate.members import Members
from megatron_recycle.tools.simulate.plans import Figures
from megatron_recycle.tools.simulate.policies.base import NEVER, STANDS, Answer, Cause, Course, Policy, Setting
from megatron_recycle.tools.simulate.trace import TraceError

GROW_AFTER = 600.0
"""Seconds that an elastic job with fewer pipelines than possible trains before it is restarted with more."""
PATIENCE = 3600.0
"""Seconds that a job waits for a whole grid that never comes."""


@dataclass(frozen=True)
class Stalls:
    """Seconds without computation.

    ``exit``, ``host``: after a process's or a host's end, with its detection. ``rejoin``: for a worker that comes in,
    without the copy of its state. ``start``: of a process, while the others train. ``save``: of a checkpoint.
    ``restart``: of the whole job, with loading. ``wait``: for the hosts of the whole grid, before the job begins on the
    present ones; None: until they come, `PATIENCE` if they never do.
    """

    exit: float = 0.120
    host: float = 2.36
    rejoin: float = 0.158
    start: float = 30.0
    save: float = 30.0
    restart: float = 300.0
    save_every: float = 3600.0
    wait: float | None = None

    @classmethod
    def measured(cls, path: str | Path) -> Stalls:
        """Stalls with the medians of a file that the recovery benchmark has written. Raises TraceError."""
        try:
            kinds = json.loads(Path(path).read_text(encoding="utf-8"))["kinds"]
            medians = {name: kinds[kind]["median_ms"] / 1000
                       for name, kind in (("exit", "exit"), ("host", "unreachable"), ("rejoin", "rejoin"))
                       if kind in kinds}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path} is no file of the recovery benchmark: {error!r}") from None
        return cls(**medians)


class Recycling(Policy):
    """The product, by its policy `reroute`; subclasses are its other policies.

    Attributes:
        product: the setting `policy`.
        moves: whether healthy workers change their stage where that pays off.
        again: the work of the iteration in flight that is redone after a loss: all of it, that of the lost workers by
            the rest of their stage (neighbours and peers keep theirs), or nothing.
        same_batch: whether a life with fewer pipelines has the same global batch.
        elastic: the job begins with any whole pipelines that are there, deals the global batch to any number of them,
            and starts anew with other ones whenever it can; otherwise as in this module's head.
    """

    name = "ours"
    product: ClassVar[PolicyName] = "reroute"
    moves: ClassVar[bool] = True
    again: ClassVar[Literal["all", "lost", "nothing"]] = "lost"
    same_batch: ClassVar[bool] = True
    elastic: ClassVar[bool] = False

    def __init__(self, stalls: Stalls | None = None) -> None:
        self.stalls = stalls or Stalls()
        self.save_takes, self.save_every = self.stalls.save, self.stalls.save_every
        self.members: Members | None = None  # None: between two lives
        self._due: dict[str, Unit] = {}  # processes that are being started, by position
        self._moving: dict[str, Unit] = {}  # processes of moves
        self._fresh: list[tuple[str, Unit]] = []  # starts of both kinds that are due now
        self._growing = False
        self._begun = False  # whether a life has been
        self._waits = not self.elastic  # for the whole grid
        self._agreed = False  # the last commit has promised that all stand at the next one

    def begin(self, setting: Setting) -> Answer:
        self.setting = setting
        job = setting.job
        usual, present = setting.cluster.slots(job.pipelines, job.stages), set(setting.units)
        if present.issuperset(usual.values()):
            self.slots = Slots(usual, (unit for unit in setting.units if unit not in set(usual.values())))
            self._life(job.pipelines)
            return Answer(self._course())
        self.slots = Slots({}, setting.units)
        answer = self._without_life()
        wait = self.stalls.wait if self.stalls.wait is not None else NEVER if setting.whole else PATIENCE
        return replace(answer, course=answer.course or STANDS, wakes=(*answer.wakes, (wait, "begin")))

    def changed(self, change: Change, iteration: int) -> Answer:
        empty = self.slots.lose(change.lost)
        self.slots.gain(change.gained)
        if self.members is None:
            return self._without_life()
        gone = {str(worker) for worker in empty}
        self._due = {name: unit for name, unit in self._due.items() if name not in gone}
        gone |= {to for to, unit in self._moving.items() if unit in change.lost}
        before, self._agreed = self.members.state.generation, False
        again = self._again(self.members.state.members, gone)
        self.members.lose(gone, change.whole_host, change.at, iteration)
        if self.members.asked.end is not None:
            return self._end_of_life()
        self._come_in()
        if self.members.state.generation == before:
            return self._and(Answer())
        # Survivors stop between two actions, and hear of a process's end at once.
        stall = self.stalls.host if change.whole_host else self.stalls.exit + self.setting.job.longest_action
        return self._and(Answer(self._course(), ((Cause.RECOVERY, stall),), again=again, survived=1))

    def _again(self, members: Iterable[str], gone: Collection[str]) -> float:
        """Share of the iteration's done part that the loss of ``gone`` costs, as time: the hit stage makes it longer,
        whose workers redo the lost ones' work in parallel."""
        if self.again != "lost":
            return float(self.again == "all")
        stages = [[name in gone for name in members if Worker.parse(name).stage == stage]
                  for stage in {Worker.parse(name).stage for name in gone}]
        return max((min(1.0, sum(lost) / max(1, lost.count(False))) for lost in stages), default=0.0)

    def woken(self, now: float, token: object, iteration: int) -> Answer:
        if token == "grow":
            self._growing = False
        elif token == "begin":
            self._waits = False
        if self.members is None:
            return self._without_life() if token == "begin" else Answer()
        if token == "grow":
            return self._grown()
        if isinstance(token, tuple):
            position, unit = token
            return self._started(self.members, now, position, unit, iteration)
        return Answer() if token == "begin" else self._at_boundary(self.members, now, iteration)

    # Lives

    def _life(self, pipelines: int) -> None:
        """Begin a job of so many pipelines on its slots."""
        job = self.setting.job
        self._begun, self._waits = True, False
        self.pipelines = pipelines
        self.dealt = None if pipelines == job.pipelines else (
            job.dealt(pipelines) if self.same_batch else (job.microbatches,) * pipelines)
        hosts = {str(worker): "" for worker in Grid(job.stages, (1,) * pipelines).workers()}
        hosts |= {str(worker): f"host{unit.host}" for unit, worker in self.slots.of.items()}
        description = Described(
            grid=Grid(job.stages, tuple(self.dealt or (job.microbatches,) * pipelines)),
            costs=job.costs.to_json(), cap=job.activations, reduction="fast", policy=self.product, moves=self.moves)
        self.members = Members(hosts, description, Callables(self._plan, None, self._moves))
        if empty := [name for name, host in hosts.items() if not host]:
            self.members.lose(empty, False, 0.0, 0)
        self._due, self._moving, self._fresh = {}, {}, []
        self._growing = False

    def _without_life(self) -> Answer:
        """Begin a life if there are enough hosts; no worker trains now."""
        job, live = self.setting.job, len(self._live())
        if live < (job.size if self._waits else job.stages):
            return Answer()
        first = not self._begun
        answer = self._next_life()
        if not first:
            return answer
        with_ = "the whole grid" if live >= job.size else (
            f"{self.pipelines} of {job.pipelines} pipelines, on {live} of {job.size} workers")
        return replace(answer, pauses=(), said="" if self.elastic else f"begins with {with_}")

    def _next_life(self) -> Answer:
        """Restart from the last checkpoint on the remaining workers, or wait."""
        job = self.setting.job
        live = sorted(self._live())
        pipelines = self._whole_pipelines(len(live))
        if not pipelines:
            self.members = None
            self.slots = Slots({}, live)
            return Answer(STANDS)
        seated = packed(live, pipelines, job.stages)
        self.slots = Slots(seated, live[len(seated):])
        self._life(pipelines)
        return self._and(Answer(self._course(), ((Cause.RESTART, self.stalls.restart),)))

    def _end_of_life(self) -> Answer:
        return replace(self._next_life(), back=True, fatal=True)

    def _live(self) -> list[Unit]:
        return [*self.slots.of, *self.slots.spare]

    def _whole_pipelines(self, live: int) -> int:
        """Pipelines of a life on so many workers, 0 for none."""
        job = self.setting.job
        places = min(live, job.size)
        if self.elastic or live < job.stages:
            return places // job.stages
        if self._begun:
            return self.pipelines
        life = plan_life({"": places}, Shape(job.stages, job.pipelines * job.microbatches), job.size)
        return 0 if isinstance(life, str) else life.size // job.stages

    def _grown(self) -> Answer:
        """Save and restart the job with more pipelines, if there are enough spares."""
        if self._whole_pipelines(len(self._live())) <= self.pipelines:
            return Answer()
        answer = self._next_life()
        return replace(answer, saved=True, pauses=((Cause.CHECKPOINT, self.stalls.save), *answer.pauses), again=1.0)

    # Processes that come in

    def _come_in(self) -> None:
        """Give spare units to empty positions."""
        assert self.members is not None
        empty = [Worker.parse(name) for name in self.members.empty if name not in self._due]
        for worker, unit in self.slots.fill(empty).items():
            self._due[str(worker)] = unit
            self._fresh.append((str(worker), unit))

    def _started(self, members: Members, now: float, position: str, unit: Unit, iteration: int) -> Answer:
        """A process has built its model."""
        spare = self._due.get(position) == unit
        if spare:
            del self._due[position]
        elif self._moving.get(position) != unit or position not in members.state.moving.moves:
            return Answer()
        if not members.come(position, f"host{unit.host}", now, iteration) and spare:
            self.slots.lose([unit])  # a worker has moved there meanwhile: another place is sought
            self.slots.gain([unit])
            self._come_in()
        return self._and(Answer())

    def _at_boundary(self, members: Members, now: float, iteration: int) -> Answer:
        """All stand between two iterations: workers come in and leave."""
        answer = Answer()
        stand, self._agreed = members.asked.switch and self._agreed, members.asked.switch
        members.commit(iteration, now)
        if stand:
            self._agreed = False
            before = members.state
            members.stand(now, iteration)
            if members.asked.end is not None:
                return self._end_of_life()
            if members.state.generation > before.generation:
                joined = members.state.members.keys() - before.members.keys()
                copy = self.setting.job.state_seconds if joined else 0.0
                self._follow_moves(members, before.moving.moves)
                answer = Answer(self._course(), ((Cause.REJOIN, self.stalls.rejoin + copy),))
        return self._and(answer)

    def _follow_moves(self, members: Members, moves: Mapping[str, str]) -> None:
        """Follow units whose process has moved to another position."""
        for to, incarnation in moves.items():
            mover = members.state.known[incarnation].worker
            if to in members.state.members and mover not in members.state.members and to in self._moving:
                self.slots.move(self._moving.pop(to), Worker.parse(to))
                self._come_in()

    def _and(self, answer: Answer) -> Answer:
        """The answer, with the machine's requests meanwhile."""
        members = self.members
        assert members is not None
        members.find_moves()
        self._moving = {to: unit for to, unit in self._moving.items() if to in members.state.moving.moves}
        for position, beside in members.asked.starts:
            unit = self.slots.unit(Worker.parse(members.at_rank(beside)))
            if unit is not None:
                self._moving[position] = unit
                self._fresh.append((position, unit))
        members.asked.starts.clear()
        wakes = (*answer.wakes, *((self.stalls.start, begun) for begun in self._fresh))
        self._fresh = []
        if self.elastic and self.slots.spare and self.pipelines < self.setting.job.pipelines and not self._growing:
            self._growing = True
            wakes += ((GROW_AFTER, "grow"),)
        state = members.state
        leaving = any(to in state.members for to in state.moving.moves)  # once an iteration is committed
        boundary = answer.boundary or members.asked.switch or leaving
        return replace(answer, wakes=wakes, boundary=boundary)

    # Plans

    def _plan(self, described: Described, failed: frozenset[str]) -> PlanFile:
        figures = self._figures(described.policy, sorted(map(Worker.parse, failed)))
        return PlanFile(source="simulated", digest=" ".join(sorted(failed)), period=figures.period,
                        makespan=figures.makespan, lower_bound=0)

    def _figures(self, policy: str, failed: list[Worker]) -> Figures:
        plans = self.setting.plans
        if not POLICIES[policy].always_whole:
            return plans.rerouted(failed, self.dealt)
        if POLICIES[self.product].leaves_out:
            return plans.rerouted((), self.dealt)  # the others run their own micro-batches only
        return plans.dropped(len({worker.pipeline for worker in failed}), self.dealt)

    def _moves(self, described: Described, failed: frozenset[str]) -> dict[str, str]:
        return {} if POLICIES[self.product].avoids_hit else moves_of(problem_of(described, failed), described)

    def _course(self) -> Course:
        assert self.members is not None
        plan, job = self.members.plan, self.setting.job
        dealt = self.dealt or (job.microbatches,) * self.pipelines
        idle = sum(dealt[pipeline] for pipeline in left_out(self.members.state))
        return Course(plan.period or 0.0, plan.makespan or 0.0, (sum(dealt) - idle) * job.samples)


class WithoutMoves(Recycling):
    """Ours, with every worker in its stage for good (the product's default)."""

    name = "ours-no-moves"
    moves = False


class LentAndMoves(Recycling):
    """The product with `lend: auto` and `moves`.

    After each change of the membership micro-batches are re-routed at once, as without it. The plan that lends layers
    comes with the end of the background search, at the next boundary between two iterations, and costs no stall; copies
    of parameters go with every iteration, and are in the plan (`Plans.lent`). The next change ends it first.

    ``search``: seconds, the setting `planner_budget`.
    """

    name = "lent-and-moves"
    search = 2.0

    def __init__(self, stalls: Stalls | None = None) -> None:
        super().__init__(stalls)
        self._changes = 0
        self._begin_search = self._found = False

    def woken(self, now: float, token: object, iteration: int) -> Answer:
        if not (isinstance(token, str) and token.startswith("lend")):
            return super().woken(now, token, iteration)
        self._found = self.members is not None and token == f"lend {self._changes}"
        return Answer(boundary=self._found)

    def _at_boundary(self, members: Members, now: float, iteration: int) -> Answer:
        answer = super()._at_boundary(members, now, iteration)
        if not self._found or self.members is None or answer.course is not None:
            return answer
        self._found = False
        failed = [Worker.parse(name) for name in self.members.empty]
        return replace(answer, course=Course.of(self.setting.plans.lent(failed, self.dealt), super()._course().samples))

    def _course(self) -> Course:
        """The course without lent layers, which the job follows at once."""
        assert self.members is not None
        self._changes += 1
        self._found, self._begin_search = False, bool(self.members.empty)
        return super()._course()

    def _and(self, answer: Answer) -> Answer:
        answer = super()._and(answer)
        if self._begin_search:
            self._begin_search = False
            answer = replace(answer, wakes=(*answer.wakes, (self.search, f"lend {self._changes}")))
        return answer


class LentLayers(LentAndMoves):
    """With `lend: auto` alone: every worker keeps its stage for good."""

    name = "lent-layers"
    moves = False


class Dropping(Recycling):
    """`policy: drop`: hit pipelines are left out, the others take their micro-batches."""

    name = "drop"
    again = "all"
    product = "drop"
    moves = False


class RollBack(Recycling):
    """`policy: rollback`: micro-batches of hit pipelines are left out until their workers are replaced; the iteration
    in flight is begun anew."""

    name = "rollback"
    again = "all"
    product = "rollback"
    moves = False


class LossyForward(Recycling):
    """`policy: lossy_forward`: as rollback, but the iteration in flight goes on where it stood."""

    name = "lossy-forward"
    product = "lossy_forward"
    moves = False
    again = "nothing"


class CheckpointRestart(Recycling):
    """Every failure ends the life of the job, which starts again from its last checkpoint, with as many whole pipelines
    as there are workers for and the same global batch, and again once there are workers for more: `policy: restart`
    under an elastic launcher that does so (ours does not, see `elastic`).

    A checkpoint every Young and Daly's period (`checkpoint_period`) for the trace's own mean time between failures, so
    that it is as good as an operator could make it. Iterations are stock 1F1B, as the frameworks run without us.
    """

    name = "checkpoint-restart"
    product = "restart"
    moves = False
    elastic = True

    def _figures(self, policy: str, failed: list[Worker]) -> Figures:
        return self.setting.plans.stock(self.dealt)

    def begin(self, setting: Setting) -> Answer:
        never = setting.mtbf == NEVER or not self.save_takes
        self.save_every = NEVER if never else young_daly(self.save_takes, setting.mtbf)
        return super().begin(setting)
