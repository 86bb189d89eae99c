"""Crossings that are given by hand, in jobs whose planner would take a while to find some."""

from __future__ import annotations

from itertools import pairwise

from megatron_recycle.plan import Plan
from megatron_recycle.runtime.lent import terms


def lend() -> None:
    """Once somebody has failed, plans lend a layer at each boundary, block by block earlier or later."""
    def crossings(plan: Plan) -> dict[tuple[int, int], tuple[int, ...]]:
        problem, block = plan.problem, plan.problem.block or 1
        stages = [problem.stage_of(chunk) for chunk in range(problem.chunks)]
        return {(d, m): tuple((-1) ** (d + m // block) * (one != other) for one, other in pairwise(stages))
                for d, m in problem.grid.items() if problem.failed and not plan.done}

    terms.crossings_of = crossings
