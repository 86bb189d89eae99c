#!/usr/bin/env python3
"""Throughput over workers lost, by plans alone: README's picture of lent layers, and its numbers.

Draws what `scripts/bench/lending.py` has left in runs/bench/lending.json: planned, not measured. Numbers go to
docs/figures/lent_layers.json, the picture to docs/figures/lent_layers.svg; its lines and words have colours that can be
read on white and on black.

    python scripts/bench/lending.py --layers 8 && python scripts/figures/lent_layers.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import CONSOLE, FOLDER, picture, write

Row = Mapping[str, Any]
GRIDS, LAYERS = ("8x8x16", "16x8x32", "32x8x32"), 8
OVER = ("none", "one", "5 %", "10 %")
"""Failures that are drawn; others go into the numbers."""
SERIES = (
    ("limit", "work-conserving limit", "#8b949e", "--"), ("V lent 2", "V-shaped, lent layers", "#8957e5", "-"),
    ("lent 2", "lent layers", "#1f9e89", "-"), ("moved", "layers moved for good", "#d29922", "-"),
    ("route", "re-routing (ReCycle)", "#e5534b", "-"))
"""What `lending.py` calls it, what people do, and how it is drawn."""
WORDS = "#808a94"
"""Their colour: it stands out from white and from black."""
ASSUMED = (
    "planned, not measured: periods of legal plans, relative to our own plan without failures and without chunks",
    "stages of 20, 22 and 18 units, 8 layers a stage, no hop, no step; a worker may hold 1.5 S micro-batches",
    "no stalls, and no copies of state (moved layers) or of parameters (lent layers)",
    "V-shaped: two chunks a worker, twice as many messages, which cost nothing here",
)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each grid, a line for each system."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    quiet = {"text.color": WORDS, "axes.labelcolor": WORDS, "axes.edgecolor": WORDS, "xtick.color": WORDS,
             "ytick.color": WORDS, "svg.fonttype": "none", "svg.hashsalt": "lent", "font.size": 9,
             "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(quiet):
        figure, panels = pyplot.subplots(1, len(GRIDS), figsize=(9, 3.1), sharey=True, layout="constrained")
        for grid, axes in zip(GRIDS, panels):
            chosen = [row for row in rows if row["grid"] == grid and row["failures"] in OVER]
            pipelines, stages, _ = map(int, grid.split("x"))
            for key, label, colour, style in SERIES:
                axes.plot([100 * row["gone"] / (pipelines * stages) for row in chosen], [row[key] for row in chosen],
                          style, color=colour, label=label, linewidth=1.8, marker="o" if style == "-" else "",
                          markersize=3.5)
            axes.set_title(f"{pipelines * stages} workers: {grid.replace('x', ' x ')}", fontsize=9)
            axes.grid(axis="y", color=WORDS, alpha=0.25, linewidth=0.6)
            axes.set_xticks([0, 5, 10], ["0", "5 %", "10 %"])
            axes.set_xlabel("workers lost")
        panels[0].set_ylabel("throughput, of none lost")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(SERIES),
                      frameon=False, fontsize=8.5, handlelength=1.6, columnspacing=1.4)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n",
                    encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw README's picture of lent layers.")
    parser.add_argument("--numbers", type=Path, default=Path("runs/bench/lending.json"))
    numbers = parser.parse_args().numbers
    if not numbers.exists():
        raise SystemExit(f"{numbers} is not there: run scripts/bench/lending.py --layers {LAYERS}")
    told = json.loads(numbers.read_text(encoding="utf-8"))
    rows = [row for row in told["rows"] if row["layers"] == LAYERS and row["grid"] in GRIDS]
    missing = {(grid, name) for grid in GRIDS for name in OVER} - {(row["grid"], row["failures"]) for row in rows}
    if missing:
        raise SystemExit(f"not there: {sorted(missing)}; run scripts/bench/lending.py --layers {LAYERS}")
    keys = ("grid", "failures", "gone", *(key for key, *_ in SERIES), "lent 1", "share")
    write("lent_layers", {"assumptions": ASSUMED, "layers": LAYERS, "work": told["work"], "results": [
        {key: row[key] for key in keys if key in row} for row in rows]})
    draw(rows, picture("lent_layers").with_suffix(".svg"))
    CONSOLE.print(f"{FOLDER / 'lent_layers.svg'} is drawn")


if __name__ == "__main__":
    main()
