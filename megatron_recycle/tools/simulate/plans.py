"""Plans for the simulation: the planner's own, each made once for all memberships that need the same one.

Workers of a stage are interchangeable, so a plan depends on how many workers each stage has lost (`planner.canonical`).
On large grids the stages' places are left out as well: the same numbers of losses in another order count as one
(``shapes="multiset"``). On the tested grids that changes a period by up to 5 % where micro-batches are few (less than
three times the stages), and about 1 % where they are many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_recycle.control.lending_costs import finer, with_lending
from megatron_recycle.membership.description import Job as Described
from megatron_recycle.membership.description import Lending
from megatron_recycle.plan import Costs, Grid, Plan, Problem, Worker
from megatron_recycle.planner import plan_for
from megatron_recycle.planner.adjoin import adjoined
from megatron_recycle.planner.alignment import aligned, natural
from megatron_recycle.planner.api import TWICE
from megatron_recycle.planner.baselines import drop, one_f_one_b, shaped
from megatron_recycle.planner.instance import Schedule, build
from megatron_recycle.planner.portfolio import TEMPLATES, goal, run
from megatron_recycle.tools.simulate.job import Job

SEARCHED = 5_000
"""Most actions of a plan that is searched for, as a job's background search would; larger ones are the quick plan's."""
WORK = 60_000
"""Actions that such a search schedules per cap level."""
LENT = 2
"""Most layers lent at a boundary: the setting `lend_layers`."""
PARAMETERS = 1 / 8
"""Parameters' share of a worker's state: two bytes of sixteen, beside gradients, master weights and moments."""
EXACT = 60_000
"""Most actions of a plan with which stages keep their places in a shape."""


@dataclass(frozen=True)
class Figures:
    """A plan's times in seconds: each iteration when they follow one another, and one alone."""

    period: float
    makespan: float


