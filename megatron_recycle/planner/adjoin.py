"""First-stage weight gradients moved right after their B, wherever that costs nothing.

No worker waits for the result of the first stage's B. So a B with its W next can be one full backward there
(`merge_bw`), without the work of keeping the two apart, and without the memory between them.
"""

from __future__ import annotations

from megatron_recycle.planner.timing import timed

from .instance import Instance, Schedule


def adjoined(instance: Instance, schedule: Schedule) -> Schedule:
    """The schedule with every W of the first stage moved up to its B, if neither period nor makespan grows by that.

    No worker holds more than before: a W only frees memory, and does so earlier.
    """
    if not instance.problem.split_backward:
        return schedule
    nodes, first = len(schedule.route), len(instance.jobs)
    two, end = 2 * nodes, 2 * nodes + first
    trace: list[int] = []
    for code in schedule.trace:
        if nodes <= code < nodes + first:
            trace += code, code + nodes
        elif not two <= code < end:
            trace.append(code)
    if trace == schedule.trace:
        return schedule
    found = timed(instance, schedule.route, trace, schedule.crossings)
    return schedule if found.period > schedule.period or found.makespan > schedule.makespan else found
