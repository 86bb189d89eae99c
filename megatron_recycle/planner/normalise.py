"""Failure normalisation: healthy workers of other stages move to a stage that was hit too hard.

Workers of one stage are interchangeable, so only the number that each stage lost counts. Where a stage lost many more
than others, a worker that moves there (it copies a peer's state) shortens every iteration. A limit on the load of all
stages says how many lost workers each stage tolerates; beyond that, it is filled by moves. So the fewest moves for each
possible limit follow stage by stage, and the best trade is picked.

Where layers may be lent, neighbouring stages share their work, and a move pays where that does not suffice.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..plan import Problem, Worker, lower_bound


@dataclass(frozen=True)
class Prices:
    """``move_cost``: iterations that one move costs; ``horizon``: iterations over which it has to pay off."""

    move_cost: float = 1.0
    horizon: float = 100.0


def normalise(problem: Problem, prices: Prices | None = None) -> dict[Worker, Worker]:
    """Moves that pay off: a worker, and the empty position of another stage that it takes.

    A stage without a live worker is filled at any cost, if another stage has more than one worker.
    """
    prices = prices or Prices()
    stages = range(problem.grid.stages)
    live = [list(problem.live(s)) for s in stages]
    counts = [len(crew) for crew in live]
    if sum(counts) < len(counts):
        return {}
    target = (_lent_target if problem.lends else _target)(problem, counts, prices)
    leaving = iter([w for s in stages for w in _leaving(problem, live[s], counts[s] - target[s])])
    wanted = [s for s in stages for _ in range(target[s] - counts[s])]
    empty, found = set(problem.failed), {}
    for mover, stage in sorted(zip(leaving, wanted, strict=True)):
        # Away from its own pipeline, so that vacancies lie in few pipelines.
        to = min((worker for worker in empty if worker.stage == stage),
                 key=lambda worker: (worker.pipeline == mover.pipeline, worker))
        empty.discard(to)
        found[mover] = to
    return found


def moved(problem: Problem, moves: Mapping[Worker, Worker]) -> Problem:
    """The problem after these moves: every mover keeps its speed in its new position, and its old position is empty."""
    taken = set(moves.values())
    speed = {moves.get(worker, worker): factor for worker, factor in problem.costs.speed.items() if worker not in taken}
    return replace(problem, failed=(*(worker for worker in problem.failed if worker not in taken), *moves),
                   costs=replace(problem.costs, speed=speed))


def load(problem: Problem, stage: int, workers: int) -> float:
    """Time that a stage needs for an iteration with so many workers of its usual speed."""
    if workers < 1:
        return float("inf")
    each = sum(map(problem.costs.work, problem.chunks_of[stage]))
    return -(-problem.grid.total // workers) * each + problem.costs.step[stage]


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


def _lent_target(problem: Problem, counts: list[int], prices: Prices) -> list[int]:
    """Workers per stage after the moves that pay off best where layers are lent besides: from the stage with least work
    per remaining worker to the one with most, one by one, as far as that pays. A stage without a worker gets one in any
    case."""
    stages, pipelines, now = range(len(counts)), problem.grid.pipelines, list(counts)
    work = [load(problem, s, 1) for s in stages]
    best, choice, moves, basis = float("inf"), now, 0, 0.0
    while True:
        if min(now) > 0:
            period = lower_bound(_with_crews(problem, now))
            basis = basis or period
            spent = period * prices.horizon + moves * prices.move_cost * basis
            if spent < best:
                best, choice = spent, list(now)
        poor = max((s for s in stages if now[s] < pipelines), default=None, key=lambda s: work[s] / max(now[s], 1e-9))
        rich = min((s for s in stages if now[s] > 1), default=None, key=lambda s: work[s] / (now[s] - 1))
        if poor is None or rich is None or work[rich] * max(now[poor], 1e-9) >= work[poor] * (now[rich] - 1):
            return choice
        now[rich] -= 1
        now[poor] += 1
        moves += 1


def _with_crews(problem: Problem, counts: list[int]) -> Problem:
    """The problem with this number of workers at each stage, any of them."""
    gone: list[Worker] = []
    for s, count in enumerate(counts):
        live = list(problem.live(s))
        others = [worker for worker in problem.failed if worker.stage == s]
        gone += [*_leaving(problem, live, len(live) - count), *others[max(0, count - len(live)):]]
    return replace(problem, failed=tuple(gone))


def _fill(table: dict[int, list[float]], counts: list[int], need: list[int]) -> list[int]:
    """Workers per stage after the moves: each mover comes from the stage that loses least by it."""
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
    """The ``count`` workers that move: those of the pipelines that lost most, as these are broken anyway."""
    if count <= 0:
        return []
    lost: dict[int, int] = {}
    for worker in problem.failed:
        lost[worker.pipeline] = lost.get(worker.pipeline, 0) + 1
    return sorted(live, key=lambda w: (-lost.get(w.pipeline, 0), -w.pipeline))[:count]
