"""Replay of a plan: every action as early as possible, its makespan, its period, and the memory that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter

from .action import PASSES_ON, Action
from .bounds import bound_of
from .clock import Clock
from .crossings import borrowed, lent
from .errors import DeadlockError
from .grid import Worker
from .plan import Plan
from .problem import Problem


@dataclass(frozen=True)
class Timeline:
    """Times of all actions from a cold start: ``times[worker][i]`` is (start, end) of the worker's i-th action, (0, 0)
    where it was done before the plan begins.

    ``makespan`` ends the last ``S``. ``period`` is the steady-state time per iteration (a fraction may remain); for a
    plan that begins with done actions, which runs once, the makespan.
    """

    times: Mapping[Worker, tuple[tuple[int, int], ...]]
    makespan: int
    period: float


def replay(plan: Plan) -> Timeline:
    """Time a plan. Raises DeadlockError, naming an action that can never start; all other faults are validate's."""
    listed, clock = ordered(plan)
    ends, steps = clock.times([0] * clock.groups, cold=True)
    times: dict[Worker, list[tuple[int, int]]] = {worker: [] for worker in sorted(plan.workers)}
    for (worker, _, duration), end in zip(listed, ends):
        times[worker].append((end - duration, end))
    for worker, spans in times.items():
        start = steps[plan.problem.group[worker.stage]]
        spans.append((start, start + plan.problem.costs.step[worker.stage]))
    makespan = max(spans[-1][1] for spans in times.values())
    return Timeline({worker: tuple(spans) for worker, spans in times.items()}, makespan,
                    makespan if plan.done else clock.period())


def figured(plan: Plan) -> Plan:
    """The plan with its own figures: period, makespan and bound. Raises DeadlockError."""
    timeline = replay(plan)
    return replace(plan, period=timeline.period, makespan=timeline.makespan, lower_bound=bound_of(plan), stated="")


def in_order_of_ends(plan: Plan) -> list[tuple[Worker, Action]]:
    """All actions of one iteration before the steps, by their planned ends, each after its inputs, also where durations
    are 0.

    The same on all workers. Raises DeadlockError.
    """
    listed, clock = ordered(plan)
    ends, _ = clock.times([0] * clock.groups, cold=True)
    # Each comes after its inputs in the list, and ends no sooner than they do.
    return [(worker, action) for _, (worker, action, _) in sorted(zip(ends, listed), key=itemgetter(0))]


def peak(plan: Plan, worker: Worker) -> int:
    """Most memory units that ``worker`` holds at any time."""
    return max(memory(plan, worker))


def memory(plan: Plan, worker: Worker) -> Iterator[int]:
    """Memory units that ``worker`` holds during each of its actions: its micro-batches, and the parameters of layers
    lent to it."""
    problem = plan.problem
    held = borrowed_units(plan, worker)
    for action in plan.actions(worker):
        if action.kind != "S":
            before, after = problem.held(plan.chunk(worker, action), plan.crossing(*action[1:3]))
            held += {"F": before, "B": after - before, "W": -after, "FB": -before}[action.kind]
        yield held


def borrowed_units(plan: Plan, worker: Worker) -> int:
    """Memory units of the parameters of layers that are lent to ``worker``."""
    return sum(count * plan.problem.layer_parameters[chunk] for (chunk, _), count in borrowed(plan, worker).items())


Key = tuple[str, int, int, int]
"""The result of an action: its kind (an FB ends with that of its B), pipeline, micro-batch and chunk."""


def ordered(plan: Plan) -> tuple[list[tuple[Worker, Action, int]], Clock]:
    """All actions before the steps with their workers and durations, each after its inputs, and their clock; done ones
    come first. Raises DeadlockError."""
    problem, workers = plan.problem, sorted(plan.workers)
    crossing_of, length, hop = plan.crossings.get, cache(problem.duration), problem.costs.hop
    listed: list[tuple[Worker, Action, int]] = []
    where: list[int] = []
    needs: list[int] = []
    made: dict[Key, int] = {}
    """The number of the action with each result."""
    waiting: dict[Key, list[int]] = {}
    pointer = [0] * len(workers)
    for w, worker in enumerate(workers):
        for action in plan.workers[worker][:plan.done.get(worker, 0)]:  # over at once: their inputs may not be there
            made[_result(plan, worker, action)] = len(listed)
            listed.append((worker, action, 0))
            where.append(w)
            needs.append(-1)
            pointer[w] += 1
    work = list(range(len(workers) - 1, -1, -1))
    while work:
        w = work.pop()
        worker, actions = workers[w], plan.workers[workers[w]]
        while pointer[w] < len(actions) and (action := actions[pointer[w]]).kind != "S":
            own = _result(plan, worker, action)
            key = _input(problem, own)
            if key is not None and key not in made:
                waiting.setdefault(key, []).append(w)
                break
            made[own] = len(listed)
            listed.append((worker, action, length(action.kind, worker, action.chunk, crossing_of(action[1:3], ()))))
            where.append(w)
            needs.append(-1 if key is None else made[key])
            pointer[w] += 1
            work += waiting.pop(own, ())
    for w, worker in enumerate(workers):
        if stuck := plan.workers[worker][pointer[w]:-1]:
            raise DeadlockError(f"deadlock: {stuck[0]} of worker {worker} can never start")
    borrows: dict[int, list[int]] = {}
    helpers: dict[int, set[int]] = {}
    for each in lent(plan):
        g = problem.group[problem.stage_of(each.chunk)]
        borrows.setdefault(made["F", each.pipeline, each.microbatch, each.by], []).append(g)
        helpers.setdefault(g, set()).add(workers.index(each.helper))
    lags = [hop if need >= 0 and where[need] != w else 0 for need, w in zip(needs, where)]
    return listed, Clock(problem, workers, range(len(listed)), where, needs, lags, [each[2] for each in listed],
                         borrows, helpers)


def _result(plan: Plan, worker: Worker, action: Action) -> Key:
    return PASSES_ON.get(action.kind, action.kind), action.pipeline, action.microbatch, plan.chunk(worker, action)


def _input(problem: Problem, result: Key) -> Key | None:
    """The result that an action needs, by its own; None: of no action."""
    kind, d, m, chunk = result
    if kind == "F":
        return ("F", d, m, chunk - 1) if chunk else None
    if kind == "W":
        return "B", d, m, chunk
    return ("B", d, m, chunk + 1) if chunk + 1 < problem.chunks else ("F", d, m, chunk)
