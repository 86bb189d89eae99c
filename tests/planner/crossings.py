"""Random lent layers for plans that lend nothing."""

from __future__ import annotations

import random
from dataclasses import replace

from megatron_recycle.plan import Plan, figured


def crossing(plan: Plan, draw: random.Random) -> Plan:
    """The plan's orders, with any crossings that its problem allows."""
    problem, found, of_unit = plan.problem, {}, {}
    for d, m in problem.grid.items():
        unit = d, m // problem.block if problem.block else m
        if unit not in of_unit:
            each = tuple(draw.randint(-earlier, later) for earlier, later in problem.lend)
            while any(-problem.more(chunk, each).get(chunk, 0) >= max(1, problem.layers[chunk])
                      for chunk in range(problem.chunks)) and any(each):
                each = tuple(by - (by > 0) + (by < 0) for by in each)
            of_unit[unit] = each
        found[d, m] = of_unit[unit]
    return figured(replace(plan, crossings=found))
