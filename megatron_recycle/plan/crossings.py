"""Lent layers as the crossings of a plan imply them: who runs a layer of another stage, for whom, and what it holds.

A micro-batch that crosses a boundary later than at home has the first layers of the later chunk run by the worker of
the earlier chunk; one that crosses it earlier has the last layers of the earlier chunk run by the worker of the later
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .grid import Worker
from .plan import Plan


class Lent(NamedTuple):
    """``layers`` layers of ``chunk`` are run by ``helper`` for one micro-batch: the chunk's last ones if ``tail``, else
    its first ones. ``principal``, the worker of the chunk's own stage that runs the rest of the chunk for that
    micro-batch, gets the helper's gradients and gives it the parameters. ``by``: the chunk whose actions they are
    run in. Chunks are counted through the model."""

    helper: Worker
    principal: Worker
    chunk: int
    tail: bool
    layers: int
    pipeline: int
    microbatch: int
    by: int


def lent(plan: Plan) -> Iterator[Lent]:
    """Everything that is lent in an iteration, by micro-batch and boundary."""
    route = plan._route
    for (d, m), crossing in plan.crossings.items():
        for boundary, by in enumerate(crossing):
            chunk, helps = (boundary + 1, boundary) if by > 0 else (boundary, boundary + 1)
            if by and (d, m, chunk) in route and (d, m, helps) in route:
                yield Lent(route[d, m, helps], route[d, m, chunk], chunk, by < 0, abs(by), d, m, helps)


def borrowings(plan: Plan) -> dict[Worker, dict[tuple[int, bool], int]]:
    """For every helper what it must hold of other stages' chunks: for (chunk, whether its end) the number of layers."""
    found: dict[Worker, dict[tuple[int, bool], int]] = {}
    for each in lent(plan):
        mine = found.setdefault(each.helper, {})
        key = each.chunk, each.tail
        mine[key] = max(each.layers, mine.get(key, 0))
    return found


def borrowed(plan: Plan, worker: Worker) -> dict[tuple[int, bool], int]:
    """What ``worker`` must hold of other stages' chunks, as `borrowings` says it."""
    return borrowings(plan).get(worker, {})
