"""How soon a slow worker is noticed: iterations from its change until it is reported, by how much durations scatter.

    python scripts/bench/slowness.py

Durations are drawn from a logarithmic normal distribution: 3 pipelines x 2 stages, micro-batches of 0.1 s. Prints the
table of docs/slowness.md.
"""

from __future__ import annotations

import math
import random
from statistics import median

from megatron_recycle.measure import Profile
from megatron_recycle.plan import Worker

SCATTER = (0.01, 0.05, 0.1, 0.2)
FACTORS = (1.2, 1.5, 2.0, 4.0)
JOBS, BEFORE, MOST, CALM = 5, 15, 30, 300
WORKERS = tuple(Worker(pipeline, stage) for pipeline in range(3) for stage in range(2))
SLOW = Worker(1, 1)


def iteration(profile: Profile, draw: random.Random, scatter: float, factor: float) -> set[Worker]:
    """Measure one iteration of all workers; returns the workers that count as slow afterwards."""
    for worker in WORKERS:
        times = 0.1 * math.exp(draw.gauss(0.0, scatter)) * (factor if worker == SLOW else 1.0)
        profile.add(worker, {"F": 0.3 * times, "B": 0.4 * times, "W": 0.3 * times})
    return {worker for worker, factor in profile.factors(WORKERS).items() if factor > 1}


def noticed(seed: int, scatter: float, factor: float) -> float:
    """Iterations until the slow worker is reported; infinite if it is not within MOST."""
    profile, draw = Profile(), random.Random(seed)
    for _ in range(BEFORE):
        iteration(profile, draw, scatter, 1.0)
    slow = (SLOW in iteration(profile, draw, scatter, factor) for _ in range(MOST))
    return next((number for number, found in enumerate(slow, 1) if found), math.inf)


def mistaken(scatter: float) -> int:
    """Iterations of CALM in which some worker counts as slow, though none is."""
    profile, draw = Profile(), random.Random(0)
    return sum(bool(iteration(profile, draw, scatter, 1.0)) for _ in range(CALM))


def table() -> str:
    """The results as a Markdown table."""
    rows = ["| scatter | " + " | ".join(f"x {factor:g}" for factor in FACTORS) + " | mistaken |",
            "| --- " * (len(FACTORS) + 2) + "|"]
    for scatter in SCATTER:
        cells = [median(noticed(seed, scatter, factor) for seed in range(JOBS)) for factor in FACTORS]
        shown = " | ".join("never" if cell == math.inf else f"{cell:g}" for cell in cells)
        rows.append(f"| {scatter:.0%} | {shown} | {mistaken(scatter)} of {CALM} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
