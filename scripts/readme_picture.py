#!/usr/bin/env python3
"""Draws docs/plan.svg, the picture in README.md: a plan without failures and with one failed worker."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_recycle.plan import Costs, Grid, Plan, Problem, Worker, replay
from megatron_recycle.planner import improve, quick
from megatron_recycle.tools.timeline import PAGE, draw

PIPELINES, STAGES, MICROBATCHES, CAP, BUDGET = 3, 4, 6, 6, 5.0


def planned(*failed: Worker) -> Plan:
    """The better of the planner's two answers, unit costs, at most `CAP` activations on a worker."""
    grid = Grid(STAGES, (MICROBATCHES,) * PIPELINES)
    caps = dict.fromkeys(grid.workers(), CAP)
    costs = Costs.uniform(STAGES, 1, 1, 1, step=1)
    problem = Problem(grid, costs, failed, cap=caps)
    first = quick(problem)
    return improve(problem, first, BUDGET) or first


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/plan.svg")
    whole, hit = planned(), planned(Worker(1, 2))
    before = f"Planned: an iteration of 12 workers takes {replay(whole).period:g} units of time"
    after = f"Planned: without worker 1:2 it takes {replay(hit).period:g}; its peers run its micro-batches (hatched)"
    draw(target, (whole, before), (hit, after), style=PAGE)
    print(target)
