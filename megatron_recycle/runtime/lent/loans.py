"""One attempt's transfers of lent layers: copies to helpers when it begins, sums of gradients back before it ends.

Every attempt begins with copies of the layers' current values at their own stage, and drops them when it ends. So
nothing has to be reported of steps that were undone and made again, of recoveries, joiners, loaded checkpoints or other
plans. A helper waits for a copy where it runs the first of its layers, and not before.

All transfers here come before the attempt's activations, or behind its last gradients, at both ends alike: so no order
of transfers can deadlock where a library runs a communicator's one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from megatron_recycle.control import Agent
from megatron_recycle.errors import LendingError, UnsupportedError
from megatron_recycle.membership import Offer
from megatron_recycle.plan import Microbatch, Piece, Plan, Worker
from megatron_recycle.runtime.comm.comm import Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import LENT_COPIES, LENT_SUMS
from megatron_recycle.runtime.compute.accumulate import Accumulators, ChunkedAccumulators, Layout
from megatron_recycle.runtime.lent.layers import parameters_of, room
from megatron_recycle.runtime.lent.neighbourhood import Neighbourhood
from megatron_recycle.runtime.lent.sums import End, LentAccumulators, Place
from megatron_recycle.runtime.lent.terms import HOME, Span, Terms, terms_of

log = logging.getLogger(__name__)


class Loans:
    """The loans of one worker in one attempt. Chunks are counted through the model.

    Args:
        terms: of the plan.
        groups: the generation's handles.
        neighbours: this worker's copies.
    """

    def __init__(self, terms: Terms, groups: Groups, neighbours: Neighbourhood) -> None:
        self._terms, self._groups, self._neighbours, self._of = terms, groups, neighbours, neighbours.of
        self._coming: dict[End, Pending] = {}
        """Pending copies, not waited for yet."""
        self._sent: list[Pending] = []
        for chunk, each in self._of.items():
            for head, count in zip((False, True), terms.borrowed(groups.me, chunk), strict=True):
                with self._lent_to(chunk, head):
                    each.hold(head, count)

    def begin(self) -> None:
        """Start the transfers of copies of the stages' current values. Raises GenerationOver, LendingError."""
        for each in self._of.values():
            each.options.begin()
        world, me = self._groups.world, self._groups.me
        mine = [(number, loan) for number, loan in enumerate(self._terms.copies) if me in (loan.principal, loan.helper)]
        if not mine:
            return
        with _lent_of(me.stage):
            packs = {number: self._of[loan.chunk].give(loan.head, loan.layers)
                     for number, loan in mine if loan.principal == me}
        rooms = {number: room(self._of[loan.by].borrowed(loan.head)) for number, loan in mine if loan.helper == me}
        with world.batch():
            for number, loan in mine:
                if loan.principal == me:
                    self._sent.append(world.send(packs[number], self._groups.rank(loan.helper), LENT_COPIES[number]))
                else:
                    self._coming[loan.by, loan.head] = world.receive(
                        rooms[number], self._groups.rank(loan.principal), LENT_COPIES[number])

    def span(self, chunk: int, microbatch: Microbatch) -> Span:
        """The span of this worker for ``chunk`` of ``microbatch``."""
        return self._terms.span(chunk, microbatch)

    def arrive(self, chunk: int, span: Span) -> None:
        """Wait for the copies of layers that ``span`` adds to ``chunk``. Raises GenerationOver, LendingError."""
        for head, count in zip((False, True), span.borrowed, strict=True):
            if count and (chunk, head) in self._coming:
                coming = self._coming[chunk, head]
                coming.wait()
                del self._coming[chunk, head]
                self._groups.world.backend.arrived(coming.tensor)
                with self._lent_to(chunk, head):
                    self._of[chunk].take(head, coming.tensor)

    @contextmanager
    def running(self, chunk: int, span: Span, seed: Callable[[int], None]) -> Iterator[None]:
        """As `Neighbours.running`, for ``chunk``. Raises LendingError if a stage cannot run these layers."""
        lent = nullcontext() if span == HOME else self._lent_to(chunk, True) if span.borrowed[1] else (
            self._lent_to(chunk, False) if span.borrowed[0] else _lent_of(self._groups.me.stage))
        with lent, self._of[chunk].running(span, seed):
            yield

    def _lent_to(self, chunk: int, head: bool) -> AbstractContextManager[None]:
        """A block about layers of the chunk behind ``chunk`` (``head``), or of the chunk before, if there is one."""
        other, stages = chunk + (1 if head else -1), self._neighbours.stage_of
        return _lent_of(stages[other]) if 0 <= other < len(stages) else nullcontext()

    def sums(self, chunks: Collection[int], layout: Layout, place: Place, block: int) -> Accumulators:
        """Accumulators for an attempt in the worker's ``chunks``. ``block``: micro-batches in one of the plan's blocks,
        0 if it has none."""
        if not self._terms.crossings:
            return Accumulators(layout, place)
        own = [(chunk, each) for chunk, each in self._of.items() if chunk in chunks]
        borrowed = {(chunk, head): Layout(parameters_of(each.borrowed(head)), layout.dtype)
                    for chunk, each in own for head in (False, True)}
        given = [parameter for chunk, each in own
                 for head, count in zip((True, False), self._terms.given(self._groups.me, chunk), strict=True)
                 for parameter in (parameters_of(each.own(head, count)) if count else ())]
        return LentAccumulators(layout, place, block, borrowed, given)

    def collect(self, sums: Accumulators) -> Accumulators:
        """Send the sums of borrowed layers. Returns the worker's own sums joined with those received from helpers;
        ``sums`` stay as they are. Call after all actions. Raises GenerationOver."""
        if not self._terms.crossings:
            return sums
        groups, me = self._groups, self._groups.me
        of = {chunk: sums.of(place) for place, chunk in enumerate(self._of)}
        mine = [(number, loan) for number, loan in enumerate(self._terms.sums) if me in (loan.principal, loan.helper)]
        tensors, parameters = {}, {}
        for number, loan in mine:
            if loan.helper == me:
                whole, lent = self._of[loan.by].borrowed(loan.head), of[loan.by]
                assert isinstance(lent, LentAccumulators)
                flat = lent.borrowed[loan.by, loan.head].sum(loan.piece)
                size = sum(each.numel() for each in parameters_of(
                    whole[:loan.layers] if loan.head else whole[len(whole) - loan.layers:]))
                tensors[number] = flat[:size] if loan.head else flat[flat.numel() - size:]
            else:
                parameters[number] = parameters_of(self._of[loan.chunk].own(loan.head, loan.layers))
                size = sum(each.numel() for each in parameters[number])
                tensors[number] = torch.empty(size, dtype=sums.layout.dtype, device=sums.layout.device)
        coming = []
        with groups.world.batch():
            for number, loan in mine:
                if loan.helper == me:
                    self._sent.append(
                        groups.world.send(tensors[number], groups.rank(loan.principal), LENT_SUMS[number]))
                else:
                    coming.append(
                        groups.world.receive(tensors[number], groups.rank(loan.helper), LENT_SUMS[number]))
        for pending in coming:
            pending.wait()

        def joined(own: Accumulators) -> Accumulators:
            assert isinstance(own, LentAccumulators)
            return own.joined(_by_piece([(loan.piece, parameters[number], tensors[number]) for number, loan in mine
                                         if loan.principal == me and of[loan.chunk] is own]))

        return sums.each(joined) if isinstance(sums, ChunkedAccumulators) else joined(sums)

    def end(self) -> None:
        """The attempt is void, and all have begun it: complete its copies. Raises GenerationOver."""
        for pending in (*self._coming.values(), *self._sent):
            pending.wait()
        self._coming, self._sent = {}, []

    def let_go(self) -> None:
        """All sends have been read: drop them."""
        for pending in self._sent:
            pending.wait(read=True)
        self._sent = []


