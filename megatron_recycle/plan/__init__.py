"""The plan as pure data: grid, actions, costs, problem, plan file, validator, replay and bounds. Standard
library only."""

from megatron_recycle.plan.blocks import Piece, pieces
from megatron_recycle.plan.crossings import Lent, borrowed, borrowings, lent
from megatron_recycle.plan.messages import (
    Message,
    channels,
    comes_first,
    is_read,
    last_reads,
    needs,
    passes_on,
    read_by,
    readers,
    reads,
    receives,
    results_in,
    surplus,
)
from megatron_recycle.plan.pairs import Pair, pair_of, pairs, rounds, tied_givers, tied_pairs
from megatron_recycle.plan.transfers import Transfer, postings, transfers

from .action import PASSES_ON, STEP, Action, of_place
from .bounds import bound_of, lower_bound
from .costs import Costs
from .errors import DeadlockError, PlanError
from .grid import Grid, Microbatch, Worker
from .plan import Plan
from .problem import AHEAD, Crossing, Problem
from .replay import Timeline, figured, peak, replay
from .validate import check, overfull, violations

__all__ = [
    "AHEAD", "PASSES_ON", "STEP", "Action", "Costs", "Crossing", "DeadlockError", "Grid", "Lent", "Message",
    "Microbatch", "Pair", "Piece", "Plan", "PlanError", "Problem", "Timeline", "Transfer", "Worker", "borrowed",
    "borrowings", "bound_of", "channels", "check", "comes_first", "figured", "is_read", "last_reads", "lent",
    "lower_bound", "needs", "of_place", "overfull", "pair_of", "pairs", "passes_on", "peak", "pieces", "postings",
    "read_by", "readers", "reads", "receives", "replay", "results_in", "rounds", "surplus", "tied_givers",
    "tied_pairs", "transfers", "violations",
]
