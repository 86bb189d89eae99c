"""The plan as pure data: grid, actions, costs, problem, plan file, validator, replay and bounds. Standard
library only."""

from .action import STEP, Action
from .bounds import lower_bound
from .channels import Message, buffers, channels, read_by
from .costs import Costs
from .errors import DeadlockError, PlanError
from .grid import Grid, Worker
from .pieces import pieces
from .plan import Plan
from .problem import Problem
from .replay import Timeline, replay
from .validate import check, violations

__all__ = [
    "STEP", "Action", "Costs", "DeadlockError", "Grid", "Message", "Plan", "PlanError", "Problem",
    "Timeline", "Worker", "buffers", "channels", "check", "lower_bound", "pieces", "read_by", "replay", "violations",
]
