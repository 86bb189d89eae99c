"""A problem as flat integer arrays, which the schedulers read instead of names and dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_recycle.planner.merge_bw import merged

from ..plan import STEP, Action, Plan, Problem, Worker

KINDS = "FBW"
_NUMBERS = {"F": (0,), "B": (1,), "W": (2,), "FB": (1, 2)}
NO_CAP = 1 << 60
"""The cap of a worker that has none."""


@dataclass(frozen=True)
class Instance:
    """A problem by numbers: of jobs, nodes and workers.

    ``jobs[j]`` is a (pipeline, micro-batch), in the order in which they enter the pipelines. A *node*
    ``stage * len(jobs) + j`` is a job at a stage. Lists about workers are indexed by their numbers."""

    problem: Problem
    jobs: list[tuple[int, int]]
    workers: list[Worker]
    stage: list[int]
    forward: list[int]
    backward: list[int]
    weight: list[int]
    cap: list[int]
    hold: list[int]  # units from F's start to B's end, enough that no later action needs more
    keep: list[int]  # units from B's end to W's end
    at: list[list[int]]  # usable workers of each stage
    home: list[list[int]]  # per stage and pipeline the home worker, -1 if it is out
    group: list[int]  # per stage, which stages step together
    groups: int
    ordered: bool  # B and W of one pipeline in micro-batch order on every worker

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.problem.grid.stages

    @property
    def actions(self) -> int:
        """Number of F, B and W actions of a plan."""
        return self.stages * len(self.jobs) * (3 if self.problem.split_backward else 2)


def build(problem: Problem, surplus: Mapping[Worker, int] | None = None) -> Instance:
    """Flatten a problem. Raises PlanError if a stage has no usable worker.

    ``surplus``: receives beyond the usual ones that a worker keeps memory for (default: none).
    """
    problem.require_live()
    grid = problem.grid
    longest = max(grid.microbatches)
    if all(count == longest for count in grid.microbatches):
        jobs = [(d, m) for m in range(longest) for d in range(grid.pipelines)]
    else:
        jobs = sorted(grid.items(), key=lambda x: (x[1] * longest // grid.microbatches[x[0]], x[0]))
    workers = list(problem.live_workers())
    number = {worker: w for w, worker in enumerate(workers)}
    stage = [worker.stage for worker in workers]
    at: list[list[int]] = [[] for _ in range(grid.stages)]
    for w, worker in enumerate(workers):
        if problem.fits(worker):
            at[stage[w]].append(w)
    usable = {w for row in at for w in row}
    home = [[number.get(Worker(d, s), -1) for d in range(grid.pipelines)] for s in range(grid.stages)]
    for row in home:
        for d, w in enumerate(row):
            if w >= 0 and w not in usable:
                row[d] = -1
    groups = problem.groups()
    group = [0] * grid.stages
    for g, stages in enumerate(groups):
        for s in stages:
            group[s] = g
    split = problem.split_backward
    return Instance(
        problem=problem, jobs=jobs, workers=workers, stage=stage,
        forward=[problem.duration("F", worker) for worker in workers],
        backward=[problem.duration("B", worker) for worker in workers],
        weight=[problem.duration("W", worker) for worker in workers],
        cap=[_room(problem, worker, (surplus or {}).get(worker, 0)) for worker in workers],
        hold=[problem.weight(s) for s in stage],
        keep=[problem.after_b[s] if split else 0 for s in stage],
        at=at, home=home, group=group, groups=len(groups),
        # a job in which nobody is a guest keeps the stock engine's order, and with it its bits
        ordered=problem.block > 0 or not (problem.failed or problem.costs.speed
                                          or len(set(grid.microbatches)) > 1))


def _room(problem: Problem, worker: Worker, surplus: int) -> int:
    """Units that a worker has for micro-batches."""
    if worker not in problem.cap:
        return NO_CAP
    return problem.cap[worker] - problem.message[worker.stage] * surplus


@dataclass(frozen=True)
class Schedule:
    """A legal order: ``route[node]`` is the worker, ``trace`` every action as ``kind * nodes + node`` in an
    order in which each can be timed; the order on a worker is that of its actions in the trace."""

    route: list[int]
    trace: list[int]
    period: float
    makespan: int


def plan_of(instance: Instance, schedule: Schedule, bound: float, source: str,
            stats: dict[str, object] | None = None) -> Plan:
    """The schedule as a plan."""
    return Plan(problem=instance.problem, workers=orders_of(instance, schedule.route, schedule.trace),
                period=schedule.period, makespan=schedule.makespan, lower_bound=bound, source=source,
                stats=stats or {})


def orders_of(instance: Instance, route: list[int], trace: list[int]) -> dict[Worker, tuple[Action, ...]]:
    """Per worker the actions of a trace, in order, with full backwards where they may be, and ``S``."""
    count = len(instance.jobs)
    nodes = count * instance.stages
    named = [[Action(kind, d, m) for d, m in instance.jobs] for kind in KINDS]
    listed: list[list[Action]] = [[] for _ in instance.workers]
    for code in trace:
        kind, node = divmod(code, nodes)
        listed[route[node]].append(named[kind][node % count])
    return {worker: (*merged(instance.problem, worker, listed[w]), STEP) for w, worker in enumerate(instance.workers)}


def schedule_of(instance: Instance, plan: Plan) -> tuple[list[int], list[int]]:
    """Route and trace of a legal plan for the same problem."""
    count = len(instance.jobs)
    nodes = count * instance.stages
    job = {item: j for j, item in enumerate(instance.jobs)}
    route = [-1] * nodes
    queue: list[list[int]] = []
    for w, worker in enumerate(instance.workers):
        codes = []
        for kind, d, m, _ in plan.workers[worker]:
            if kind != "S":
                node = instance.stage[w] * count + job[d, m]
                route[node] = w
                codes += [number * nodes + node for number in _NUMBERS[kind]]
        queue.append(codes)
    return route, merge(instance, queue)


def merge(instance: Instance, queue: list[list[int]]) -> list[int]:
    """One trace from the orders of all workers; shorter than their sum if they deadlock."""
    count, stages = len(instance.jobs), instance.stages
    nodes = count * stages
    trace: list[int] = []
    done = bytearray(3 * nodes)
    waiting: dict[int, int] = {}
    pointer = [0] * len(queue)
    work = list(range(len(queue) - 1, -1, -1))
    while work:
        w = work.pop()
        codes = queue[w]
        while pointer[w] < len(codes):
            code = codes[pointer[w]]
            kind, node = divmod(code, nodes)
            if kind == 0:
                need = node - count
            elif kind == 1:
                need = code + count if node + count < nodes else node
            else:
                need = code - nodes
            if need >= 0 and not done[need]:
                waiting[need] = w
                break
            done[code] = 1
            trace.append(code)
            pointer[w] += 1
            if code in waiting:
                work.append(waiting.pop(code))
    return trace
