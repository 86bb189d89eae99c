"""The price of partners: two workers that have not talked yet connect first.

NCCL connects a pair at its first transfer: it allocates buffers and exchanges addresses, while both queues stand. gloo
has connected all pairs once a communicator is made. So a plan that gives a worker new partners has to pay for them, and
of two plans that are as good the one that keeps its partners is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from ..plan import Plan, Worker, channels

Pair = tuple[Worker, Worker]


def pairs(plan: Plan) -> frozenset[Pair]:
    """The workers that talk to each other in an iteration of ``plan``, each pair once, in ascending order."""
    return frozenset((min(pair), max(pair)) for pair, messages in channels(plan).items() if messages)


@dataclass(frozen=True)
class PartnerPrice:
    """``first``: what the first transfer of a pair takes, in the unit of the plans' durations; 0: nothing.
    ``horizon``: iterations over which it has to pay off."""

    first: float = 0.0
    horizon: float = 100.0

    def of(self, plan: Plan, known: Set[Pair]) -> float:
        """Time until all pairs of ``plan`` that are not ``known`` are connected: those of one worker come one after the
        other, as in its queue."""
        if not self.first:
            return 0.0
        new = Counter(worker for pair in pairs(plan) - known for worker in pair)
        return self.first * max(new.values(), default=0)

    def total(self, plan: Plan, known: Set[Pair]) -> float:
        """Time of the iterations of the horizon under ``plan``, with the pairs that have to be connected for it."""
        return plan.objective_value * self.horizon + self.of(plan, known)
