"""Moves of healthy workers, requested from the planner."""

from __future__ import annotations

from megatron_recycle.membership.description import Job
from megatron_recycle.plan import Problem
from megatron_recycle.planner import Prices, normalise


def moves_of(problem: Problem, job: Job) -> dict[str, str]:
    """By worker that should move, the empty position of another stage that it should take.

    The job's `move_cost` and `horizon` are the planner's prices, in iterations.
    """
    prices = Prices(job.move_cost, job.horizon)
    return {str(mover): str(to) for mover, to in normalise(problem, prices).items()}
