"""One attempt's transfers of lent layers: copies to helpers when it begins, sums of gradients back before it ends.

Every attempt begins with copies of what the layers' own stage holds then, and lets go of them when it ends. So nothing
needs to be told of steps that were undone and made again, of recoveries, of workers that come in, of checkpoints that
were loaded or of other plans. A helper waits for a copy where it runs the first of its layers, and not before.

All that is sent here comes before the attempt's activations, or behind its last gradients, on both ends alike: so that
no order of transfers can deadlock where a library runs a communicator's one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
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
from megatron_recycle.runtime.compute.accumulate import Accumulators, Layout
from megatron_recycle.runtime.lent.layers import Neighbours, parameters_of, room
from megatron_recycle.runtime.lent.sums import LentAccumulators, Place
from megatron_recycle.runtime.lent.terms import HOME, Span, Terms, terms_of

log = logging.getLogger(__name__)


class Loans:
    """The loans of one worker in one attempt.

    Args:
        terms: of the plan.
        groups: the generation's handles.
        neighbours: this worker's copies.
    """

    def __init__(self, terms: Terms, groups: Groups, neighbours: Neighbours) -> None:
        self._terms, self._groups, self._neighbours = terms, groups, neighbours
        self._coming: dict[bool, Pending] = {}
        """Copies that nobody has waited for, by whether they are of the head of the stage behind."""
        self._sent: list[Pending] = []
        for head, count in zip((False, True), terms.borrowed(groups.me), strict=True):
            with self._lent_by(head):
                neighbours.hold(head, count)

    def begin(self) -> None:
        """Copies of what the stages hold now are on their way. Raises GenerationOver, LendingError."""
        self._neighbours.options.begin()
        world, me = self._groups.world, self._groups.me
        mine = [(number, loan) for number, loan in enumerate(self._terms.copies) if me in (loan.principal, loan.helper)]
        if not mine:
            return
        with _lent_of(me.stage):
            packs = {number: self._neighbours.give(loan.head, loan.layers)
                     for number, loan in mine if loan.principal == me}
        rooms = {number: room(self._neighbours.borrowed(loan.head)) for number, loan in mine if loan.helper == me}
        with world.batch():
            for number, loan in mine:
                if loan.principal == me:
                    self._sent.append(world.send(packs[number], self._groups.rank(loan.helper), LENT_COPIES[number]))
                else:
                    self._coming[loan.head] = world.receive(rooms[number], self._groups.rank(loan.principal),
                                                            LENT_COPIES[number])

    def span(self, microbatch: Microbatch) -> Span:
        """Of this worker, for ``microbatch``."""
        return self._terms.span(self._groups.me.stage, microbatch)

    def arrive(self, span: Span) -> None:
        """Wait for the copies of layers that ``span`` has. Raises GenerationOver, LendingError."""
        for head, count in zip((False, True), span.borrowed, strict=True):
            if count and head in self._coming:
                coming = self._coming[head]
                coming.wait()
                del self._coming[head]
                self._groups.world.backend.arrived(coming.tensor)
                with self._lent_by(head):
                    self._neighbours.take(head, coming.tensor)

    @contextmanager
    def running(self, span: Span, seed: Callable[[int], None]) -> Iterator[None]:
        """As `Neighbours.running`. Raises LendingError where a stage cannot run these layers."""
        lent = nullcontext() if span == HOME else self._lent_by(True) if span.borrowed[1] else (
            self._lent_by(False) if span.borrowed[0] else _lent_of(self._groups.me.stage))
        with lent, self._neighbours.running(span, seed):
            yield

    def _lent_by(self, head: bool) -> AbstractContextManager[None]:
        """A block about layers of the stage behind, or of the stage before."""
        return _lent_of(self._groups.me.stage + (1 if head else -1))

    def sums(self, layout: Layout, place: Place, block: int) -> Accumulators:
        """Room for the sums of an attempt. ``block``: micro-batches in one of the plan's blocks, 0 if it has none."""
        if not self._terms.crossings:
            return Accumulators(layout, place)
        before, behind = (Layout(parameters_of(self._neighbours.borrowed(head)), layout.dtype)
                          for head in (False, True))
        given = [parameter for head, count in zip((True, False), self._terms.given(self._groups.me), strict=True)
                 for parameter in parameters_of(self._neighbours.own(head, count))]
        return LentAccumulators(layout, place, block, (before, behind), given)

    def collect(self, sums: Accumulators) -> None:
        """Send the sums of borrowed layers, and put those that come for the stage's own where they belong. All actions
        are done. Raises GenerationOver."""
        if not isinstance(sums, LentAccumulators):
            return
        groups, me = self._groups, self._groups.me
        mine = [(number, loan) for number, loan in enumerate(self._terms.sums) if me in (loan.principal, loan.helper)]
        if not mine:
            sums.join({})
            return
        tensors, parameters = {}, {}
        for number, loan in mine:
            if loan.helper == me:
                whole, flat = self._neighbours.borrowed(loan.head), sums.borrowed[loan.head].sum(loan.piece)
                size = sum(each.numel() for each in parameters_of(
                    whole[:loan.layers] if loan.head else whole[len(whole) - loan.layers:]))
                tensors[number] = flat[:size] if loan.head else flat[flat.numel() - size:]
            else:
                parameters[number] = parameters_of(self._neighbours.own(loan.head, loan.layers))
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
        sums.join(_by_piece([(loan.piece, parameters[number], tensors[number]) for number, loan in mine
                             if loan.principal == me]))

    def end(self) -> None:
        """The attempt is void, and all have begun it: bring its copies to their end. Raises GenerationOver."""
        for pending in (*self._coming.values(), *self._sent):
            pending.wait()
        self._coming, self._sent = {}, []

    def let_go(self) -> None:
        """What was sent has been read by all."""
        for pending in self._sent:
            pending.wait(read=True)
        self._sent = []


