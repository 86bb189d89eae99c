"""Pictures of outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from megatron_recycle.tools.picture_style import COLOURS, INK, figure, name_ends, save
from megatron_recycle.tools.simulate.report import Row
from megatron_recycle.tools.simulate.run import Outcome

_LONG = 10 * 3600.0
"""Seconds of a run from which on a point is an hour's mean."""


def over_time(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Throughput over time, relative to fault-free: a line for each policy, named at its end, its mean over each
    hour (of a short time: over a 200th of it), with the failures marked above. The first trace, where there are
    several."""
    made, (axes,) = figure(f"Simulated: {title or 'throughput through a failure trace'}", 4.2)
    free, duration = rows[0].free[0], rows[0].outcomes[0].duration
    parts = round(duration / 3600) if duration >= _LONG else 200
    ends = []
    for row, colour in zip(rows, cycle(COLOURS)):
        hours, values = smoothed(row.outcomes[0], parts)
        dashed = row.name.startswith("fault-")
        axes.plot([hour / 3600 for hour in hours], [value / free for value in values], color=colour,
                  linewidth=1.0 if dashed else 1.6, linestyle="--" if dashed else "-")
        ends.append((values[-1] / free, row.name, colour))
    top = axes.get_ylim()[1]
    marks = rows[0].outcomes[0].marks
    axes.plot([mark / 3600 for mark in marks], [top] * len(marks), "|", color=INK, markersize=6)
    for row in rows:
        if row.outcomes[0].fatal_marks:
            axes.plot([mark / 3600 for mark in row.outcomes[0].fatal_marks], [0] * row.outcomes[0].fatal, "x",
                      color="grey", markersize=4)
    axes.set_xlabel("hours; strokes above: failures, crosses below: a policy had to start the job again")
    axes.set_ylabel("throughput, of 1F1B without failures")
    axes.set_ylim(bottom=-0.02)
    name_ends(axes, ends)
    save(made, path)


def smoothed(outcome: Outcome, parts: int = 200) -> tuple[list[float], list[float]]:
    """Middles of ``parts`` equal parts of the time, and the mean rate in each."""
    width = outcome.duration / parts
    ends = [*(at for at, _ in outcome.rate[1:]), outcome.duration]
    sums = [0.0] * parts
    for (begin, rate), end in zip(outcome.rate, ends):
        first, last = int(begin / width), min(parts - 1, int(end / width))
        for part in range(first, last + 1):
            sums[part] += rate * max(0.0, min(end, (part + 1) * width) - max(begin, part * width))
    return [(part + 0.5) * width for part in range(parts)], [value / width for value in sums]
