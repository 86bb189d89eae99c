#!/usr/bin/env python3
"""Throughput against the time between failures, 32 GPUs: one GPU after the other fails every 6 h, 2 h or 30 min.

The paper's grids (stages x pipelines): 2x16 (GPT-3 medium), 4x8 (3.35 B), 8x4 (6.7 B). 6 hours, the first failure after
half of the interval, no repair: at 30 min 12 of 32 GPUs are lost. Each with few and with many micro-batches, since the
paper's gain lives on the bubble. Means over 5 seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import STALLS, job_of, ratios, short, tell, write
from draw import draw

from megatron_recycle.tools.simulate.cluster import Cluster
from megatron_recycle.tools.simulate.compare import compare, makers
from megatron_recycle.tools.simulate.generating import spaced

GRIDS = (("gpt3-medium", 2, 16), ("gpt3-3.35b", 4, 8), ("gpt3-6.7b", 8, 4))
RATES = (("6 h", 6 * 3600.0), ("2 h", 2 * 3600.0), ("30 min", 1800.0))
POLICIES = ("ours", "lent-and-moves", "recycle-published", "moved-layers", "oobleck", "bamboo", "torchft",
            "checkpoint-restart", "fault-scaled")
HOURS, SEEDS = 6.0, 5


def main() -> None:
    found = []
    for model, stages, pipelines in GRIDS:
        for factor in (4, 16):
            job = job_of(model, pipelines, stages, factor * stages)
            for name, every in RATES:
                traces = [spaced(32, every, 3600 * HOURS, seed, first=every / 2) for seed in range(SEEDS)]
                rows, _ = compare(makers(POLICIES, STALLS), job, Cluster(32, 1), traces, work=0)
                title = f"{stages}x{pipelines} {model}, {factor * stages} micro-batches, a failure every {name}"
                tell(rows, title)
                found.append({"grid": f"{stages}x{pipelines}", "model": model, "microbatches": factor * stages,
                              "every": name, "claims": ratios(rows), "policies": short(rows)})
    write("failure_rates", {"hours": HOURS, "seeds": SEEDS, "repair": None, "results": found})
    draw("failure_rates")


if __name__ == "__main__":
    main()
