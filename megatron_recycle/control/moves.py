"""Moves of healthy workers, as the coordinator asks the planner for them."""

from __future__ import annotations

from megatron_recycle.membership.description import Job
from megatron_recycle.plan import Problem
from megatron_recycle.planner import Prices, normalise


def moves_of(problem: Problem, job: Job) -> dict[str, str]:
    """Which workers had better move, and the empty position of another stage that each is to take.

    The job's `move_cost` and `horizon` are the planner's prices, in iterations.
    """
    prices = Prices(job.move_cost, job.horizon)
    return {str(mover): str(to) for mover, to in normalise(problem, prices).items()}
