"""Lent layers that a plan's crossings imply: helper, principal, and the layers that the helper must hold.

A micro-batch that crosses a boundary later than at home has the first layers of the later chunk run by the worker of
the earlier chunk. A micro-batch that crosses it earlier has the last layers of the earlier chunk run by the worker of
the later chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .grid import Worker
from .plan import Plan


class Lent(NamedTuple):
    """One loan for one micro-batch: ``helper`` runs ``layers`` layers of ``chunk``, its last ones if ``tail``, else its
    first ones. ``principal``, the worker of the chunk's own stage that runs the rest of the chunk for that micro-batch,
    gets the helper's gradients and gives it the parameters. ``by``: the chunk whose actions the layers are run in.
    Chunks are counted through the model."""

    helper: Worker
    principal: Worker
    chunk: int
    tail: bool
    layers: int
    pipeline: int
    microbatch: int
    by: int


def lent(plan: Plan) -> Iterator[Lent]:
    """All loans of an iteration, by micro-batch and boundary."""
    route = plan._route
    for (d, m), crossing in plan.crossings.items():
        for boundary, by in enumerate(crossing):
            chunk, helps = (boundary + 1, boundary) if by > 0 else (boundary, boundary + 1)
            if by and (d, m, chunk) in route and (d, m, helps) in route:
                yield Lent(route[d, m, helps], route[d, m, chunk], chunk, by < 0, abs(by), d, m, helps)


def borrowings(plan: Plan) -> dict[Worker, dict[tuple[int, bool], int]]:
    """Layers of other stages' chunks that each helper must hold: for (chunk, whether its end) the number of layers."""
    found: dict[Worker, dict[tuple[int, bool], int]] = {}
    for each in lent(plan):
        held = found.setdefault(each.helper, {})
        key = each.chunk, each.tail
        held[key] = max(each.layers, held.get(key, 0))
    return found


def borrowed(plan: Plan, worker: Worker) -> dict[tuple[int, bool], int]:
    """Layers of other stages' chunks that ``worker`` must hold, as in `borrowings`."""
    return borrowings(plan).get(worker, {})
