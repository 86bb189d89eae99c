"""Connection cost of new partners: two workers that have not communicated yet connect first.

NCCL connects a pair at its first transfer: it allocates buffers and exchanges addresses, while both queues stand. gloo
has connected all pairs once a communicator is made. So before a plan is taken up all workers wait until its new pairs
are connected, and the plan has to pay for that: by the round (`plan.rounds`), of which it needs as many as its busiest
worker has new partners.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ..plan import Pair, Plan, pairs, rounds


@dataclass(frozen=True)
class ConnectionPrice:
    """``first``: time of a pair's first transfer, in the unit of the plans' durations; 0: nothing. ``horizon``:
    iterations over which it has to pay off."""

    first: float = 0.0
    horizon: float = 100.0

    def of(self, plan: Plan, known: Set[Pair]) -> float:
        """Time until all pairs of ``plan`` that are not ``known`` are connected."""
        return self.first * len(rounds(pairs(plan) - known)) if self.first else 0.0

    def total(self, plan: Plan, known: Set[Pair]) -> float:
        """Time of the horizon's iterations under ``plan``, plus the connection of its new pairs."""
        return plan.objective_value * self.horizon + self.of(plan, known)
