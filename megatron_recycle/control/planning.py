"""The choice of plans: the planner as the coordinator needs it, as callables over a job's description."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_recycle.control.event_fields import EventFields
from megatron_recycle.control.lending_costs import copy_price, with_lending
from megatron_recycle.control.moves import moves_of
from megatron_recycle.control.resizing import resized
from megatron_recycle.measure.measurements import Measured, Measurements
from megatron_recycle.membership.decisions import MakeRedo
from megatron_recycle.membership.description import Job
from megatron_recycle.membership.lendable import allows
from megatron_recycle.plan import Action, Costs, Plan, Problem, Worker, borrowings, overfull, pairs
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.planner import Cache, ConnectionPrice, ahead, improve, lent_schedules, plan_for, recosted, worth
from megatron_recycle.planner.baselines import drop
from megatron_recycle.planner.redo import redo

log = logging.getLogger(__name__)

WORTHWHILE = 0.02
"""The least relative gain in time for which a plan in use is replaced."""
_LENT = 8  # plans that lend layers; an interrupted iteration has followed a recent one
_KEPT = 1000  # plans made ahead; those for outdated costs are of no use


def problem_of(job: Job, failed: frozenset[str], measured: Measured | None = None) -> Problem:
    """The planner's problem for a job without its `failed` workers.

    The job's `costs` are a plan file's (default: what was `measured`, and before that 1 for each kind of work). Its
    `cap` is a number of activations for every worker, or an object with one for each; by default a worker may hold
    twice the maximum of 1F1B, or less where its measured memory is smaller. `placement`: the stage of each chunk, where
    stages have several.
    """
    grid, costs, placement = job.grid, job.costs, job.placement
    at_home = placement or range(grid.stages)
    live = [worker for worker in grid.workers() if str(worker) not in failed]
    cap = job.cap or 2 * len(at_home)
    memory = measured.memory if measured is not None and not job.cap else None
    if not isinstance(cap, int):
        caps = {worker: cap[str(worker)] for worker in live if str(worker) in cap}
    elif memory is None:
        caps = dict.fromkeys(live, cap)
    else:
        caps = {worker: memory.cap(worker, cap) for worker in live}
    return Problem(
        grid=grid,
        costs=Costs.from_json(costs) if costs else measured.costs.by_chunk(placement) if measured else Costs.uniform(
            len(at_home), 1, 1, 1),
        failed=tuple(Worker.parse(name) for name in failed),
        cap=caps,
        before_b=memory.before_b if memory is not None else (),
        after_b=memory.after_b if memory is not None else (),
        message=memory.message if memory is not None else (),
        block=job.block,
        tied=tuple(tuple(at_home.index(stage) for stage in group) for group in job.tied),
        split_backward=job.split_backward,
        full_backward=tuple(chunk for chunk, stage in enumerate(at_home)
                            if stage in job.full_backward),
        objective=job.objective,
        placement=placement,
    )


def partner_price(job: Job, measured: Measured | None) -> ConnectionPrice:
    """The price of a pair of workers without a connection yet. It is known in seconds, so it counts only among plans
    with measured durations."""
    in_seconds = measured is not None and not job.costs
    return ConnectionPrice(1e6 * job.partner_cost if in_seconds else 0.0, job.horizon)


class Planning:
    """`plan` at once and `improve` in the background, with the best plan of each membership kept.

    While no other search runs, the plans of the likeliest next memberships are made ahead, each for all memberships
    that are equal up to names, so that most failures find their plan ready.

    Args:
        handed_out: called with every plan handed out; see `plan_folder`.
    """

    def __init__(self, handed_out: Callable[[Plan], None] = lambda plan: None) -> None:
        self._handed_out = handed_out
        self._cache = Cache()
        self._measurements = Measurements()
        self._before: Measured | None = None  # the measurements before the last change, for which plans were made ahead
        self._best: dict[frozenset[str], Plan] = {}
        self._lent: dict[str, Plan] = {}
        """The last plans handed out that lend layers, by digest."""
        self._lock = threading.Lock()
        self.ahead: threading.Thread | None = None
        """The thread that makes plans ahead; None before its start."""

    def plan(self, job: Job, failed: frozenset[str]) -> PlanFile:
        """The best known plan, or the heuristic's. Raises PlanError if a stage has no worker left."""
        dealt = job.chosen.always_whole
        with self._lock:
            self._measure(job, failed)
            known = None if dealt else self._best.get(failed)
        if known is None:
            problem = problem_of(job, failed, self._measurements.known)
            if dealt:
                known = drop(problem)
            else:
                known = self._made(problem, problem_of(job, failed, self._before),
                                   job.seed,
                                   partner_price(job, self._measurements.known))
            if not dealt:
                with self._lock:
                    self._best[failed] = known
        return self._hand_out(known)

    def _hand_out(self, plan: Plan) -> PlanFile:
        self._handed_out(plan)
        if plan.crossings:
            self._lent[plan.digest] = plan
            while len(self._lent) > _LENT:
                del self._lent[next(iter(self._lent))]
        return plan.to_file()

    def _made(self, problem: Problem, before: Problem, seed: int, price: ConnectionPrice) -> Plan:
        """The cached plan, or the heuristic's, or the cached plan for the costs ``before`` if that is better and still
        fits in memory. All partners count as new, since the communicator is made anew."""
        fresh = before != problem and problem not in self._cache
        plan = plan_for(problem, self._cache, work=0, seed=seed)
        earlier = self._cache.get(before) if fresh else None
        if earlier is None:
            return plan
        again = recosted(problem, earlier)
        if overfull(again):
            return plan
        return min(plan, again, key=lambda each: (price.total(each, frozenset()), each.objective_value))

    def redo(self, job: Job, order: MakeRedo) -> PlanFile | None:
        """A plan for the rest of an iteration (`planner.redo`), which may differ in size from the plan. None if there
        is none, if the rest takes longer than the whole and no stage is closed, or if the plan that lent layers is
        unknown here or lends layers that may no longer be lent. Raises PlanError."""
        whole, lent_by = _sized(Plan.from_file(order.plan), *order.size), self._lent.get(order.lent)
        if order.lent and (lent_by is None or not allows(job.lending, lent_by.to_file())):
            return None
        rest = redo(whole, {Worker.parse(name): [Action.parse(action) for action in actions]
                            for name, actions in order.done.items()}, order.closed, lent_by)
        if rest is None:
            return None
        anew = recosted(rest.problem, whole) if rest.crossings else whole
        longer = rest.makespan > anew.makespan and not order.closed
        return None if longer else self._hand_out(rest)

    def resume(self, job: Job, failed: frozenset[str], events: Sequence[Mapping[str, Any]]) -> None:
        """Plan for a job led by another coordinator until now; `events` are those so far."""
        profiled = [event for event in events if EventFields.from_json(event).event == "profiled"]
        with self._lock:
            self._measure(job, failed)
            if profiled:
                try:
                    self._measurements.restore(profiled[-1])
                except (KeyError, TypeError, ValueError, AttributeError):  # it is measured again
                    log.warning("recycle: what was measured before cannot be read again", exc_info=True)

    def _measure(self, job: Job, failed: frozenset[str]) -> None:
        """Expect measurements of the workers that live without `failed`."""
        problem = problem_of(job, failed)
        self._measurements.live = frozenset(map(str, problem.live_workers()))
        self._measurements.placement = problem.placement

    @property
    def slow(self) -> Mapping[str, float]:
        """Stragglers, with the factor of their time over their peers'."""
        return self._measurements.slow

    def measured(self, profile: Mapping[str, Any], incarnation: str = "") -> Measured | None:
        """Take in one worker's measurements. Once all live workers have reported, returns the job's measurements if
        they have changed enough for new plans."""
        with self._lock:
            before = self._measurements.known
            if not self._measurements.take(profile, incarnation):
                return None
            # Earlier plans are still legal, or were then, but perhaps no longer the best to begin with.
            self._best, self._before = {}, before
            if len(self._cache) > _KEPT:
                self._cache = Cache()
            return self._measurements.known

    def spent(self) -> dict[str, Any] | None:
        """The breakdown of the workers' time, when it is due."""
        with self._lock:
            return self._measurements.spent()

    def improve(
        self,
        job: Job,
        failed: frozenset[str],
        plan: PlanFile,
        cancelled: threading.Event,
    ) -> PlanFile | None:
        """A better plan within the job's `planner_budget`, or None. It is cached in any case.

        With measured costs, which are never exact, it must be better by a share of `WORTHWHILE`, and its savings in the
        job's `horizon` must exceed the cost of its new partners.

        A plan that exceeds the memory is replaced by one that does not, with or without a budget. Afterwards plans for
        the likeliest next failures are made, until ``cancelled``.

        Only here may layers be lent, if that gains more in the horizon than the copies cost: after a failure a job goes
        on at once with its own layers, and a worker that is back ends lending.
        """
        budget = job.planner_budget
        if cancelled.is_set() or plan.source == "drop":
            return None
        problem = problem_of(job, failed, self._measurements.known)
        seed = job.seed
        used, plain = Plan.from_file(plan), problem
        lending = with_lending(problem, job, self._measurements.known)
        # Once a slow worker is fast again, its peers have borrowed too many layers.
        if lent_schedules.helps(lending) or used.crossings:
            problem = lending
        replaced = plan_for(plain, work=0) if used.crossings and not problem.lends else None
        incumbent = replaced or recosted(problem, used)
        before = _time(incumbent, plain.objective)
        if overfull(incumbent):
            # The plan in use holds more than there is memory for, by newer measurements.
            replaced = plan_for(plain, self._cache, work=0, seed=seed)
            incumbent = recosted(problem, replaced)
        better = replaced
        if budget > 0:
            better = self._searched(problem, incumbent, budget, seed, cancelled) or replaced
        if better is not None and better.crossings:
            price = copy_price(job, self._measurements.known)
            decision = worth(_timed(incumbent, plain.objective), better, price, borrowings(incumbent))
            log.info("recycle: %s", decision.line)
            better = replace(better, stats={**better.stats, "lending": decision.line})
            if not decision.pays:
                self._cache.put(problem, better)
                better = replaced
                if not incumbent.crossings and not cancelled.is_set():
                    better = improve(plain, recosted(plain, used), budget, seed, cancelled.is_set) or replaced
        if budget > 0 and not cancelled.is_set():
            self.ahead = threading.Thread(
                target=self._plan_ahead, args=(plain, budget, seed, cancelled), name="recycle-ahead", daemon=True
            )
            self.ahead.start()
        if better is None:
            return None
        measured = not job.costs and self._measurements.known is not None
        partners = partner_price(job, self._measurements.known)
        new_partners = partners.of(better, pairs(incumbent))
        pays = not new_partners or (before - _time(better, plain.objective)) * partners.horizon > new_partners
        taken = replaced is not None or not measured or (
            _time(better, plain.objective) < (1 - WORTHWHILE) * before and pays)
        if not better.crossings:
            # A problem with lending may count in a finer unit.
            better = replace(recosted(plain, better), stats=better.stats)
            with self._lock:
                self._best[failed] = better
        self._cache.put(better.problem, better)
        if not taken and better.crossings:
            log.info("recycle: that is not taken up: it gains less than %.0f %%, or than its new partners cost",
                     100 * WORTHWHILE)
        return self._hand_out(better) if taken else None

    def _searched(self, problem: Problem, incumbent: Plan, budget: float, seed: int,
                  cancelled: threading.Event) -> Plan | None:
        """A better plan than the ``incumbent``. With lending: the cached plan, the heuristic's, or a search's result
        from there."""
        known = plan_for(problem, self._cache, work=0, seed=seed) if problem.lends else None
        if known is None or known.objective_value >= incumbent.objective_value:
            return improve(problem, incumbent, budget, seed, cancelled.is_set)
        return improve(problem, known, budget, seed, cancelled.is_set) or known

    def moves(self, job: Job, failed: frozenset[str]) -> dict[str, str]:
        """By member, the empty position of another stage that it should take."""
        if job.chosen.avoids_hit:
            return {}
        problem = problem_of(job, failed, self._measurements.known)
        return moves_of(with_lending(problem, job, self._measurements.known), job)

    def _plan_ahead(self, problem: Problem, budget: float, seed: int, cancelled: threading.Event) -> None:
        for likely in ahead(problem):
            if cancelled.is_set():
                return
            if likely not in self._cache:
                found = plan_for(likely, None, work=0, budget_s=budget, seed=seed, cancelled=cancelled.is_set)
                if not cancelled.is_set():  # the result of a cancelled search is not worth caching
                    self._cache.put(likely, found)


def _sized(plan: Plan, microbatches: int, block: int) -> Plan:
    """The equivalent of ``plan`` with this many micro-batches in each pipeline."""
    grid = plan.problem.grid
    if microbatches == max(grid.microbatches):
        return plan
    return resized(plan, replace(grid, microbatches=(microbatches,) * grid.pipelines), block)


def _timed(plan: Plan, objective: str) -> Plan:
    """The plan, with the time of an iteration as its `Plan.objective_value`. Workers overlap iterations by the job's
    ``objective``, except those with lent layers."""
    return plan if plan.crossings else replace(plan, problem=replace(plan.problem, objective=objective))


def _time(plan: Plan, objective: str) -> float:
    return float(_timed(plan, objective).objective_value)
