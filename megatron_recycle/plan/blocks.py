"""Partial gradient sums that a worker keeps apart for the exact reduction (promise P3): an unbroken prefix of blocks,
or one block."""

from __future__ import annotations

from .errors import PlanError
from .grid import Worker
from .plan import Plan

Piece = tuple[int, int, int]
"""(pipeline, first block, last block) of one accumulator, both blocks inclusive."""


def pieces(plan: Plan, chunk: int) -> dict[Worker, tuple[Piece, ...]]:
    """Per live worker of the chunk's stage, the pieces of ``chunk``'s gradient that it accumulates apart, in logical
    order. An idle worker has none. Where each stage has one chunk, ``chunk`` is the stage's number.

    A helper's sums of lent layers are no pieces: the principal puts them where its own would be (`lent`).

    A worker folds only the unbroken prefix of a pipeline's blocks (0..j, all on it, each after the one before) into one
    piece. Every other block is a piece of its own: after a failure a worker may get a block when it has done a later
    one. With ``block`` 0 nothing is tracked: a worker has one piece ``(d, 0, 0)`` for each pipeline that it works for.
    Raises PlanError if a block is spread over several workers.
    """
    problem = plan.problem
    block = problem.block
    owner: dict[tuple[int, int], Worker] = {}
    found: dict[Worker, list[Piece]] = {worker: [] for worker in problem.live(problem.stage_of(chunk))}
    route = plan._route
    for d, m in problem.grid.items():
        worker = route.get((d, m, chunk))
        if worker is None:
            raise PlanError(f"micro-batch {m} of pipeline {d} has no worker at chunk {chunk}")
        if block == 0:
            if (d, 0, 0) not in found[worker]:
                found[worker].append((d, 0, 0))
            continue
        if owner.setdefault((d, m // block), worker) != worker:
            raise PlanError(f"block {m // block} of pipeline {d} is on two workers of chunk {chunk}")
    spans = {worker: _spans(plan, worker, chunk) for worker in {*owner.values()}}
    for (d, index), worker in sorted(owner.items()):
        mine = found[worker]
        if mine and mine[-1] == (d, 0, index - 1) and _follows(spans[worker], d, index):
            mine[-1] = (d, 0, index)
        else:
            mine.append((d, index, index))
    return {worker: tuple(mine) for worker, mine in found.items()}


def _spans(plan: Plan, worker: Worker, chunk: int) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Positions in the worker's list of the first and last gradient action, by kind, pipeline and block."""
    found: dict[tuple[str, int, int], tuple[int, int]] = {}
    block, place = plan.problem.block, plan.problem.place_of[chunk]
    for at, (kind, d, m, action_place) in enumerate(plan.workers[worker]):
        for half in ("B", "W") if kind == "FB" else (kind,):
            if half in ("B", "W") and action_place == place:
                key = half, d, m // block
                found[key] = found.get(key, (at,))[0], at
    return found


def _follows(spans: dict[tuple[str, int, int], tuple[int, int]], d: int, index: int) -> bool:
    """Whether all of block ``index`` comes after all of the block before."""
    return all(spans[half, d, index][0] > spans[half, d, index - 1][1] for half in ("B", "W")
               if (half, d, index) in spans)
