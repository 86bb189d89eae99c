"""Canonical form of memberships that need the same plan: numbers of failed pipelines and workers are labels, the count
of workers that each stage lost is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..plan import Action, Plan, Problem, Worker
from ..plan.grid import Grid


@dataclass(frozen=True)
class Canonical:
    """``problem`` has its failures in the first pipelines. ``workers`` and ``pipelines`` map its names back to those of
    the requested membership."""

    problem: Problem
    workers: Mapping[Worker, Worker]
    pipelines: tuple[int, ...]

    def back(self, plan: Plan, requested: Problem) -> Plan:
        """A plan for ``problem`` renamed for ``requested``."""
        return _renamed(plan, requested, self.workers, self.pipelines)

    def forth(self, plan: Plan) -> Plan:
        """A plan for the requested membership renamed for ``problem``."""
        place = {worker: own for own, worker in self.workers.items()}
        index = [self.pipelines.index(d) for d in range(len(self.pipelines))]
        return _renamed(plan, self.problem, place, index)


def _renamed(plan: Plan, problem: Problem, workers: Mapping[Worker, Worker], pipelines: Sequence[int]) -> Plan:
    """The plan as one for ``problem``, with its workers and pipelines renamed."""
    @cache
    def named(action: Action) -> Action:
        return action if action.kind == "S" else action._replace(pipeline=pipelines[action.pipeline])

    orders = {workers[w]: tuple(map(named, actions)) for w, actions in plan.workers.items()}
    crossings = {(pipelines[d], m): crossing for (d, m), crossing in plan.crossings.items()}
    return replace(plan, problem=problem, workers=dict(sorted(orders.items())), crossings=crossings, stated="")


def canonical(problem: Problem) -> Canonical:
    """The canonical form of a membership."""
    grid = problem.grid
    live = [problem.live(s) for s in range(grid.stages)]
    lost = [0] * grid.pipelines
    for worker in problem.failed:
        lost[worker.pipeline] += 1
    order = tuple(sorted(range(grid.pipelines), key=lambda d: (-lost[d], grid.microbatches[d], d)))
    back: dict[Worker, Worker] = {}
    failed = []
    for s, crew in enumerate(live):
        missing = grid.pipelines - len(crew)
        failed += [Worker(i, s) for i in range(missing)]
        at_home = {w.pipeline: w for w in crew}
        kept = {i: at_home[d] for i, d in enumerate(order) if i >= missing and d in at_home}
        taken = set(kept.values())
        others = [w for w in crew if w not in taken]
        for i in range(missing, grid.pipelines):
            back[Worker(i, s)] = kept[i] if i in kept else others.pop(0)
    own = {worker: place for place, worker in back.items()}
    costs = problem.costs
    speed = {own[w]: f for w, f in costs.speed.items() if w in own}
    return Canonical(
        replace(problem, grid=Grid(grid.stages, tuple(grid.microbatches[d] for d in order)),
                failed=tuple(failed),
                cap={own[w]: c for w, c in problem.cap.items() if w in own},
                costs=replace(costs, speed=dict(sorted(speed.items())))),
        back, order)
