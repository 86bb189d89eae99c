#!/usr/bin/env python3
"""Throughput against memory: how many micro-batches a worker may hold, in shares of the stages.

Plans of 8 pipelines x 4 stages, 16 micro-batches, and 8 x 8 x 16, without failures and with one and two, against stock
1F1B without failures (whose first stage holds S).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import even, write
from draw import draw

from megatron_recycle.plan import Worker
from megatron_recycle.tools.simulate.plans import Plans

SHARES = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)


def main() -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for pipelines, stages, microbatches in ((8, 4, 16), (8, 8, 16)):
        stock = Plans(even(pipelines, stages, microbatches)).stock().period
        for count in (0, 1, 2):
            failed = [Worker(0, stages // 2), Worker(1, stages - 1)][:count]
            name = f"{pipelines}x{stages}x{microbatches}, {count} failed"
            for share in SHARES:
                plans = Plans(even(pipelines, stages, microbatches, max(1, round(share * stages))))
                series.setdefault(name, []).append((share, round(stock / plans.rerouted(failed).period, 4)))
    write("memory", {"results": [{"series": name, "points": points} for name, points in series.items()]})
    draw("memory")


if __name__ == "__main__":
    main()
