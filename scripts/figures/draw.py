#!/usr/bin/env python3
"""Draws docs/figures/NAME.svg from docs/figures/NAME.json: all of them, or those that are named.

    python scripts/figures/draw.py [NAME ...]

The programs beside this one make the numbers, and draw with this one. `gcp_replay` draws itself, from all that
happened.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_recycle.tools.picture_style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    figure,
    name_ends,
    save,
)

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
OF_STOCK = "throughput, of 1F1B without failures"
Numbers = Mapping[str, Any]
COMPARED = (("lent-and-moves", "ours, lent layers", BLUE), ("ours", "ours", SKY), ("oobleck", "Oobleck", VERMILION),
            ("torchft", "torchft", GREEN))
"""Policies of the simulator that pictures show: tables have all."""
LENT = (("limit", "limit", INK, "--"), ("V lent 2", "V, lent layers", BLUE, "-"), ("lent 2", "lent layers", GREEN, "-"),
        ("moved", "layers moved", ORANGE, "-"), ("route", "re-routing", VERMILION, "-"))
"""What `scripts/bench/lending.py` calls a way, what people do, and how it is drawn."""
LENT_GRIDS, LENT_LOST = ("8x8x16", "16x8x32", "32x8x32"), ("none", "one", "5 %", "10 %")
TECHNIQUES = (("staggered", "+ staggered step", BLUE), ("decoupled", "+ split backward", SKY),
              ("adaptive", "re-routing alone", ORANGE), ("dropped", "hit pipelines dropped", PURPLE))
ABLATED = ("3x4x6", "8x4x16", "16x12x32")


def explain(made: Any, panels: Sequence[Any], ylabel: str, cut: bool = False) -> None:
    """The label of the vertical axis, with a note if it does not begin at 0, and one legend of all panels."""
    panels[0].set_ylabel(f"{ylabel}\n(axis does not begin at 0)" if cut else ylabel)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        made.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, labelcolor=INK)


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Draw one picture and return where it is."""
    numbers = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    path = folder / f"{name}.svg"
    save(DRAWN[name](numbers), path)
    return path


def ablation(numbers: Numbers) -> Any:
    """Horizontal bars, a panel for each grid."""
    made, panels = figure("Planned: re-routing alone keeps 0.77 to 1.01 of stock, with split backward and staggered "
                          "step 1.01 to 1.25", 3.0, len(ABLATED), sharex=True)
    for axes, grid in zip(panels, ABLATED):
        rows = [row for row in numbers["results"] if row["grid"] == grid and row["failed"]]
        for place, row in enumerate(rows):
            for number, (key, label, colour) in enumerate(TECHNIQUES):
                value = row["of_fault_free"].get(key, row.get(key))
                at = place * (len(TECHNIQUES) + 1) + number
                axes.barh(at, value, color=colour, height=0.9, label=label if not place else None)
                axes.text(value - 0.02, at, f"{value:.2f}", va="center", ha="right", fontsize=7,
                          color="white" if colour == BLUE else "black")
        axes.set_yticks([place * (len(TECHNIQUES) + 1) + 1.5 for place in range(len(rows))],
                        [f"{len(row['failed'])} lost" for row in rows])
        axes.invert_yaxis()
        axes.axvline(1.0, color=INK, linewidth=0.6, zorder=0)
        axes.grid(visible=False)
        axes.set_title(grid.replace("x", " x "), fontsize=9)
    panels[1].set_xlabel(OF_STOCK)
    explain(made, panels, "")
    return made


def failure_rates(numbers: Numbers) -> Any:
    """A panel for each grid, a line for each policy over the failure rate."""
    rates = ("6 h", "2 h", "30 min")
    grids = [*dict.fromkeys(row["grid"] for row in numbers["results"])]
    made, panels = figure("Simulated: 4 micro-batches a stage, a failure every 30 min: ours keeps 0.92 to 0.96 of "
                          "stock, torchft 0.25 to 0.67", 3.4, len(grids), sharey=True)
    for axes, grid in zip(panels, grids):
        stages, pipelines = grid.split("x")
        rows = {row["every"]: row for row in numbers["results"]
                if row["grid"] == grid and row["microbatches"] == 4 * int(stages)}
        _policies(axes, [rows[every] for every in rates], [f"{every}" for every in rates])
        axes.set_title(f"{pipelines} pipelines x {stages} stages", fontsize=9)
        axes.set_xlabel("a failure every")
    panels[0].set_ylim(0)
    explain(made, panels, OF_STOCK)
    return made


