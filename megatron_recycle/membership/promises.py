"""Offers of the coordinator to a generation: a better plan, or a switch at which processes come in or leave.

A worker promises to take an offer with its part of a commit. Once all have promised the same offer, all take it at the
same boundary: before the iteration after next, which no worker can have begun, since that requires this very verdict.
"""

from __future__ import annotations

from megatron_recycle.membership.protocol import Offer
from megatron_recycle.plan.plan import Plan


class Promises:
    """One worker's promises in ``generation``, in which offers are numbered from 1."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._promised: tuple[int, Offer] | None = None
        self._agreed = 0
        self._next: list[tuple[int, Plan]] = []  # agreed plans, each with its first iteration
        self._boundary: int | None = None

    def promise(self, iteration: int, offer: Offer | None) -> int:
        """Number of the offer that the commit of ``iteration`` promises; 0 for none. ``offer``: the last one
        received."""
        offer = self.new(offer)
        self._promised = (iteration, offer) if offer is not None else None
        return self._promised[1].number if self._promised is not None else 0

    def new(self, offer: Offer | None) -> Offer | None:
        """The ``offer``, if it is of this generation and not agreed upon yet."""
        new = offer is not None and offer.generation == self.generation and offer.number > self._agreed
        return offer if new else None

    def agreed(self, iteration: int) -> None:
        """The commit of ``iteration`` shows that all workers have made this worker's promise."""
        assert self._promised is not None and self._promised[0] == iteration, (
            f"nothing was promised with iteration {iteration}, so nothing can be agreed upon")
        offer = self._promised[1]
        self._agreed = offer.number
        if offer.plan is None:
            self._boundary = iteration + 2
        else:
            self._next.append((iteration + 2, Plan.from_file(offer.plan)))

    def ends_before(self, iteration: int) -> bool:
        """Whether all wait before ``iteration`` for the next generation."""
        return self._boundary is not None and iteration >= self._boundary

    def plan_from(self, iteration: int) -> Plan | None:
        """The agreed plan that begins with ``iteration``, returned once; else None. Plans come in the order of
        agreement: the next but one may be agreed upon before or after the next one's iteration begins here."""
        return self._next.pop(0)[1] if self._next and iteration >= self._next[0][0] else None