def acceptable(offer: Offer | None, neighbours: Neighbourhood, agent: Agent, me: Worker) -> Offer | None:
    """The ``offer``, unless its plan lends layers that cannot be lent or run here: the coordinator is informed then."""
    if offer is None or offer.plan is None or not offer.plan.crossings:
        return offer
    if offer.number == neighbours.declined:
        return None
    terms = terms_of(Plan.from_file(offer.plan))
    for chunk, each in neighbours.of.items():
        before, behind = terms.borrowed(me, chunk)
        checks = [(chunk, terms.of_chunk(chunk), False), *((chunk - 1, (0, 0), True) for _ in range(bool(before))),
                  *((chunk + 1, (0, 0), True) for _ in range(bool(behind)))]
        for of, given, borrowed in checks:
            try:
                each.check(given, borrowed)
            except UnsupportedError as error:
                stage = neighbours.stage_of[of]
                log.warning("recycle: a plan that lends layers of stage %d is not taken up, training goes on without: "
                            "%s", stage, error)
                agent.unlent(offer.generation, stage, str(error))
                neighbours.declined = offer.number
                return None
    return offer


@contextmanager
def _lent_of(stage: int) -> Iterator[None]:
    """A block about lent layers of ``stage``: UnsupportedError becomes LendingError, which need not end the job."""
    try:
        yield
    except LendingError:
        raise
    except UnsupportedError as error:
        raise LendingError(str(error), stage) from error


def _by_piece(sums: Sequence[tuple[Piece, Sequence[nn.Parameter], torch.Tensor]],
              ) -> dict[Piece, list[tuple[nn.Parameter, torch.Tensor]]]:
    """Each parameter's part of flat ``sums``, by their pieces."""
    found: dict[Piece, list[tuple[nn.Parameter, torch.Tensor]]] = {}
    for piece, parameters, flat in sums:
        parts = flat.split([parameter.numel() for parameter in parameters])
        found.setdefault(piece, []).extend(
            (parameter, part.view_as(parameter)) for parameter, part in zip(parameters, parts, strict=True))
    return found
