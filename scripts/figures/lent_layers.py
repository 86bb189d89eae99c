#!/usr/bin/env python3
"""Throughput over workers lost, by plans alone: README's picture of lent layers, and its numbers.

Draws what `scripts/bench/lending.py` has left in runs/bench/lending.json: planned, not measured. Numbers go to
docs/figures/lent_layers.json, the picture to docs/figures/lent_layers.svg.

    python scripts/bench/lending.py --layers 8 && python scripts/figures/lent_layers.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import CONSOLE, write
from draw import LENT, LENT_GRIDS, LENT_LOST, draw

LAYERS = 8
ASSUMED = (
    "planned, not measured: periods of legal plans, relative to our own plan without failures and without chunks",
    "stages of 20, 22 and 18 units, 8 layers a stage, no hop, no step; a worker may hold 1.5 S micro-batches",
    "no stalls, and no copies of state (moved layers) or of parameters (lent layers)",
    "V-shaped: two chunks a worker, twice as many messages, which cost nothing here",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw README's picture of lent layers.")
    parser.add_argument("--numbers", type=Path, default=Path("runs/bench/lending.json"))
    numbers = parser.parse_args().numbers
    if not numbers.exists():
        raise SystemExit(f"{numbers} is not there: run scripts/bench/lending.py --layers {LAYERS}")
    told = json.loads(numbers.read_text(encoding="utf-8"))
    rows = [row for row in told["rows"] if row["layers"] == LAYERS and row["grid"] in LENT_GRIDS]
    there = {(row["grid"], row["failures"]) for row in rows}
    missing = {(grid, name) for grid in LENT_GRIDS for name in LENT_LOST} - there
    if missing:
        raise SystemExit(f"not there: {sorted(missing)}; run scripts/bench/lending.py --layers {LAYERS}")
    keys = ("grid", "failures", "gone", *(key for key, *_ in LENT), "lent 1", "share")
    write("lent_layers", {"assumptions": ASSUMED, "layers": LAYERS, "work": told["work"], "results": [
        {key: row[key] for key in keys if key in row} for row in rows]})
    CONSOLE.print(f"{draw('lent_layers')} is drawn")


if __name__ == "__main__":
    main()
