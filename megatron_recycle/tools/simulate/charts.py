"""Pictures of outcomes, for pages that are light or dark. matplotlib is loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_recycle.tools.simulate.report import Estimate, Row
from megatron_recycle.tools.simulate.run import Outcome

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#f0e442")
"""Okabe and Ito's, which colour-blind readers can tell apart too."""
INK = "#808080"
"""Words and lines are seen on white and on black."""
_LONG = 10 * 3600.0
"""From so many seconds on a point is an hour's mean."""


def over_time(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Throughput over time, relative to fault-free: a line for each policy, named at its end, its mean over each
    hour (of a short time: over a 200th of it), with the failures marked above. The first trace, where there are
    several."""
    figure, axes = _figure(f"Simulated: {title or 'throughput through a failure trace'}", (8.3, 4.2))
    free, duration = rows[0].free[0], rows[0].outcomes[0].duration
    parts = round(duration / 3600) if duration >= _LONG else 200
    ends = []
    for row in rows:
        hours, values = smoothed(row.outcomes[0], parts)
        dashed = row.name.startswith("fault-")
        (line,) = axes.plot([hour / 3600 for hour in hours], [value / free for value in values],
                            linewidth=1.0 if dashed else 1.6, linestyle="--" if dashed else "-")
        ends.append((values[-1] / free, row.name, line.get_color()))
    _name_ends(axes, ends)
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
    _save(figure, path)


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


def bars(groups: Mapping[str, Mapping[str, Estimate]], path: Path, title: str = "", ylabel: str = "") -> None:
    """Groups of bars (a failure rate, a size), a bar for each policy, with confidence intervals."""
    figure, axes = _figure(title, (9, 4.5))
    names = [*dict.fromkeys(name for values in groups.values() for name in values)]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        at = [place + (index - (len(names) - 1) / 2) * width for place in range(len(groups))]
        values = [group.get(name, Estimate(0.0)) for group in groups.values()]
        axes.bar(at, [value.mean for value in values], width, yerr=[value.half for value in values], label=name,
                 error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(groups)), [*groups])
    axes.set_ylabel(ylabel or "throughput, of 1F1B without failures")
    axes.axhline(1.0, color="grey", linewidth=0.6)
    axes.legend(fontsize="small", ncols=2, loc="lower left")
    _save(figure, path)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str, xlabel: str, ylabel: str, *,
          log: bool = False) -> None:
    """A line for each series of points."""
    figure, axes = _figure(title, (7, 4.2))
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(fontsize="small")
    _save(figure, path)


def _name_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each line's name behind its end (value, name, colour), one above the other where these lie together."""
    low, high = axes.get_ylim()
    least, at = 0.05 * (high - low), -float("inf")
    for value, name, colour in sorted(ends):
        at = max(value, at + least)
        axes.annotate(name, (1.01, at), xycoords=("axes fraction", "data"), color=colour, va="center", fontsize="small",
                      annotation_clip=False)


def _figure(title: str, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot

    inked = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "legend.labelcolor")
    looks = {**dict.fromkeys(inked, INK), "axes.prop_cycle": cycler(color=COLOURS), "svg.fonttype": "none",
             "svg.hashsalt": "megatron-recycle", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(looks):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.set_title(title, fontsize="medium", color=INK)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    quiet = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=110, transparent=path.suffix == ".svg", metadata=quiet)
    pyplot.close(figure)
