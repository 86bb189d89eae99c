"""When an action of a plan runs, from a cold start."""

from __future__ import annotations

from megatron_recycle.plan import Action, Plan, Worker, replay


def start(plan: Plan, worker: Worker, action: Action) -> int:
    """When ``action`` begins on ``worker``."""
    return replay(plan).times[worker][plan.workers[worker].index(action)][0]


def end(plan: Plan, worker: Worker, action: Action) -> int:
    """When ``action`` ends on ``worker``."""
    return replay(plan).times[worker][plan.workers[worker].index(action)][1]
