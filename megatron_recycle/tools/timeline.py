"""`recycle timeline PLAN [PLAN] [-o PICTURE]`: one plan file as a picture, or two of them one above the other.
`recycle timeline RUN [--iteration K]`: an iteration of a job, its plan above the recorded run, and a Perfetto trace.

A picture has one row per worker, time from left to right, as the replay runs them from a cold start. Forward,
input-gradient and weight-gradient work, full backwards and the step have a colour each; work done for another pipeline
(a guest) is hatched; failed workers are grey rows. Small grids carry the micro-batch numbers inside the boxes, large
ones are drawn smaller and without. Matplotlib is loaded on the first drawing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_recycle.errors import ConfigError
from megatron_recycle.membership.names import Process
from megatron_recycle.plan import Plan, PlanError, Timeline, Worker, check, replay
from megatron_recycle.tools.picture_style import GREEN, INK, ORANGE, PURPLE, SKY, WIDTH, YELLOW, looks

if TYPE_CHECKING:
    from megatron_recycle.tools.operate.iteration import Iteration

FORMATS = (".png", ".svg", ".pdf")

COLOURS = {"F": SKY, "B": ORANGE, "W": GREEN, "FB": YELLOW, "S": PURPLE}
NAMES = {"F": "forward", "B": "input gradient", "W": "weight gradient", "FB": "both gradients in one",
         "S": "reduce and step"}
FAILED = "#bdbdbd"

_ROW = 0.8  # height of a box, in rows
_LARGE = 48  # from this many rows on, rows shrink and only some are labelled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle timeline`."""
    parser.add_argument("plan", help="plan file (JSON), or the folder of a run")
    parser.add_argument("after", nargs="?", help="a second plan file, drawn below the first")
    parser.add_argument("--iteration", type=int, metavar="K",
                        help="of a run (default: the latest that its workers have written down, every 25th and those "
                        "around a failure)")
    parser.add_argument("-o", "--output", metavar="FILE",
                        help="picture: .png, .svg or .pdf (default: the last plan's name with .png, or "
                        "RUN-iteration-K.svg, in this folder); of a run also FILE's name with .trace.json, for "
                        "ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    """Draw and return 0. Raises PlanError or ConfigError, which the dispatcher prints in one line."""
    if Path(args.plan).is_dir():
        return _run_of_job(args)
    if args.iteration is not None:
        raise ConfigError(f"--iteration is of a run, and {args.plan} is no folder of one")
    output = args.output or Path(args.after or args.plan).with_suffix(".png").name
    if args.after is None:
        draw(output, (_legal(args.plan), ""))
    else:
        draw(output, *((_legal(path), path) for path in (args.plan, args.after)))
    print(output)
    return 0


def _run_of_job(args: argparse.Namespace) -> int:
    """Draw an iteration of a job. Raises ConfigError."""
    from megatron_recycle.tools.operate.iteration import load, trace

    if args.after is not None:
        raise ConfigError("a run's iteration stands beside its own plan: give no second file")
    found = load(Path(args.plan), args.iteration)
    output = Path(args.output or f"{Path(args.plan).resolve().name}-iteration-{found.number}.svg")
    draw_iteration(found, output)
    beside = output.with_suffix(".trace.json")
    try:
        beside.write_text(json.dumps(trace(found)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{beside} cannot be written: {error.strerror}") from error
    print(f"{output}\n{beside}")
    return 0


def draw_iteration(found: Iteration, path: Path) -> None:
    """Draw an iteration's plan above its recorded run, on the same axis of milliseconds. Raises ConfigError."""
    from megatron_recycle.tools.operate.iteration import scale

    plan, processes = found.plan, {name: Process.parse(name) for name in found.spans}
    workers = [*dict.fromkeys(one.worker for one in processes.values())]
    failed: Collection[Worker] = ()
    if plan is not None:
        workers, failed = [*plan.problem.grid.workers()], plan.problem.failed
    recorded = [_box(process.worker, one.kind, one.name, 1000 * one.start, 1000 * one.end)
                for name, process in processes.items() if not process.part  # of a worker with several parts the first
                for one in found.spans[name] if one.kind]
    panels = [Panel(f"iteration {found.number}, generation {found.generation}, as it was", recorded, workers, failed)]
    if plan is not None:
        unit = 1000 * (found.unit or scale(found))
        planned = [replace(box, start=unit * box.start, end=unit * box.end) for box in boxes(plan, replay(plan))]
        how = "with measured costs" if found.unit else "costs not measured yet: drawn as long as what was"
        panels.insert(0, Panel(f"plan ({plan.source}), {how}", planned, workers, failed))
    _draw(panels, path, Style(), "milliseconds since the iteration's first action")


def _legal(path: str) -> Plan:
    """The plan of a file, checked: a picture of an illegal plan would show impossible times."""
    try:
        return check(Plan.load(path))
    except PlanError as error:
        text = str(error)
        raise PlanError(text if path in text else f"{path}: {text}") from None


@dataclass(frozen=True)
class Style:
    """A picture's looks: `width` in inches; `facts`: whether a title has the plan's figures behind it; `ink`: of words
    and lines; `clear`: a transparent background, for pages that are light or dark."""

    width: float = 13.0
    facts: bool = True
    ink: str = "black"
    clear: bool = False


PAGE = Style(width=WIDTH, facts=False, ink=INK, clear=True)
"""For a page of documentation, 830 pixels wide."""


@dataclass(frozen=True)
class Box:
    """One action in the picture: `start` and `end` in the unit of the time axis."""

    worker: Worker
    kind: str
    start: float
    end: float
    guest: bool
    text: str


@dataclass(frozen=True)
class Panel:
    """A title above a row of boxes for each of ``workers``; the ``failed`` ones' rows are grey."""

    title: str
    boxes: Sequence[Box]
    workers: Sequence[Worker]
    failed: Collection[Worker]

    @property
    def large(self) -> bool:
        """Whether rows shrink, and only some are labelled."""
        return len(self.workers) >= _LARGE

    @property
    def height(self) -> float:
        """Inches."""
        return len(self.workers) * (0.13 if self.large else 0.27)


def draw(path: str | os.PathLike[str], *plans: tuple[Plan, str], style: Style | None = None) -> None:
    """Draw plans, each with its title, into `path` (.png, .svg or .pdf), one above the other on the same time axis.

    Raises:
        DeadlockError: a plan's orders can never finish.
        ConfigError: the file name has another ending, or the file cannot be written.
    """
    style, panels = style or Style(), []
    for plan, title in plans:
        timeline = replay(plan)
        panels.append(Panel(_headline(plan, timeline, title) if style.facts else title, boxes(plan, timeline),
                            plan.problem.grid.workers(), plan.problem.failed))
    _draw(panels, Path(path), style, "time from a cold start, in the unit of the plan's costs")


def boxes(plan: Plan, timeline: Timeline) -> tuple[Box, ...]:
    """A plan's actions as boxes, by worker and in their order, without actions done before the plan began."""
    return tuple(_box(worker, action.kind, str(action), start, end) for worker in sorted(plan.workers)
                 for action, (start, end) in zip(plan.rest(worker), timeline.times[worker][plan.done.get(worker, 0):]))


def _box(worker: Worker, kind: str, action: str, start: float, end: float) -> Box:
    """The box of an action, by its name as in `F1.4`."""
    pipeline, _, number = action.lstrip("FBW").partition(".")
    guest = kind != "S" and pipeline != str(worker.pipeline)
    return Box(worker, kind, start, end, guest, "" if kind == "S" else f"{pipeline}.{number}" if guest else number)


def _draw(panels: Sequence[Panel], target: Path, style: Style, unit: str) -> None:
    """Panels one above the other; `unit` labels their time axis. Raises ConfigError."""
    if target.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw {target}: give a file name that ends in {', '.join(FORMATS)}")

    # Figure without pyplot: no global state, no window system.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    heights = [panel.height for panel in panels]
    span = max((box.end for panel in panels for box in panel.boxes), default=1)
    with rc_context({**looks(style.ink), "hatch.linewidth": 0.6, "text.color": "black"}):
        figure = Figure(figsize=(style.width, sum(heights) + 0.75 * len(panels) + 0.85), layout="constrained")
        axes: Any = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights, sharex=True)
        for axis, panel in zip(axes[:, 0], panels):
            _draw_panel(axis, panel, max(1, span), style)
        axes[-1, 0].set_xlabel(unit)
        _legend(figure, panels, style)
        quiet = {"Date": None} if target.suffix.lower() == ".svg" else None
        try:
            figure.savefig(target, dpi=120, metadata=quiet, transparent=style.clear)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written: {error.strerror}") from error


