"""The members of a job in front of the membership machine, all at once: its decisions, without processes.

The machine is fed the messages of launchers and workers (`membership.inputs`), and its decisions are answered as they
would. If every member sends the same, all but the last are applied in one change of the state, as the machine itself
would note it, and the machine decides on the last one. So a generation of thousands of workers takes some dozen steps
instead of thousands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from megatron_recycle.control import searches
from megatron_recycle.control.searches import Plans
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership.description import Job, Model
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.machine import step
from megatron_recycle.membership.protocol import Offer, Start
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.state import Member, Phase, State
from megatron_recycle.plan.plan_file import PlanFile


@dataclass
class Asked:
    """Requests of the machine since the last look.

    ``switch``: all are to stand at the next boundary. ``starts``: processes for empty positions, beside other workers.
    ``found``: moves are to be looked for. ``end``: the job's.
    """

    switch: bool = False
    starts: list[tuple[str, int]] = field(default_factory=list)
    moves: do.FindMoves | None = None
    end: do.End | None = None


class Members:
    """A life of a job, from its first hello to its end.

    Args:
        positions: all workers of the grid, in the order of their ranks, with the host of each.
        description: the job's, as workers give it; see `control.planning.problem_of`.
        plan: the plan without these workers, only as much of it as the machine reads.
    """

    def __init__(self, positions: Mapping[str, str], job: Job, plans: Plans) -> None:
        self.state = State(size=len(positions))
        self.plans = plans
        self.plan = PlanFile()
        """The plan in use."""
        self.asked = Asked()
        self._names = list(positions)
        self._ranks = {name: rank for rank, name in enumerate(positions)}
        self._lives: dict[str, int] = {}
        self._now = 0.0
        self._wanted: do.MakePlan | None = None
        self._form(positions, job)

    @property
    def training(self) -> bool:
        return self.state.phase is Phase.TRAINING

    @property
    def empty(self) -> list[str]:
        """Positions that no process has or is about to take, in order of their ranks."""
        taken = {*self.state.members, *self.state.arrivals.joiners, *self.state.moving.moves}
        return [name for name in self._names if name not in taken]

    def lose(self, positions: Collection[str], whole_host: bool, now: float, committed: int) -> None:
        """Lose these members or joiners together, after ``committed`` iterations."""
        self._now = now
        self._commit(committed)
        kind = FailureKind.UNREACHABLE if whole_host else FailureKind.EXIT
        present = {**self.state.arrivals.joiners, **self.state.members}
        losses = tuple(inputs.Loss(present[name].incarnation, kind) for name in positions if name in present)
        if losses:
            self._feed(inputs.Lost(losses, now))
            self._settle(committed)

    def come(self, position: str, host: str, now: float, committed: int) -> bool:
        """A process for an empty position has built its model and waits to come in; returns whether it may."""
        self._now = now
        self._commit(committed)
        life = self._lives[position] = self._lives.get(position, 0) + 1
        rank = self._ranks[position]
        member = Member(position, rank, f"{position}/{life}", rank + life * len(self._names), host)
        self._feed(inputs.Hello(member))
        if self.state.arrivals.joiners.get(position) != member:
            return False  # another process waits for it
        self._feed(inputs.Ready(member.incarnation, self.state.job.told(Model()), _report(committed)))
        return True

    def stand(self, now: float, committed: int) -> None:
        """Bring all members to the boundary that was requested."""
        self._now, self.asked.switch = now, False
        self._commit(committed)
        if not self.training or not self.state.round.switch:
            return
        *most, last = self.state.members
        self.state = self.state.with_(standing=dict.fromkeys(most, now))
        member = self.state.members[last]
        self._feed(inputs.Boundary(member.incarnation, self.state.generation, committed, now))
        self._settle(committed)

    def at_rank(self, rank: int) -> str:
        """The position of this rank."""
        return self._names[rank]

    def find_moves(self) -> None:
        """Ask the planner for worthwhile moves, and report them to the machine."""
        order, self.asked.moves = self.asked.moves, None
        if order is None or order.generation != self.state.generation:
            return
        answer = searches.find_moves(self.plans, self.state.job, order)
        if answer is not None:
            self._feed(answer)

    def commit(self, committed: int, now: float) -> None:
        """Commit so many iterations on all members: a move may be over with it."""
        self._now = now
        self._commit(committed, feed=True)

    # Actions of members

    def _form(self, positions: Mapping[str, str], job: Job) -> None:
        members = [Member(name, rank, f"{name}/0", rank, host)
                   for rank, (name, host) in enumerate(positions.items())]
        *most, last = members
        description, report = job.told(Model()), replace(_report(0), attempt=0)
        # All but the last: as `forming.hello` and `forming.ready` note them.
        self.state = self.state.with_(
            known={member.incarnation: member for member in most},
            descriptions={member.worker: description for member in most},
            reports={member.worker: report for member in most},
            learnt={str(member.rank): () for member in most},
            samples={str(stage): f"0:{stage}" for stage in range(job.grid.stages)
                     if f"0:{stage}" != last.worker})
        self._feed(inputs.Hello(last))
        self._feed(inputs.Ready(last.incarnation, description, report))
        self._settle(0)

    def _settle(self, committed: int) -> None:
        """Report for all members, plan, go on and resume, until nothing more is decided."""
        while self.state.phase is Phase.RECOVERING:
            generation = self.state.generation
            proven = [name for name in self.state.members if name not in self.state.arrivals.unproven]
            waits = [name for name in proven if name not in self.state.round.reports]
            if waits:
                report = _report(committed)
                self.state = self.state.with_(reports={**self.state.round.reports, **dict.fromkeys(waits[:-1], report)})
                self._feed(inputs.Reported(self.state.members[waits[-1]].incarnation, generation, report))
            if self._wanted is not None and self._wanted.generation == self.state.generation:
                order, self._wanted = self._wanted, None
                answer = searches.make_plan(self.plans, self.state.job, order)
                self.plan = answer.plan if isinstance(answer, inputs.Planned) else PlanFile()
                self._feed(answer)
            if self.state.generation != generation or not self.training:
                break
            for name in [*self.state.arrivals.unproven]:
                self._feed(inputs.Holds(self.state.members[name].incarnation, generation, inputs.Received()))
            *most, last = self.state.members
            self.state = self.state.with_(resumed=dict.fromkeys(most, self._now))
            self._feed(inputs.Resumed(self.state.members[last].incarnation, generation, self._now))

    def _commit(self, committed: int, feed: bool = False) -> None:
        """Commit iterations up to this one on all members: as `training.committed` notes them."""
        last = committed - 1
        if not self.training or last <= self.state.progress.committed:
            return
        *most, final = self.state.members
        if not feed:
            by = dict.fromkeys(self.state.members, last)
            self.state = self.state.with_(committed=last, committed_by=by, behind=0, losses={}, mended=0, restores=0,
                                          retries=0)
            return
        self.state = self.state.with_(committed=last - 1, behind=1,
                                      committed_by={**dict.fromkeys(most, last), final: last - 1})
        self._feed(inputs.Committed(self.state.members[final].incarnation, self.state.generation, last))

    def _feed(self, happened: inputs.Input) -> None:
        self.state, decided = step(self.state, happened, self._now)
        for one in decided:
            if isinstance(one, do.MakePlan):
                self._wanted = one
            elif isinstance(one, do.Tell) and isinstance(one.message, Offer) and one.message.plan is None:
                self.asked.switch = True
            elif isinstance(one, do.FindMoves):
                self.asked.moves = one
            elif isinstance(one, do.Command) and isinstance(one.message, Start):
                self.asked.starts.append((self._names[one.message.rank], one.message.beside))
            elif isinstance(one, do.End):
                self.asked.end = one


def _report(committed: int) -> Report:
    """Report of a worker that has committed so many iterations; its part of the next one does not count."""
    last = committed - 1
    return Report(committed, 1, last, last, None, 0, last)


