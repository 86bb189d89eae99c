"""Failure normalisation: healthy workers of other stages move over when one stage was hit too hard.

Workers of one stage are interchangeable, so only the number that each stage lost counts. Where it lost much
more than others, moving a worker there (it copies a peer's state) shortens every iteration. For a load that
no stage shall exceed, each stage tolerates so many lost workers, and whatever a stage lost beyond that has to
be filled by a move; so the fewest moves for every possible load follow stage by stage, and the best trade is
picked.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from ..plan import Problem, Worker


@dataclass(frozen=True)
class Prices:
    """``move_cost``: iterations that one move costs; ``horizon``: iterations over which it has to pay off."""

    move_cost: float = 1.0
    horizon: float = 100.0


def normalise(problem: Problem, prices: Prices | None = None) -> Problem:
    """The problem with the moves that pay off added to ``stage_of``; itself where none does.

    A stage without a live worker is filled whatever it costs, if any other stage has a worker to spare; if
    none has, the problem comes back as it is and is refused by whoever plans it.
    """
    prices = prices or Prices()
    stages = range(problem.grid.stages)
    live = [list(problem.live(s)) for s in stages]
    counts = [len(crew) for crew in live]
    if sum(counts) < len(counts):
        return problem
    target = _target(problem, counts, prices)
    if target == counts:
        return problem
    moves: dict[Worker, int] = {}
    leaving = [w for s in stages for w in _leaving(problem, live[s], counts[s] - target[s])]
    for s in stages:
        for _ in range(max(0, target[s] - counts[s])):
            worker = leaving.pop(0)
            if s != worker.stage:
                moves[worker] = s
            else:
                moves.pop(worker, None)
    kept = {w: s for w, s in problem.stage_of.items() if w not in leaving}
    return replace(problem, stage_of={w: s for w, s in {**kept, **moves}.items() if s != w.stage})


def moves(before: Problem, after: Problem) -> int:
    """How many workers change their stage from one problem to the other."""
    return sum(1 for worker in after.live_workers() if before.stage(worker) != after.stage(worker))


def load(problem: Problem, stage: int, workers: int) -> float:
    """Time that a stage needs for an iteration with so many workers, were they all as fast as its usual
    one."""
    if workers < 1:
        return float("inf")
    costs = problem.costs
    each = costs.forward[stage] + costs.backward_input[stage] + costs.backward_weight[stage]
    return -(-problem.grid.total // workers) * each + costs.step[stage]


def _target(problem: Problem, counts: list[int], prices: Prices) -> list[int]:
    """Workers per stage after the moves that pay off best."""
    stages, total = range(len(counts)), sum(counts)
    table = {s: [load(problem, s, n) for n in range(problem.grid.pipelines + 1)] for s in stages}
    now = max(table[s][counts[s]] for s in stages)
    best, choice = now * prices.horizon, None
    for limit in sorted({t for row in table.values() for t in row if t < now}):
        need = [next((n for n, t in enumerate(table[s]) if t <= limit), problem.grid.pipelines + 1) for s in stages]
        if sum(need) > total or max(need) > problem.grid.pipelines:
            continue
        number = sum(max(0, n - have) for n, have in zip(need, counts))
        basis = limit if now == float("inf") else now
        spent = limit * prices.horizon + number * prices.move_cost * basis
        if spent < best:
            best, choice = spent, need
    if choice is None:
        return counts
    return _fill(table, counts, choice)


def _fill(table: dict[int, list[float]], counts: list[int], need: list[int]) -> list[int]:
    """Take the workers that are wanted from the stages that feel it least, one by one."""
    target = [max(have, n) for have, n in zip(counts, need)]
    wanted = sum(target) - sum(counts)
    heap = [(table[s][have - 1], s) for s, have in enumerate(counts) if have > need[s]]
    heapq.heapify(heap)
    for _ in range(wanted):
        _, s = heapq.heappop(heap)
        target[s] -= 1
        if target[s] > need[s]:
            heapq.heappush(heap, (table[s][target[s] - 1], s))
    return target


def _leaving(problem: Problem, live: list[Worker], count: int) -> list[Worker]:
    """Who moves: workers of the pipelines that lost most, as these are broken anyway."""
    if count <= 0:
        return []
    lost: dict[int, int] = {}
    for worker in problem.failed:
        lost[worker.pipeline] = lost.get(worker.pipeline, 0) + 1
    return sorted(live, key=lambda w: (-lost.get(w.pipeline, 0), -w.pipeline))[:count]