def _draw_panel(axis: Any, panel: Panel, span: float, style: Style) -> None:
    """One panel on one pair of axes; `span` is the common length of the time axis."""
    workers, failed = panel.workers, panel.failed
    row = {worker: number for number, worker in enumerate(workers)}
    for worker in workers:
        if worker in failed:
            axis.axhspan(row[worker] - _ROW / 2, row[worker] + _ROW / 2, color=FAILED, lw=0)
    _boxes(axis, panel.boxes, row)
    points = panel.height * 72 / len(workers) * _ROW
    _numbers(axis, panel.boxes, row, points_per_unit=style.width * 0.9 * 72 / span, points_per_row=points)
    if points > 9:
        for worker in failed:
            axis.text(span * 0.005, row[worker], "failed", va="center", color="#555555", style="italic")
    for above, below in pairwise(workers):
        if above.pipeline != below.pipeline:
            axis.axhline(row[below] - 0.5, color=INK, lw=0.5)
    named = [worker for worker in workers if not panel.large or worker.stage == 0 or worker in failed]
    axis.set_yticks([row[worker] for worker in named], [str(worker) for worker in named])
    axis.tick_params(axis="y", labelsize=6 if panel.large else 9)
    axis.set_ylim(len(workers) - 0.5, -0.5)
    axis.set_xlim(0, span * 1.01)
    axis.set_ylabel("worker (pipeline:stage)")
    axis.set_title(panel.title, loc="left", fontsize=10)


