#!/usr/bin/env python3
"""How long the planner takes for the plan that a job goes on with (`planner.quick`), against the size of the grid.

Processor time on this machine, the best of three; one failed worker. TP is 8 in the sizes in GPUs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import CONSOLE, even, write
from draw import draw

from megatron_recycle.plan import Worker
from megatron_recycle.planner import quick

GRIDS = ((3, 4, 8), (8, 4, 16), (8, 8, 16), (16, 8, 16), (16, 12, 32), (64, 8, 16), (128, 16, 16), (512, 12, 16),
         (1024, 12, 16))


def main() -> None:
    found = []
    for pipelines, stages, microbatches in GRIDS:
        problem = even(pipelines, stages, microbatches).problem(failed=(Worker(0, stages // 2),))
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            plan = quick(problem)
            best = min(best, time.process_time() - began)
        found.append({"grid": f"{pipelines}x{stages}x{microbatches}", "workers": pipelines * stages,
                      "gpus_tp8": 8 * pipelines * stages, "actions": 3 * pipelines * stages * microbatches,
                      "seconds": round(best, 4), "over_bound": round(plan.period / plan.lower_bound - 1, 4)})
        CONSOLE.print(found[-1])
    write("planner_latency", {"processors": os.cpu_count(), "results": found})
    draw("planner_latency")


if __name__ == "__main__":
    main()
