"""What stock is measured against: DeepSpeed's schedule takes what 1F1B takes in theory, although its sends block.

gloo and NCCL end a send only when its receiver has come. DeepSpeed sends what a step has made in the next step, after
the receive of that one, so that a stage might wait for a neighbour that waits for it in turn: it does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

from megatron_recycle.plan import Costs, Grid, Problem
from megatron_recycle.planner.baselines import one_f_one_b

F, B, W = 20, 22, 18
Instruction = tuple[str, int, int]
"""What it is, the neighbour (or the stage itself), and how many of the kind came before."""


def instructions(stage: int, stages: int, microbatches: int) -> Iterator[Instruction]:
    """Of a stage in one iteration."""
    towards = {"SendActivation": 1, "RecvActivation": -1, "SendGrad": -1, "RecvGrad": 1}
    counts: dict[str, int] = {}
    for commands in TrainSchedule(microbatches, stages, stage).steps():
        for name in (type(command).__name__ for command in commands):
            if name in towards or name in ("ForwardPass", "BackwardPass"):
                yield name, stage + towards.get(name, 0), counts.setdefault(name, 0)
                counts[name] += 1


def takes(stages: int, microbatches: int) -> int:
    """Units of an iteration in which a send and its receive end together, once both have begun."""
    left = [[*instructions(stage, stages, microbatches)] for stage in range(stages)]
    now, came = [0] * stages, {}
    while any(left):
        moved = False
        for stage, todo in enumerate(left):
            while todo:
                name, other, number = todo[0]
                if name.endswith("Pass"):
                    now[stage] += F if name == "ForwardPass" else B + W
                else:
                    counterpart = {"Send": "Recv", "Recv": "Send"}[name[:4]] + name[4:]
                    came.setdefault((name, stage, other, number), now[stage])
                    if (counterpart, other, stage, number) not in came:
                        break
                    now[stage] = max(now[stage], came[counterpart, other, stage, number])
                del todo[0]
                moved = True
        assert moved, "stages wait for one another"
    return max(now)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 6), (4, 8), (8, 16), (8, 32), (4, 2)])
def test_blocking_sends_cost_stock_nothing(stages: int, microbatches: int) -> None:
    grid = Grid(stages, (microbatches,))
    problem = Problem(grid, Costs.uniform(stages, F, B, W), cap=dict.fromkeys(grid.workers(), 2 * stages),
                      split_backward=False, objective="makespan")
    assert takes(stages, microbatches) == one_f_one_b(problem).makespan == (
        microbatches + stages - 1) * (F + B + W)
