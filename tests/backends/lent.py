"""Crossings that are given by hand, in jobs whose planner would take a while to find some."""

from __future__ import annotations

from megatron_recycle.plan import Plan
from megatron_recycle.runtime.lent import terms


def lend() -> None:
    """Once somebody has failed, plans lend a layer at each boundary, block by block earlier or later."""
    def crossings(plan: Plan) -> dict[tuple[int, int], tuple[int, ...]]:
        grid, block = plan.problem.grid, plan.problem.block or 1
        return {(d, m): ((-1) ** (d + m // block),) * (plan.problem.chunks - 1) for d, m in grid.items()
                if plan.problem.failed}

    terms.crossings_of = crossings
