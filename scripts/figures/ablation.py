#!/usr/bin/env python3
"""The three techniques, one after the other: re-routing alone, with the split backward, with the staggered step.

Iterations of the plan with so many failed workers of different stages, against stock 1F1B without failures. Costs of
the scheduling study (20, 22, 18, hop 1, step 15), a worker may hold 2 S micro-batches.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import CONSOLE, even, write
from draw import draw
from rich.table import Table

from megatron_recycle.plan import Worker
from megatron_recycle.tools.simulate.plans import Plans

GRIDS = ((3, 4, 6), (4, 4, 8), (8, 4, 16), (16, 2, 8), (8, 8, 16), (16, 12, 32))
TECHNIQUES = ("adaptive", "decoupled", "staggered")


def main() -> None:
    table = Table("pipelines x stages x micro-batches", "failed", "dropped", *TECHNIQUES, "fault-scaled")
    found = []
    for pipelines, stages, microbatches in GRIDS:
        job = even(pipelines, stages, microbatches)
        stock = Plans(job).stock().period
        for count in (0, 1, 2):
            failed = [Worker(0, stages // 2), Worker(1, stages - 1)][:count]
            value = {name: stock / Plans(job, name).rerouted(failed).period for name in TECHNIQUES}
            dropped = stock / Plans(job).dropped(count).period
            scaled = 1 - count / job.size
            grid = f"{pipelines}x{stages}x{microbatches}"
            table.add_row(grid, str(count), *(f"{one:.3f}" for one in (dropped, *value.values(), scaled)))
            found.append({"grid": grid, "failed": [str(worker) for worker in failed], "of_fault_free":
                          {name: round(one, 4) for name, one in value.items()}, "dropped": round(dropped, 4),
                          "fault_scaled": round(scaled, 4)})
    CONSOLE.print(table)
    write("ablation", {"results": found})
    draw("ablation")


if __name__ == "__main__":
    main()
