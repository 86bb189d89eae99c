"""Lower bounds on period and makespan: no legal plan of the problem is better."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import NamedTuple, TypeVar

from .grid import Worker
from .plan import Plan
from .problem import Crossing, Problem


def lower_bound(problem: Problem) -> int:
    """Lower bound on the problem's objective, in the unit of the costs.

    Per stage, over all ways to deal out the micro-batches, the slowest worker with ``n`` of them needs

    * its work ``n (F+B+W)`` and the idle time before its first ``B``: a round trip through the later stages less the
      forwards that its cap lets it run meanwhile;
    * or the memory-time of ``n`` micro-batches (each held for at least a round trip) divided by its cap;

    and then the stage's step. A second bound follows from the earlier stages, each of which waits for a worker's last
    ``B``. That ``B`` comes after all forwards and backwards of the worker, its idle time, and each ``W`` that its cap
    does not let it put off. To this the bound adds the way there and back, one ``W`` and the earlier stage's own step.
    For the makespan it adds the way to the first ``F``.

    With lent layers or several chunks per stage the bound is that of their work (`_work`), which holds for all
    crossings and routes. Raises PlanError if a stage has no live worker.
    """
    problem.require_live()
    if problem.lends or problem.placement:
        return max(_work(problem), _chain(problem) if problem.objective == "makespan" else 0)
    stages, hop = problem.grid.stages, problem.costs.hop
    fastest = {kind: [min(problem.duration(kind, w) for w in problem.live(s)) for s in range(stages)]
               for kind in "FBW"}
    cold = problem.objective == "makespan"
    best = 0
    for stage in range(stages):
        trip = sum(fastest["F"][x] + fastest["B"][x] + 2 * hop for x in range(stage + 1, stages))
        crew = [_crew(problem, worker, trip) for worker in problem.live(stage) if problem.fits(worker)]
        span = _slowest(problem.grid.total, crew, _span)
        lead = _slowest(problem.grid.total, crew, _lead)
        head = sum(fastest["F"][x] + hop for x in range(stage))
        best = max(best, (head if cold else 0) + span + problem.costs.step[stage])
        forward = backward = 0
        for x in range(stage - 1, -1, -1):
            forward += fastest["F"][x] + hop
            backward += fastest["B"][x] + hop
            best = max(best, (head if cold else forward) + lead + backward + fastest["W"][x] + problem.costs.step[x])
    return best


def bound_of(plan: Plan) -> int:
    """`lower_bound` of the plan's problem. For a plan that begins with done actions, a bound on the rest: of the
    stages' live workers, the fastest at everything, none has less than an equal share."""
    if not plan.done:
        return lower_bound(plan.problem)
    problem, work = plan.problem, [0] * plan.problem.grid.stages
    fastest: dict[tuple[str, int, int, Crossing], int] = {}
    for worker in plan.workers:
        for action in plan.rest(worker):
            key = action.kind, worker.stage, action.chunk, plan.crossing(*action[1:3])
            if action.kind != "S" and key not in fastest:
                fastest[key] = min(problem.duration(key[0], peer, *key[2:]) for peer in problem.live(worker.stage))
            work[worker.stage] += fastest.get(key, 0)
    return max(-(-total // len(problem.live(stage))) + problem.costs.step[stage] for stage, total in enumerate(work))


def _work(problem: Problem) -> int:
    """Work bound for every unbroken run of chunks: the work that cannot be lent away is done by the live workers of its
    stages, in the time that their steps leave them.

    A worker of slowness ``x`` does ``(T - step) / x`` of work in a time ``T``; rounding, and spans of negative cost,
    only add to it. So ``T`` is no less than (work + sum of step / x) / (sum of 1 / x). Where nothing is lent, a stage's
    workers also share whole actions: the busiest has at least its part of an even deal, with each action as short as
    the shortest.
    """
    best = Fraction(0)
    for first in range(problem.chunks):
        inner = 0
        for last in range(first, problem.chunks):
            inner += problem.costs.work(last)
            kept = inner - (_lendable(problem, first, first - 1, 1) if first else 0) - (
                _lendable(problem, last, last, 0) if last + 1 < problem.chunks else 0)
            stages = {problem.stage_of(chunk) for chunk in range(first, last + 1)}
            best = max(best, _shared(problem, problem.grid.total * max(0, kept), stages))
    if not problem.lends:
        for stage, chunks in enumerate(problem.chunks_of):
            crew, each = problem.live(stage), min(problem.costs.work(chunk) for chunk in chunks)
            best = max(best, _shared(problem, problem.grid.total * sum(problem.costs.work(c) for c in chunks), {stage}))
            dealt = _slowest(problem.grid.total * len(chunks), [(problem.costs.speed.get(w, 1), each) for w in crew],
                             lambda count, one: int(count * one[1] * Fraction(str(one[0]))))
            best = max(best, Fraction(dealt + problem.costs.step[stage]))
    return -(-best.numerator // best.denominator) if problem.objective == "makespan" else int(best)


def _lendable(problem: Problem, chunk: int, boundary: int, way: int) -> int:
    """Most work of one micro-batch in ``chunk`` that other workers can do, across ``boundary``."""
    return problem.lend[boundary][way] * sum(problem.costs.layer[chunk]) if problem.lends else 0


def _shared(problem: Problem, work: int, stages: set[int]) -> Fraction:
    """Least time in which the live workers of ``stages`` do this ``work`` and their steps."""
    rate, needed = Fraction(0), Fraction(work)
    for stage in stages:
        for worker in problem.live(stage):
            speed = 1 / Fraction(str(problem.costs.speed.get(worker, 1)))
            rate += speed
            needed += problem.costs.step[stage] * speed
    return needed / rate


def _chain(problem: Problem) -> int:
    """One micro-batch's way down and up, at the speed of the fastest workers, plus the shortest step."""
    speed = min(Fraction(str(problem.costs.speed.get(worker, 1))) for worker in problem.live_workers())
    costs = problem.costs
    work = sum(costs.forward) + sum(costs.backward_input)
    return int(work * speed) + min(costs.step)


class _Crew(NamedTuple):
    """One worker's durations and memory limits for the bounds, in the units of costs and caps."""

    forward: int
    backward: int
    weight: int
    trip: int
    held: int  # memory-time of one micro-batch
    ahead: int | None  # forwards that fit before the first B
    late: int | None  # W that may be put off behind the last B
    cap: int | None


def _crew(problem: Problem, worker: Worker, trip: int) -> _Crew:
    stage, cap = worker.stage, problem.cap.get(worker)
    before, after = problem.before_b[stage], problem.after_b[stage] if problem.split_backward else 0
    f, b, w = (problem.duration(kind, worker) for kind in "FBW")
    during_w = min(before, after) if stage in problem.full_backward else after
    return _Crew(f, b, w, trip, before * (f + trip + b) + during_w * w,
                 None if cap is None or before == 0 else cap // before,
                 None if cap is None or after == 0 else cap // after, cap)


def _idle(count: int, crew: _Crew) -> int:
    """Least idle time before the first ``B``."""
    ahead = count if crew.ahead is None else min(crew.ahead, count)
    return max(0, crew.trip - (ahead - 1) * crew.forward)


def _span(count: int, crew: _Crew) -> int:
    """Least time from first ``F`` to last action of a worker that runs ``count`` micro-batches."""
    busy = count * (crew.forward + crew.backward + crew.weight) + _idle(count, crew)
    return busy if crew.cap is None else max(busy, -(-count * crew.held // crew.cap))


def _lead(count: int, crew: _Crew) -> int:
    """Least time from first ``F`` to last ``B`` of a worker that runs ``count`` micro-batches."""
    early = 0 if crew.late is None else max(0, count - crew.late)
    return count * (crew.forward + crew.backward) + early * crew.weight + _idle(count, crew)


One = TypeVar("One", bound=Hashable)


def _slowest(total: int, crew: list[One], time: Callable[[int, One], int]) -> int:
    """The least time of the slowest worker over all ways to deal ``total`` micro-batches."""
    if len(set(crew)) == 1:
        return time(-(-total // len(crew)), crew[0])
    # one by one to the worker that is done first is optimal for the slowest, as every time grows with its count
    heap = [(time(1, one), index, 1) for index, one in enumerate(crew)]
    heapq.heapify(heap)
    slowest = 0
    for _ in range(total):
        slowest, index, count = heap[0]
        heapq.heapreplace(heap, (time(count + 1, crew[index]), index, count + 1))
    return slowest