def large_scale(numbers: Numbers) -> Any:
    """A panel for each size, a line for each policy over the share that is lost."""
    sizes = [*dict.fromkeys(row["gpus"] for row in numbers["results"])]
    made, panels = figure("Simulated: with 1 to 10 % of the hosts gone ours keeps 0.99 to 1.16 of stock (145 B, TP 8)",
                          3.4, len(sizes), sharey=True)
    for axes, size in zip(panels, sizes):
        rows = [row for row in numbers["results"] if row["gpus"] == size]
        _policies(axes, rows, [f"{100 * row['share']:.0f} %" for row in rows])
        axes.set_title(f"{size:,} GPUs", fontsize=9)
        axes.set_xlabel("hosts lost")
    panels[0].set_ylim(0)
    explain(made, panels, OF_STOCK)
    return made


def _policies(axes: Any, rows: Sequence[Numbers], names: Sequence[str]) -> None:
    """Lines with 95 % confidence intervals over the drawn traces."""
    for key, label, colour in COMPARED:
        found = [next(policy for policy in row["policies"] if policy["policy"] == key) for row in rows]
        axes.errorbar(range(len(rows)), [one["of_fault_free"] for one in found],
                      [one["of_fault_free_ci95"] for one in found], color=colour, label=label, marker="o",
                      markersize=3.5, linewidth=1.6, capsize=2, elinewidth=0.8)
    axes.set_xticks(range(len(rows)), names)
    axes.set_xlim(-0.3, len(rows) - 0.7)
    axes.axhline(1.0, color=INK, linewidth=0.6)


def memory(numbers: Numbers) -> Any:
    """A panel for each grid, a line for each number of failures, named at its end."""
    made, panels = figure("Planned: twice the activations of stock buy nearly all of the gain", 3.4, 2, sharey=True)
    named = []
    for axes, grid in zip(panels, ("8x4x16", "8x8x16")):
        ends = []
        for series, colour in zip([row for row in numbers["results"] if row["series"].startswith(grid)],
                                  (BLUE, ORANGE, VERMILION)):
            points = series["points"]
            axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker="o", markersize=3.5,
                      linewidth=1.6)
            ends.append((points[-1][1], series["series"].partition(", ")[2].replace("failed", "lost"), colour))
        axes.set_title(f"{grid.replace('x', ' x ')}", fontsize=9)
        axes.set_xlabel("micro-batches that a worker may hold, in stages")
        named.append((axes, ends))
    for axes, ends in named:  # all have the same scale by now
        name_ends(axes, ends)
    explain(made, panels, OF_STOCK, cut=True)
    return made


def planner_latency(numbers: Numbers) -> Any:
    """Seconds until the first plan over the size of the job."""
    rows = numbers["results"]
    made, (axes,) = figure("Measured: a first plan takes 0.07 s for 1,536 GPUs and 2 s for 98,304", 3.2)
    axes.plot([row["gpus_tp8"] for row in rows], [row["seconds"] for row in rows], color=BLUE, marker="o",
              markersize=3.5, linewidth=1.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for row in (rows[0], rows[len(rows) // 2], rows[-1]):
        axes.annotate(f"{row['seconds']:.2g} s, {row['workers']:,} workers", (row["gpus_tp8"], row["seconds"]),
                      xytext=(8, -3) if row is rows[0] else (-6, 6), textcoords="offset points",
                      ha="left" if row is rows[0] else "right",
                      fontsize=8, color=INK)
    axes.set_xlabel("GPUs, 8 to a worker (both axes are logarithmic)")
    axes.set_ylabel("seconds of processor time")
    return made


def lent_layers(numbers: Numbers) -> Any:
    """A panel for each grid, a line for each way."""
    made, panels = figure("Planned: a tenth of the workers lost, lent layers keep 0.85 to 0.91, re-routing 0.78 to "
                          "0.82", 3.5, len(LENT_GRIDS), sharey=True)
    for grid, axes in zip(LENT_GRIDS, panels):
        chosen = [row for row in numbers["results"] if row["grid"] == grid and row["failures"] in LENT_LOST]
        pipelines, stages, _ = map(int, grid.split("x"))
        for key, label, colour, style in LENT:
            axes.plot([100 * row["gone"] / (pipelines * stages) for row in chosen], [row[key] for row in chosen], style,
                      color=colour, label=label, linewidth=1.6, marker="o" if style == "-" else "", markersize=3.5)
        axes.set_title(f"{pipelines * stages} workers: {grid.replace('x', ' x ')}", fontsize=9)
        axes.set_xticks([0, 5, 10], ["0", "5 %", "10 %"])
        axes.set_xlabel("workers lost")
    explain(made, panels, "throughput, of ours with none lost", cut=True)
    return made


DRAWN: Mapping[str, Callable[[Numbers], Any]] = {
    one.__name__: one for one in (ablation, failure_rates, large_scale, memory, planner_latency, lent_layers)}
"""By the name of the numbers' file."""


if __name__ == "__main__":
    for name in sys.argv[1:] or DRAWN:
        print(draw(name))
