"""Terms of a plan that lends layers: the layers that each worker runs of a micro-batch, and the transfers for them.

A micro-batch crosses the boundary behind a chunk some layers later (+) or earlier (-) than at home. The worker that
runs a lent layer is its *helper* for that micro-batch; the worker of the layer's own stage that runs the rest of that
chunk for it is its *principal*. Helper and principal are next to each other on the micro-batch's route, so they talk
anyway. Chunks are counted through the model; usually each stage has one, of its number.

At the start of an attempt each helper gets a copy of the parameters, from one of its principals. Before the reduction
it returns its sums of their gradients: with the exact reduction one for each block, which the principal adds where its
own would be; else a single one, to any principal, since the peers add up all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from megatron_recycle.plan import Crossing, Microbatch, Piece, Plan, Worker
from megatron_recycle.runtime.compute.accumulate import WHOLE

Crossings = Mapping[Microbatch, Crossing]
"""By micro-batch, how many layers later it crosses each boundary than at home; others cross all boundaries at home."""


class Span(NamedTuple):
    """The layers that a worker runs of a micro-batch in a chunk, given by the crossings before (``head``) and behind
    (``tail``) them."""

    head: int = 0
    tail: int = 0

    @property
    def own(self) -> tuple[int, int]:
        """How many of the chunk's own first and last layers it leaves out."""
        return max(0, self.head), max(0, -self.tail)

    @property
    def borrowed(self) -> tuple[int, int]:
        """How many of the last layers of the chunk before it runs, and how many of the first of the chunk behind."""
        return max(0, -self.head), max(0, self.tail)


HOME = Span()


class Loan(NamedTuple):
    """``layers`` of ``chunk``, its first if ``head`` and else its last, which ``helper`` runs for ``principal``, a
    worker of the chunk's own stage.

    ``piece``: a part of their gradients that is summed apart: in `exact` a block, else `WHOLE`.
    """

    principal: Worker
    helper: Worker
    chunk: int
    head: bool
    layers: int
    piece: Piece = WHOLE

    @property
    def by(self) -> int:
        """The helper's own chunk, with which it runs them."""
        return self.chunk - 1 if self.head else self.chunk + 1


class Terms(NamedTuple):
    """A plan's loans, the same on all workers.

    Attributes:
        crossings: of the micro-batches that the plan runs.
        copies: loans whose parameters go from principal to helper, in this order.
        sums: loans whose sums of gradients go back from helper to principal, in this order.
    """

    crossings: Crossings
    copies: tuple[Loan, ...] = ()
    sums: tuple[Loan, ...] = ()

    def span(self, chunk: int, microbatch: Microbatch) -> Span:
        """The span of the worker that runs ``chunk`` of ``microbatch``."""
        crossings = self.crossings.get(microbatch)
        if crossings is None:
            return HOME
        return Span(crossings[chunk - 1] if chunk else 0, crossings[chunk] if chunk < len(crossings) else 0)

    def borrowed(self, me: Worker, chunk: int) -> tuple[int, int]:
        """The most layers of the chunk before, and of the chunk behind, that ``me`` runs with its own ``chunk``."""
        mine = [loan for loan in self.copies if loan.helper == me and loan.by == chunk]
        return (max((loan.layers for loan in mine if not loan.head), default=0),
                max((loan.layers for loan in mine if loan.head), default=0))

    def of_chunk(self, chunk: int) -> tuple[int, int]:
        """The most of the first and of the last layers of ``chunk`` that others run."""
        mine = [loan for loan in self.copies if loan.chunk == chunk]
        return (max((loan.layers for loan in mine if loan.head), default=0),
                max((loan.layers for loan in mine if not loan.head), default=0))

    def given(self, me: Worker, chunk: int) -> tuple[int, int]:
        """How many of the first and of the last layers of its own ``chunk`` are run by others for some micro-batch of
        ``me``."""
        mine = [loan for loan in self.sums if loan.principal == me and loan.chunk == chunk]
        return (max((loan.layers for loan in mine if loan.head), default=0),
                max((loan.layers for loan in mine if not loan.head), default=0))


NOTHING_LENT = Terms({})


def crossings_of(plan: Plan) -> Crossings:
    """The crossings of ``plan``; none if it lends nothing."""
    return plan.crossings


def terms_of(plan: Plan) -> Terms:
    """The terms of ``plan``. Where it has blocks, sums are kept apart by block."""
    lent = crossings_of(plan)
    if not lent:
        return NOTHING_LENT
    route = plan.route()
    crossings = {microbatch: each for microbatch, each in sorted(lent.items())
                 if any(each) and (*microbatch, 0) in route}
    block = plan.problem.block
    most: dict[tuple[Worker, Worker, int, bool], int] = {}
    blocks: dict[Loan, None] = {}
    for (d, m), each in crossings.items():
        for boundary, crossing in enumerate(each):
            if not crossing:
                continue
            before, behind = route[d, m, boundary], route[d, m, boundary + 1]
            principal, helper = (behind, before) if crossing > 0 else (before, behind)
            key, layers = (principal, helper, boundary + (crossing > 0), crossing > 0), abs(crossing)
            most[key] = max(layers, most.get(key, 0))
            if block:
                blocks[Loan(*key, layers, (d, m // block, m // block))] = None
    sums = tuple(sorted(blocks)) if block else _one_each(most)
    return Terms(crossings, _one_each(most), sums)


def _one_each(most: Mapping[tuple[Worker, Worker, int, bool], int]) -> tuple[Loan, ...]:
    """One loan for each helper and end of a chunk, of all layers that it runs there, with the principal that has the
    fewest loans yet."""
    asked: dict[tuple[Worker, bool, int], list[Worker]] = {}
    layers: Counter[tuple[Worker, bool, int]] = Counter()
    for (principal, helper, chunk, head), count in sorted(most.items()):
        key = helper, head, chunk
        asked.setdefault(key, []).append(principal)
        layers[key] = max(layers[key], count)
    busy: Counter[Worker] = Counter()
    found = []
    for (helper, head, chunk), principals in sorted(asked.items()):
        principal = min(principals, key=lambda worker: (busy[worker], worker.pipeline != helper.pipeline, worker))
        busy[principal] += 1
        found.append(Loan(principal, helper, chunk, head, layers[helper, head, chunk]))
    return tuple(sorted(found))
