"""The coordinator: the real machine of `megatron_recycle.membership`, with the real planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec.structs import replace

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.description import Description
from megatron_recycle.membership.machine import step
from megatron_recycle.membership.names import Process
from megatron_recycle.membership.report import Report, ShardsReport
from megatron_recycle.membership.shards import to_begin_with
from megatron_recycle.plan import Action, Costs, Grid, Plan, Problem, Worker
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.planner import quick
from megatron_recycle.planner.redo import redo

Message = Mapping[str, Any]


class Asked(NamedTuple):
    """What a problem is made of."""

    stages: int
    microbatches: tuple[int, ...]
    placement: tuple[int, ...] = ()
    split_backward: bool = True
    full_backward: tuple[int, ...] = ()
    block: int = 0
    """Of the exact reduction; 0: it is the fast one."""
    copies: int = 0
    """Workers that hold each shard of a stage's optimizer state; 0: it is not cut."""

    def shards(self, worker: Worker) -> list[int]:
        """Those that it begins with."""
        return to_begin_with(worker.pipeline, len(self.microbatches), self.copies) if self.copies else []


@lru_cache(maxsize=1024)
def problem_of(asked: Asked) -> Problem:
    """The planner's problem; without memory limits, so that every rest of an iteration has a plan."""
    chunks = len(asked.placement) or asked.stages
    return Problem(Grid(asked.stages, asked.microbatches), Costs.uniform(chunks, 1, 1, 1), placement=asked.placement,
                   split_backward=asked.split_backward, full_backward=asked.full_backward, block=asked.block)


@lru_cache(maxsize=4096)
def planned(asked: Asked, failed: frozenset[Worker]) -> PlanFile:
    """The plan of a membership."""
    return quick(problem_of(asked).without(sorted(failed))).to_file()


@lru_cache(maxsize=1024)
def _formed(asked: Asked, members: tuple[tuple[str, str], ...],
            parts: int) -> tuple[st.State, list[st.Member], list[do.Decision]]:
    """The machine once all processes are ready."""
    state, decided = st.State(size=len(members)), list[do.Decision]()
    listed = [st.Member(name, rank, name, rank + 1000, host) for rank, (name, host) in enumerate(members)]
    description = Description(grid=Grid(asked.stages, asked.microbatches), block=asked.block,
                              reduction="exact" if asked.block else "fast", parts=parts)
    report = Report(0, 0, -1, -1, None, 0)
    happened = [*map(inputs.Hello, listed),
                *(inputs.Ready(member.worker, description, replace(report, shards=_cut(asked, member)))
                  for member in listed)]
    for each in happened:
        state, decisions = step(state, each, 1000.0)
        decided += decisions
    return state, listed, decided


def _cut(asked: Asked, member: st.Member) -> ShardsReport | None:
    """What a process reports of its shards at the start."""
    held = dict.fromkeys(asked.shards(Process.parse(member.worker).worker), -1)
    return ShardsReport(len(asked.microbatches), asked.copies, held) if asked.copies else None


class Coordinator:
    """The pure machine, driven.

    Args:
        asked: the problem of the whole grid.
        members: every process and its host.
        tell: gets each message for a process.
        parts: processes of a worker.
        tells: makes the coordinator's reports of those of a worker's parts.

    Attributes:
        events: that were emitted.
        ended: the end of the job, if it has ended.
        orders: that are to be answered (`answer`).
        goes: that were told, each once.
    """

    def __init__(self, asked: Asked, members: Mapping[str, str], tell: Callable[[str, Message], None],
                 parts: int = 1,
                 tells: Callable[[Sequence[Report]], Sequence[Report]] = lambda reports: reports) -> None:
        self._asked, self._tell, self._tells = asked, tell, tells
        self.events: list[Message] = []
        self.ended: do.End | None = None
        self.orders: list[do.MakePlan | do.MakeRedo] = []
        self.goes: list[Message] = []
        self.refused: list[tuple[int, Mapping[Worker, Sequence[Action]], Sequence[int]]] = []
        """Iterations whose rest had no plan, with what was done of them and the closed stages."""
        self.longer = 0
        """How often the rest would have taken longer than the whole iteration."""
        self._reports: dict[str, inputs.Reported] = {}
        self._now = 1000.0
        self._state, self._members, decisions = _formed(asked, tuple(members.items()), parts)
        self._carry_out(decisions)

    @property
    def generation(self) -> int:
        return self._state.generation

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._state.members)

    def exited(self, name: str) -> None:
        """A process has died."""
        member = next(member for member in self._members if member.worker == name)
        self._feed(inputs.Exited(member.rank, member.pid, -9, self._now))

    def reported(self, name: str, generation: int, report: Report) -> None:
        """A process says where it stands. Reports are taken in once all have come."""
        if generation != self.generation:
            return
        self._reports = {each: told for each, told in self._reports.items() if told.generation == generation}
        self._reports[name] = inputs.Reported(name, generation, report)
        if set(self._reports) != set(self._state.members):
            return
        for worker in {Process.parse(each).worker for each in self._reports}:
            names = [each for each in self._reports if Process.parse(each).worker == worker]
            reports = self._tells([self._reports[each].report for each in names])
            for each, said in zip(names, reports, strict=True):
                self._feed(replace(self._reports[each], report=said))

    def answer(self, order: do.MakePlan | do.MakeRedo) -> None:
        """What was ordered is done."""
        if isinstance(order, do.MakePlan):
            plan = planned(self._asked, frozenset(map(Worker.parse, order.failed)))
            self._feed(inputs.Planned(order.generation, plan, 1.0))
        else:
            rest = self._redo(order)
            ahead = self._redo(order.ahead) if rest is not None and order.ahead is not None else None
            self._feed(inputs.Redone(order.generation, rest, ahead))

    def _redo(self, order: do.MakeRedo) -> PlanFile | None:
        """As `control.planning.Planning.redo`."""
        whole = Plan.from_file(order.plan)
        done = {Worker.parse(name): [*map(Action.parse, listed)] for name, listed in order.done.items()}
        rest = redo(whole, done, order.closed)
        if rest is None:
            assert self._state.round.redo is not None
            self.refused.append((self._state.round.redo.iteration, done, order.closed))
            return None
        if rest.makespan > whole.makespan and not order.closed:
            self.longer += 1
            return None
        return rest.to_file()

    def _feed(self, happened: Any) -> None:
        self._now += 0.01
        self._state, decisions = step(self._state, happened, self._now)
        self._carry_out(decisions)

    def _carry_out(self, decisions: Sequence[do.Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, do.Tell):
                if decision.message.type == "go":
                    self.goes.append(decision.message)
                for to in decision.to:
                    self._tell(to, decision.message)
            elif isinstance(decision, (do.MakePlan, do.MakeRedo)):
                self.orders.append(decision)
            elif isinstance(decision, do.Emit):
                self.events.append(decision.event)
            elif isinstance(decision, do.End):
                self.ended = decision