class Plans:
    """Figures by shape of the membership.

    Args:
        technique: of the paper's ablation: adaptive, decoupled or staggered.
        shapes: "exact", "multiset", or "auto": by the size of the plan.
        work: actions that a search may schedule; None: as a real job's, on small plans.
    """

    def __init__(self, job: Job, technique: str = "staggered", shapes: str = "auto", work: int | None = None) -> None:
        self.job = job
        self.technique = technique
        actions = 3 * job.stages * job.pipelines * job.microbatches
        self.exact = actions <= EXACT if shapes == "auto" else shapes == "exact"
        self.work = (WORK if actions <= SEARCHED else 0) if work is None else work
        self._known: dict[object, Figures] = {}

    def __len__(self) -> int:
        """Distinct plans that were made."""
        return len(self._known)

    def rerouted(self, failed: Collection[Worker], microbatches: tuple[int, ...] | None = None) -> Figures:
        """Peers take over, by the planner's plan. Raises PlanError if a stage has no worker left."""
        shape = self._shape(failed)
        return self._once(("reroute", shape, microbatches), lambda: self._planned(self._lost(shape, microbatches)))

    def lent(self, failed: Collection[Worker], microbatches: tuple[int, ...] | None = None) -> Figures:
        """Neighbouring stages run some of a hit stage's layers besides (`lend: auto`), where that is faster."""
        shape = self._shape(failed)
        usual = self.rerouted(failed, microbatches)
        most, costs = min(LENT, self.job.layers - 1), self.job.costs
        work = [sum(own) for own in zip(costs.forward, costs.backward_input, costs.backward_weight)]
        if not any(shape) or most < 1 or self.job.stages < 2 or not min(work):
            return usual

        def made() -> Figures:
            problem, times = self._lending(self._lost(shape, microbatches), most, work)
            found = self._figures(plan_for(problem, None, work=self.work), self.job.unit / times)
            return min(usual, found, key=lambda one: one.period)

        return self._once(("lent", shape, microbatches), made)

    def _lending(self, problem: Problem, most: int, work: Sequence[int]) -> tuple[Problem, int]:
        """The problem in which ``most`` layers of each boundary may be lent, in the coordinator's form, and how many of
        its units are one of the job's. All layers are alike, on all stages; a stage's extra ``work`` is an embedding's
        or the loss's."""
        job, stages = self.job, self.job.stages
        described = Described(grid=problem.grid, costs=job.costs.to_json(), lending=Lending(
            ((most, most),) * (stages - 1), (job.layers,) * stages,
            tuple(min(work) / job.layers / own for own in work), (0,) * stages))
        found, times = with_lending(problem, described, None), finer(described)
        lag = round(times * most / job.layers * PARAMETERS * job.state_seconds / job.unit)
        return replace(found, costs=replace(found.costs, lent=(lag, lag))), times

    def _shape(self, failed: Collection[Worker]) -> tuple[int, ...]:
        """Workers lost per stage, as far as plans depend on it."""
        lost = Counter(worker.stage for worker in failed)
        shape = tuple(lost[stage] for stage in range(self.job.stages))
        if self.exact:
            return shape
        middle = self.job.stages // 2  # most losses in the middle, where a hit stage costs neither least nor most
        order = sorted(range(self.job.stages), key=lambda stage: abs(stage - middle))
        return tuple(count for _, count in sorted(zip(order, sorted(shape, reverse=True))))

    def natural(self, failed: Collection[Worker]) -> Figures:
        """The same without alignment: every worker stands for its own pipeline, failed ones for themselves."""
        by: dict[int, list[int]] = {}
        for worker in sorted(failed):
            by.setdefault(worker.pipeline, []).append(worker.stage)
        shape = tuple(sorted(map(tuple, by.values())))
        gone = tuple(Worker(pipeline, stage) for pipeline, row in enumerate(shape) for stage in row)
        return self._once(("natural", shape), lambda: self._natural(self.job.problem(failed=gone)))

    def dropped(self, hit: int, microbatches: tuple[int, ...] | None = None) -> Figures:
        """``hit`` pipelines are left out, the others take their micro-batches. Raises PlanError if none is left."""
        def made() -> Figures:
            gone = tuple(Worker(pipeline, 0) for pipeline in range(hit))
            return self._figures(drop(shaped(self.job.problem(microbatches, gone), "staggered")))

        return self._once(("drop", hit, microbatches), made)

    def stock(self, microbatches: tuple[int, ...] | None = None) -> Figures:
        """1F1B of whole pipelines with so many micro-batches each (default: the job's), which step together."""
        most = max(microbatches or (self.job.microbatches,))
        # Pipelines do not wait for each other before their step.
        return self._once(("1f1b", most), lambda: self._alone(self.job.problem((most,))))

    def recut(self, shares: tuple[int, ...], layers: int, counts: tuple[int, ...]) -> Figures:
        """Stages have ``shares`` of their pipelines' ``layers * stages`` layers, and ``counts`` workers are lost."""
        def made() -> Figures:
            costs = self.job.costs
            rows = [tuple(round(value * share / layers) for value, share in zip(row, shares)) for row in _rows(costs)]
            return self._planned(replace(self._lost(counts, None), costs=_costs(rows, costs.hop)))

        return self._once(("recut", shares, counts), made)

    def template(self, length: int, microbatches: int) -> float:
        """Seconds of 1F1B in a pipeline of ``length`` workers, its layers dealt as evenly as possible."""
        def made() -> Figures:
            costs, layers = self.job.costs, self.job.layers
            cut = [self.job.all_layers * part // length for part in range(length + 1)]
            rows = [tuple(round(sum(row[layer // layers] for layer in range(*ends)) / layers) for ends in pairwise(cut))
                    for row in _rows(costs)]
            grid = Grid(length, (microbatches,))
            return self._alone(Problem(grid, _costs(rows, costs.hop), cap=dict.fromkeys(grid.workers(), 2 * length)))

        return self._once(("template", length, microbatches), made).period

    def _once(self, key: object, make: Callable[[], Figures]) -> Figures:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make()
        return found

    def _lost(self, shape: tuple[int, ...], microbatches: tuple[int, ...] | None) -> Problem:
        gone = tuple(Worker(pipeline, stage) for stage, count in enumerate(shape) for pipeline in range(count))
        return self.job.problem(microbatches, gone)

    def _planned(self, problem: Problem) -> Figures:
        requested = shaped(problem, self.technique)
        plan: Plan | Schedule = plan_for(requested, None, work=self.work) if self.work else _quickly(requested)
        found = self._figures(plan)
        return found if self.technique == "staggered" else replace(found, period=found.makespan)

    def _alone(self, problem: Problem) -> Figures:
        """Stock 1F1B of one pipeline."""
        plan = one_f_one_b(replace(problem, split_backward=False, objective="makespan"))
        return replace(self._figures(plan), period=plan.makespan * self.job.unit)

    def _natural(self, problem: Problem) -> Figures:
        instance = build(shaped(problem, "staggered"))
        alignment = natural(instance)
        found = [run(instance, template, alignment) for template in TEMPLATES[:4 if self.work else 2]]
        return self._figures(min(found, key=lambda one: goal(instance.problem, one)))

    def _figures(self, plan: Plan | Schedule, unit: float | None = None) -> Figures:
        """A plan's figures, with so many seconds to a unit of its costs (default: the job's)."""
        seconds = self.job.unit if unit is None else unit
        return Figures(plan.period * seconds, plan.makespan * seconds)


def _rows(costs: Costs) -> tuple[tuple[int, ...], ...]:
    """Forward, input gradient, weight gradient and step of each stage."""
    return costs.forward, costs.backward_input, costs.backward_weight, costs.step


def _costs(rows: list[tuple[int, ...]], hop: int) -> Costs:
    forward, backward, weight, step = rows
    return Costs(forward, backward, weight, hop, step)


def _quickly(problem: Problem) -> Schedule:
    """The times of the planner's quick plan, without the plan."""
    instance = build(problem)
    alignment = aligned(instance)
    found = [run(instance, TEMPLATES[0], alignment)]
    guests = found[0].route != [home[pipeline] for home in alignment.home for pipeline in alignment.label]
    if guests and instance.actions <= TWICE:
        found.append(run(instance, TEMPLATES[1], alignment))
    return adjoined(instance, min(found, key=lambda one: goal(problem, one)))
