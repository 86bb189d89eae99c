"""Logical pipelines: the worker that stands for each pipeline at each stage, and the pipelines that are missing whole.

Pipeline labels are free per stage, as peers hold the same parameters. So failures of different stages are put into the
same logical pipelines, which costs no copies. A pipeline that is missing at every stage is peeled off: its
micro-batches are dealt to the others once, for all stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import PlanError
from .instance import Instance


@dataclass(frozen=True)
class Unit:
    """Micro-batches of one pipeline that stay together at every stage: a single one, or a block."""

    pipeline: int
    jobs: tuple[int, ...]


@dataclass(frozen=True)
class Alignment:
    """``home[s][d]``: worker that stands for logical pipeline ``d`` at stage ``s``, -1 for none.
    ``crews[d]``: the units that logical pipeline ``d`` runs. ``at[s]``: the workers of stage ``s`` that take part.
    ``label[j]``: the logical pipeline of a job."""

    home: list[list[int]]
    at: list[list[int]]
    crews: list[list[Unit]]
    label: list[int]


def aligned(instance: Instance) -> Alignment:
    """Failures gathered into as few logical pipelines as possible; pipelines missing at every stage are peeled off."""
    grid = instance.problem.grid
    lost = [sum(1 for s in range(grid.stages) if instance.home[s][d] < 0) for d in range(grid.pipelines)]
    # pipelines with most failures first, so that fewest workers change their label; ties: least work first
    holes = sorted(range(grid.pipelines), key=lambda d: (-lost[d], grid.microbatches[d], d))
    home = []
    for s in range(grid.stages):
        row = instance.home[s]
        missing = max(0, grid.pipelines - len(instance.at[s]))
        gone = set(holes[:missing])
        kept = {w for d, w in enumerate(row) if w >= 0 and d not in gone}
        others = [w for w in instance.at[s] if w not in kept]
        fresh = []
        for d, w in enumerate(row):
            if d in gone:
                fresh.append(-1)
            else:
                fresh.append(w if w >= 0 else others.pop(0))
        home.append(fresh)
    return _peeled(instance, home, instance.at)


def natural(instance: Instance) -> Alignment:
    """Every worker stands for its own pipeline."""
    return _peeled(instance, instance.home, instance.at)


def dropped(instance: Instance) -> Alignment:
    """Every pipeline that lost a worker is left out whole (the baseline). Raises PlanError if none is left."""
    pipelines = instance.problem.grid.pipelines
    hit = {d for row in instance.home for d in range(pipelines) if row[d] < 0}
    if len(hit) == pipelines:
        raise PlanError("drop: every pipeline lost a worker, none is left to take the micro-batches")
    home = [[-1 if d in hit else w for d, w in enumerate(row)] for row in instance.home]
    return _peeled(instance, home, [[w for w in row if w >= 0] for row in home])


def _peeled(instance: Instance, home: list[list[int]], at: list[list[int]]) -> Alignment:
    pipelines = instance.problem.grid.pipelines
    crews = units(instance)
    missing = [d for d in range(pipelines) if all(row[d] < 0 for row in home)]
    if missing and len(missing) < pipelines:
        rest = [d for d in range(pipelines) if d not in missing]
        load = {d: sum(len(unit.jobs) for unit in crews[d]) for d in rest}
        guests = sorted((unit for d in missing for unit in crews[d]), key=lambda unit: unit.jobs[0])
        for unit in guests:
            to = min(rest, key=lambda d: (load[d], d))
            load[to] += len(unit.jobs)
            crews[to].append(unit)
        for d in missing:
            crews[d] = []
        for crew in crews:
            crew.sort(key=lambda unit: unit.jobs[0])
    pipeline = {j: d for d, crew in enumerate(crews) for unit in crew for j in unit.jobs}
    return Alignment(home, at, crews, [pipeline[j] for j in range(len(instance.jobs))])


def units(instance: Instance) -> list[list[Unit]]:
    """Per pipeline its units, in micro-batch order."""
    size = instance.problem.block or 1
    jobs: list[list[int]] = [[] for _ in instance.problem.grid.microbatches]
    for j, (d, _) in enumerate(instance.jobs):
        jobs[d].append(j)
    return [[Unit(d, tuple(own[i:i + size])) for i in range(0, len(own), size)] for d, own in enumerate(jobs)]
