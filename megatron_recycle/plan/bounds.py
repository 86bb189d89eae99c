"""Lower bounds on period and makespan: no legal plan of the problem is better."""

from __future__ import annotations

import heapq

from .problem import Problem


def lower_bound(problem: Problem) -> int:
    """A bound on the problem's objective, in the unit of the costs. Raises PlanError if a stage has no live
    worker.

    Per stage: the least busy time of its slowest worker over all ways to deal out the micro-batches, where a
    worker with ``n`` of them needs the larger of

    * its work ``n (F+B+W)`` and the idle time before its first ``B``: a round trip through the later stages
      less the forwards that its cap lets it run meanwhile;
    * the memory-time of ``n`` micro-batches (each held for at least a round trip) divided by its cap.

    To that the stage's step is added; for the makespan also the forwards before its first and, without split,
    the backwards after its last action. The formulas are those of the scheduling study (facts/planner.md),
    here per worker.
    """
    problem.require_live()
    stages, hop = problem.grid.stages, problem.costs.hop
    fastest = {kind: [min(problem.duration(kind, w) for w in problem.live(s)) for s in range(stages)]
               for kind in "FBW"}
    best = 0
    for stage in range(stages):
        trip = sum(fastest["F"][x] + fastest["B"][x] + 2 * hop for x in range(stage + 1, stages))
        busy = _busy(problem, stage, trip)
        step = problem.costs.step[stage]
        if problem.objective == "period":
            best = max(best, busy + step)
            continue
        head = sum(fastest["F"][x] + hop for x in range(stage))
        tail = step
        if not problem.split_backward:
            drain = 0
            for earlier in range(stage - 1, -1, -1):
                drain += hop + fastest["B"][earlier]
                tail = max(tail, drain + problem.costs.step[earlier])
        best = max(best, head + busy + tail)
    return best


def _busy(problem: Problem, stage: int, trip: int) -> int:
    """Least possible span from first ``F`` to last action of the stage's slowest worker."""
    spans = []
    before, after = problem.before_b[stage], problem.after_b[stage] if problem.split_backward else 0
    for worker in problem.live(stage):
        if not problem.fits(worker):
            continue
        f, b, w = (problem.duration(kind, worker) for kind in "FBW")
        spans.append((f + b + w, f, before * (f + trip + b) + after * w, problem.cap.get(worker)))
    total = problem.grid.total
    if len(set(spans)) == 1:
        return _span(-(-total // len(spans)), spans[0], before, trip)
    # dealing one by one to whoever is done first is optimal for the slowest, as every span grows with its
    # count
    heap = [(_span(1, item, before, trip), index, 1) for index, item in enumerate(spans)]
    heapq.heapify(heap)
    span = 0
    for _ in range(total):
        span, index, count = heap[0]
        heapq.heapreplace(heap, (_span(count + 1, spans[index], before, trip), index, count + 1))
    return span


def _span(count: int, item: tuple[int, int, int, int | None], before: int, trip: int) -> int:
    work, forward, memory_time, cap = item
    ahead = count if cap is None or before == 0 else min(cap // before, count)
    busy = count * work + max(0, trip - (ahead - 1) * forward)
    return busy if cap is None else max(busy, -(-count * memory_time // cap))
