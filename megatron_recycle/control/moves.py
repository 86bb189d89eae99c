"""Moves of healthy workers, as the coordinator asks the planner for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.plan import Problem
from megatron_recycle.planner import Prices, normalise


def moves_of(problem: Problem, description: Mapping[str, Any]) -> dict[str, str]:
    """Which workers had better move, and the empty position of another stage that each is to take.

    The description's `move_cost` and `horizon` are the planner's prices, in iterations.
    """
    prices = Prices(float(description.get("move_cost", 1.0)), float(description.get("horizon", 100.0)))
    return {str(mover): str(to) for mover, to in normalise(problem, prices).items()}
