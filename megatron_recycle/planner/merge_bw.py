"""B and W of the first stage that follow one another become one full backward (FB).

The first stage's B computes nothing that another worker waits for. So nothing is gained by splitting it where its W
comes next, and one backward saves the work of keeping the two apart. On later stages a full backward would delay the
gradient that the stage before waits for: they have none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Action, Problem, Worker


def merged(problem: Problem, worker: Worker, actions: Sequence[Action]) -> tuple[Action, ...]:
    """``worker``'s ordered ``actions``, with a FB for each B whose W comes next, from its second W on.

    Unchanged where the problem does not let the worker's stage run full backwards.
    """
    if worker.stage != problem.stage_of(0) or 0 not in problem.full_backward:
        return tuple(actions)
    found: list[Action] = []
    split = False  # a micro-batch of this worker: its sums are there then, and B and W are measured apart
    for action in actions:
        if action.kind == "W" and split and action.chunk == 0 and found[-1] == action._replace(kind="B"):
            found[-1] = action._replace(kind="FB")
        else:
            found.append(action)
        split = split or action.kind == "W"
    return tuple(found)
