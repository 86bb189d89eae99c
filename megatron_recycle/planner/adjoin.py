"""Weight gradients of the first stage right after their B, wherever that costs nothing.

Nobody waits for what the first stage's B computes, so B and W that follow one another can be one whole backward there,
which spares the work of keeping them apart, and the memory between them.
"""

from __future__ import annotations

from dataclasses import replace

from .evaluate import figures
from .instance import Instance, Schedule


def adjoined(instance: Instance, schedule: Schedule) -> Schedule:
    """The schedule with every W of the first stage moved up to its B, if neither period nor makespan grows by that.

    No worker holds more than before: a W only gives memory back, and does so earlier.
    """
    if not instance.problem.split_backward:
        return schedule
    nodes = len(schedule.route)
    trace = []
    for code in schedule.trace:
        kind, node = divmod(code, nodes)
        first = instance.stage[schedule.route[node]] == 0
        if not (first and kind == 2):
            trace.append(code)
        if first and kind == 1:
            trace.append(code + nodes)
    if trace == schedule.trace:
        return schedule
    period, makespan = figures(instance, schedule.route, trace)
    if period > schedule.period or makespan > schedule.makespan:
        return schedule
    return replace(schedule, trace=trace, period=period, makespan=makespan)