def _boxes(axis: Any, shown: Sequence[Box], row: dict[Worker, int]) -> None:
    """All boxes, as one collection per look: thousands of single patches would take seconds."""
    from matplotlib.collections import PolyCollection

    looks: dict[tuple[str, bool], list[list[tuple[float, float]]]] = {}
    instants: list[Box] = []
    for box in shown:
        if box.end == box.start:
            instants.append(box)
            continue
        low, high = row[box.worker] - _ROW / 2, row[box.worker] + _ROW / 2
        corners = [(box.start, low), (box.end, low), (box.end, high), (box.start, high)]
        looks.setdefault((box.kind, box.guest), []).append([(float(x), y) for x, y in corners])
    for (kind, guest), polygons in looks.items():
        hatch = "/////" if guest else None
        edge = "#303030" if guest else "white"
        axis.add_collection(
            PolyCollection(polygons, facecolor=COLOURS[kind], edgecolor=edge, linewidth=0.4, hatch=hatch))
    for box in instants:  # a step of no cost is still there
        middle = row[box.worker]
        axis.vlines(box.start, middle - _ROW / 2, middle + _ROW / 2, color=COLOURS[box.kind], lw=1.6)


def _numbers(axis: Any, shown: Sequence[Box], row: dict[Worker, int], points_per_unit: float, points_per_row: float
             ) -> None:
    """Write micro-batch numbers into the boxes with room for them (5 points a character, 8 a line)."""
    if points_per_row < 8:
        return
    for box in shown:
        if box.text and (box.end - box.start) * points_per_unit > 5 * len(box.text) + 2:
            # A guest's number stands on its own patch, or the hatching would cross it out.
            patch = {"facecolor": COLOURS[box.kind], "edgecolor": "none", "pad": 0.6} if box.guest else None
            axis.text((box.start + box.end) / 2, row[box.worker], box.text, ha="center", va="center", fontsize=7,
                      bbox=patch)


def _headline(plan: Plan, timeline: Timeline, title: str) -> str:
    grid = plan.problem.grid
    counts = sorted(set(grid.microbatches))
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    parts = [f"{grid.pipelines} pipelines x {grid.stages} stages x {each} micro-batches"]
    if plan.problem.failed:
        names = [str(worker) for worker in plan.problem.failed]
        parts.append("failed " + ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else ""))
    if plan.done:
        parts.append(f"the rest, after {sum(plan.done.values())} actions that were done before")
    parts.append(f"period {timeline.period:g}, makespan {timeline.makespan:g}")
    parts.append(f"{plan.problem.objective}'s bound {plan.lower_bound:g}, plan by {plan.source}")
    return (f"{title}: " if title else "") + "; ".join(parts)


def _legend(figure: Any, panels: Sequence[Panel], style: Style) -> None:
    """Add a line below the panels that explains the looks that occur in them."""
    from matplotlib.patches import Patch

    shown = [box for panel in panels for box in panel.boxes]
    kinds = {box.kind for box in shown}
    handles = [Patch(facecolor=COLOURS[kind], label=f"{kind}  {NAMES[kind]}") for kind in NAMES if kind in kinds]
    failed = any(panel.failed for panel in panels)
    if failed or any(box.guest for box in shown):
        handles.append(
            Patch(facecolor="white", edgecolor="#303030", hatch="/////", label="guest (of another pipeline)"))
    if failed:
        handles.append(Patch(facecolor=FAILED, label="failed worker"))
    columns = len(handles) if style.width > 10 else -(-len(handles) // 2)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, labelcolor=style.ink)