def acceptable(offer: Offer | None, neighbours: Neighbours, agent: Agent, me: Worker) -> Offer | None:
    """The ``offer``, unless its plan lends layers that cannot be lent, or run here: the coordinator is told that."""
    if offer is None or offer.plan is None or not offer.plan.get("crossings"):
        return offer
    if offer.number == neighbours.declined:
        return None
    terms = terms_of(Plan.from_json(offer.plan))
    before, behind = terms.borrowed(me)
    for stage, given, borrowed in ((me.stage, terms.of_stage(me.stage), False), (me.stage - 1, (0, 0), bool(before)),
                                   (me.stage + 1, (0, 0), bool(behind))):
        try:
            neighbours.check(given, borrowed)
        except UnsupportedError as error:
            log.warning("recycle: a plan that lends layers of stage %d is not taken up, training goes on without: %s",
                        stage, error)
            agent.unlent(offer.generation, stage, str(error))
            neighbours.declined = offer.number
            return None
    return offer


@contextmanager
def _lent_of(stage: int) -> Iterator[None]:
    """A block about lent layers of ``stage``, whose refusals need not be the job's."""
    try:
        yield
    except LendingError:
        raise
    except UnsupportedError as error:
        raise LendingError(str(error), stage) from error


def _by_piece(sums: Sequence[tuple[Piece, Sequence[nn.Parameter], torch.Tensor]],
              ) -> dict[Piece, list[tuple[nn.Parameter, torch.Tensor]]]:
    """Each parameter's part of flat ``sums``, by what these are the sums of."""
    found: dict[Piece, list[tuple[nn.Parameter, torch.Tensor]]] = {}
    for piece, parameters, flat in sums:
        parts = flat.split([parameter.numel() for parameter in parameters])
        found.setdefault(piece, []).extend(
            (parameter, part.view_as(parameter)) for parameter, part in zip(parameters, parts, strict=True))
    return found
