"""Adjacent B and W of the first stage become one full backward (FB).

No worker waits for the result of the first stage's B. So splitting gains nothing where its W comes next, and one
backward saves the work of keeping the two apart. On later stages a full backward would delay the gradient that the
stage before waits for, so they have none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Action, Problem, Worker


def merged(problem: Problem, worker: Worker, actions: Sequence[Action], done: int = 0) -> tuple[Action, ...]:
    """``worker``'s ordered ``actions``, with a FB for each B whose W comes next, from its second W on. The first
    ``done`` of them have been run, and stay as they are.

    Unchanged where the problem does not let the worker's stage run full backwards.
    """
    if worker.stage != problem.stage_of(0) or 0 not in problem.full_backward:
        return tuple(actions)
    found = [*actions[:done]]
    # whether a micro-batch of this worker was split: its sums exist from then on, and B and W are measured apart
    split = any(action.kind == "W" for action in found)
    for action in actions[done:]:
        if (action.kind == "W" and split and action.chunk == 0 and len(found) > done
                and found[-1] == action._replace(kind="B")):
            found[-1] = action._replace(kind="FB")
        else:
            found.append(action)
        split = split or action.kind == "W"
    return tuple(found)
