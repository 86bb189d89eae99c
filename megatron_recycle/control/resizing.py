"""A plan for another number of micro-batches, derived from the plan in use: the same on every worker."""

from __future__ import annotations

from dataclasses import replace

from megatron_recycle.plan import Grid, Plan
from megatron_recycle.planner import quick


def resized(plan: Plan, grid: Grid, block: int) -> Plan:
    """The planner's quick plan for ``plan``'s workers, costs and rules, but for ``grid`` and an exact reduction in
    blocks of ``block``. No layer is lent: that begins with a later plan of the coordinator's, if it pays."""
    return quick(replace(plan.problem, grid=grid, block=block, lend=()))
