"""What the coordinator offers a generation: a better plan, or a switch that others come in or leave with.

A worker promises to take an offer with its part of a commit. Where all have promised the same one, all take it at
the same boundary: before the iteration after next, which nobody can have begun, since that takes this very verdict.
"""

from __future__ import annotations

from megatron_recycle.control import Agent
from megatron_recycle.membership import Offer
from megatron_recycle.plan import Plan


class Offers:
    """One worker's promises in one generation.

    Args:
        agent: hears the offers.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._promised: Offer | None = None
        self.forget()

    def forget(self) -> None:
        """A new generation: offers in it are numbered anew."""
        self._agreed = 0
        self._next: list[tuple[int, Plan]] = []  # agreed upon, each with its first iteration
        self._boundary: int | None = None

    def promise(self, generation: int) -> int:
        """Number of the offer to ``generation`` that the next commit carries the promise of; 0 for none."""
        offer = self._agent.offer
        new = offer is not None and offer.generation == generation and offer.number > self._agreed
        self._promised = offer if new else None
        return self._promised.number if self._promised is not None else 0

    def agreed(self, iteration: int) -> None:
        """The commit of ``iteration`` shows that all workers have promised what this one has."""
        if self._promised is None:
            return
        self._agreed = self._promised.number
        if self._promised.plan is None:
            self._boundary = iteration + 2
        else:
            self._next.append((iteration + 2, Plan.from_json(self._promised.plan)))

    def ends_before(self, iteration: int) -> bool:
        """Whether this generation does not begin ``iteration``: all wait before it for the next one."""
        return self._boundary is not None and iteration >= self._boundary

    def plan_from(self, iteration: int) -> Plan | None:
        """The next plan that is taken with ``iteration``, told once; None: there is none. In their order: the
        next but one may be agreed upon before or after the next one's iteration begins here."""
        return self._next.pop(0)[1] if self._next and iteration >= self._next[0][0] else None


def number_of(plan: Plan) -> int:
    """A number below 2**20 by which workers find out that they follow different plans."""
    return int(plan.digest.rpartition(":")[2][:5], 16)
