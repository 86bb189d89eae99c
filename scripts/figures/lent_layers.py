#!/usr/bin/env python3
"""Throughput over workers lost, by plans alone: re-routing, layers moved for good, and layers lent to neighbours.

Planned, not measured: periods of legal plans of 8 pipelines x 8 stages x 16 micro-batches with 8 layers a stage, means
over the same seeded draws of lost workers (scripts/bench/lending.py has the costs and more grids). The copies that
moving and lending take are not in it, and neither are stalls.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import CONSOLE, picture, write
from lending import Shape, drawn, moved, searched

from megatron_recycle.planner import plan_for
from megatron_recycle.simulate.pictures import lines

SHAPE = Shape(8, 8, 16, 8)
LOST = (0, 1, 2, 3, 4, 6, 8, 10)
DRAWS, WORK, LEND = 3, 150_000, 2
NAMES = ("re-routing (ReCycle)", "layers moved for good", "lent layers, 2 a boundary", "limit: no bubble")
ASSUMED = (
    "planned, not measured: periods of legal plans, relative to our own plan without failures",
    "stages of 20, 22 and 18 units, no hop, no step; a worker may hold 1.5 S micro-batches",
    "no stalls, and no copies of state (moved layers) or of parameters (lent layers)",
)


def main() -> None:
    whole = plan_for(SHAPE.problem(), work=WORK).period
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    results = []
    for count in LOST:
        periods: dict[str, list[float]] = {name: [] for name in NAMES}
        for seed in range(DRAWS if count else 1):
            failed = drawn(SHAPE, count, seed)
            rerouted = plan_for(SHAPE.problem(failed), work=WORK)
            found = (rerouted.period, moved(SHAPE, failed, WORK)[0].period,
                     searched(SHAPE.problem(failed, LEND), rerouted, WORK).period, SHAPE.limit(failed))
            for name, period in zip(NAMES, found):
                periods[name].append(whole / period)
        for name in NAMES:
            series[name].append((count, round(statistics.mean(periods[name]), 4)))
        results.append({"lost": count, **{name: series[name][-1][1] for name in NAMES}})
        CONSOLE.print(results[-1])
    write("lent_layers", {"assumptions": ASSUMED, "grid": "8x8x16", "layers": SHAPE.layers, "draws": DRAWS,
                          "results": results})
    lines(series, picture("lent_layers"), "Throughput over workers lost, of 64 (planned, not measured)", "workers lost",
          "throughput, of our plan without failures")


if __name__ == "__main__":
    main()
