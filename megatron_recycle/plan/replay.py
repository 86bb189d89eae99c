"""Replay of a plan: every action as early as possible, with the memory it holds, its makespan and its period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .action import PASSES_ON, Action
from .cycles import cycle_mean
from .errors import DeadlockError
from .grid import Worker
from .plan import Plan
from .problem import Problem


@dataclass(frozen=True)
class Timeline:
    """When each action runs from a cold start: ``times[worker][i]`` is (start, end) of the worker's i-th
    action.

    ``makespan`` ends the last ``S``; ``period`` is the steady-state time per iteration (a fraction may
    remain); ``peak`` is the most memory units a worker holds at any time.
    """

    actions: Mapping[Worker, tuple[Action, ...]]
    times: Mapping[Worker, tuple[tuple[int, int], ...]]
    makespan: int
    period: float
    peak: Mapping[Worker, int]

    @cached_property
    def _index(self) -> dict[tuple[Worker, Action], tuple[int, int]]:
        return {(worker, action): span for worker, actions in self.actions.items()
                for action, span in zip(actions, self.times[worker])}

    def start(self, worker: Worker, action: Action) -> int:
        """When ``action`` begins on ``worker``."""
        return self._index[worker, action][0]

    def end(self, worker: Worker, action: Action) -> int:
        """When ``action`` ends on ``worker``."""
        return self._index[worker, action][1]


@dataclass(frozen=True)
class _Network:
    """The plan's actions in an order in which each can be timed: flat, one entry per action."""

    owner: list[int]
    position: list[int]
    before: list[int]  # previous action on the worker, -1 for the first
    needs: list[int]  # action of another stage (or the own forward) that must have ended, -1 for none
    lag: list[int]  # hop on that edge
    duration: list[int]  # -1 for S


def replay(plan: Plan) -> Timeline:
    """Time a plan. Raises DeadlockError, naming an action that can never start; the rest is validate's."""
    problem = plan.problem
    names = sorted(plan.workers)
    orders = [plan.workers[name] for name in names]
    network = _order(problem, names, orders)
    groups = problem.groups()
    group_of_stage = {stage: g for g, group in enumerate(groups) for stage in group}
    group = [group_of_stage[name.stage] for name in names]
    step = [problem.costs.step[name.stage] for name in names]
    starts, ends = _times(network, len(names), group, step, [0] * len(names), 1)
    spans: list[list[tuple[int, int]]] = [[(0, 0)] * len(order) for order in orders]
    for i, owner in enumerate(network.owner):
        spans[owner][network.position[i]] = (starts[i], ends[i])
    mean = cycle_mean(len(groups), lambda at, scale: _release(network, len(names), group, step, at, scale))
    return Timeline(
        actions=plan.workers,
        times={name: tuple(spans[w]) for w, name in enumerate(names)},
        makespan=max(ends, default=0),
        period=int(mean) if mean.denominator == 1 else float(mean),
        peak={name: peak(problem, name, orders[w]) for w, name in enumerate(names)})


def in_order_of_ends(plan: Plan) -> list[tuple[Worker, Action]]:
    """All actions of one iteration by their planned ends, each after its inputs, also where durations are 0.

    The same on all workers. Raises DeadlockError.
    """
    problem = plan.problem
    names = sorted(plan.workers)
    network = _order(problem, names, [plan.workers[name] for name in names])
    groups = problem.groups()
    group_of_stage = {stage: g for g, group in enumerate(groups) for stage in group}
    _, ends = _times(network, len(names), [group_of_stage[name.stage] for name in names],
                     [problem.costs.step[name.stage] for name in names], [0] * len(names), 1)
    # Entries of the network come after what they need, and no end comes before that of what it needs.
    return [(names[network.owner[i]], plan.workers[names[network.owner[i]]][network.position[i]])
            for i in sorted(range(len(ends)), key=lambda i: (ends[i], i))]


def peak(problem: Problem, worker: Worker, actions: Sequence[Action]) -> int:
    """Most memory units ``worker`` holds when it runs ``actions`` in order."""
    stage = worker.stage
    before, after = problem.before_b[stage], problem.after_b[stage] if problem.split_backward else 0
    held = most = 0
    for action in actions:
        if action.kind == "F":
            held += before
        elif action.kind == "B":
            held += after - before
        elif action.kind == "W":
            held -= after
        elif action.kind == "FB":
            held -= before
        most = max(most, held)
    return most


def _order(problem: Problem, names: Sequence[Worker], orders: Sequence[tuple[Action, ...]]) -> _Network:
    """Sort all actions so that each comes after its inputs. Raises DeadlockError."""
    last, hop = problem.grid.stages - 1, problem.costs.hop
    stages = [name.stage for name in names]
    durations = [{kind: problem.duration(kind, name) for kind in ("F", "B", "W", "FB")} for name in names]
    network = _Network([], [], [], [], [], [])
    node: dict[tuple[str, int, int, int], int] = {}
    waiting: dict[tuple[str, int, int, int], list[int]] = {}
    pointer, previous = [0] * len(names), [-1] * len(names)
    at_step: dict[int, list[int]] = {}
    groups = problem.groups()
    group_of_stage = {stage: g for g, group in enumerate(groups) for stage in group}
    size = [0] * len(groups)
    for stage in stages:
        size[group_of_stage[stage]] += 1
    work = list(range(len(names) - 1, -1, -1))
    while work:
        w = work.pop()
        stage, order = stages[w], orders[w]
        while pointer[w] < len(order):
            kind, d, m = order[pointer[w]]
            key: tuple[str, int, int, int] | None = None
            lag = 0
            if kind == "S":
                ready = at_step.setdefault(group_of_stage[stage], [])
                if w not in ready:
                    ready.append(w)
                    if len(ready) == size[group_of_stage[stage]]:
                        for other in sorted(ready):
                            _append(network, other, pointer, previous, -1, 0, -1)
                        work.extend(reversed(ready))
                break
            if kind == "F" and stage > 0:
                key, lag = ("F", d, m, stage - 1), hop
            elif kind in ("B", "FB"):
                key, lag = (("B", d, m, stage + 1), hop) if stage < last else (("F", d, m, stage), 0)
            elif kind == "W":
                key = ("B", d, m, stage)
            if key is not None and key not in node:
                waiting.setdefault(key, []).append(w)
                break
            own = (PASSES_ON.get(kind, kind), d, m, stage)  # an action that waits for a B waits for the end of a FB
            node[own] = len(network.owner)
            _append(network, w, pointer, previous, -1 if key is None else node[key], lag, durations[w][kind])
            work.extend(waiting.pop(own, ()))
    for w, order in enumerate(orders):
        if pointer[w] < len(order):
            raise DeadlockError(f"deadlock: {order[pointer[w]]} of worker {names[w]} can never start")
    return network


def _append(network: _Network, w: int, pointer: list[int], previous: list[int], needs: int, lag: int,
            duration: int) -> None:
    network.owner.append(w)
    network.position.append(pointer[w])
    network.before.append(previous[w])
    network.needs.append(needs)
    network.lag.append(lag)
    network.duration.append(duration)
    previous[w] = len(network.owner) - 1
    pointer[w] += 1


def _times(network: _Network, workers: int, group: Sequence[int], step: Sequence[int], release: Sequence[int],
           scale: int) -> tuple[list[int], list[int]]:
    """Start and end of every action when worker ``w`` is free from ``release[w]`` on."""
    starts: list[int] = []
    ends: list[int] = []
    free = list(release)
    barrier: dict[int, int] = {}
    for owner, needs, lag, duration in zip(network.owner, network.needs, network.lag, network.duration):
        start = free[owner]
        if duration < 0:
            g = group[owner]
            if g not in barrier:
                barrier[g] = max(free[w] for w in range(workers) if group[w] == g)
            start = barrier[g]
            end = start + step[owner] * scale
        else:
            if needs >= 0 and ends[needs] + lag * scale > start:
                start = ends[needs] + lag * scale
            end = start + duration * scale
        free[owner] = end
        starts.append(start)
        ends.append(end)
    return starts, ends


def _release(network: _Network, workers: int, group: Sequence[int], step: Sequence[int], times: Sequence[int],
             scale: int) -> tuple[list[int], list[int]]:
    """From when each group's step begins to when its next one does; the deciding group rides along in the low
    digits of every time."""
    size = max(group) + 1
    fine = scale * size
    coded = [times[g] * size + g + step[w] * fine for w, g in enumerate(group)]
    starts, _ = _times(network, workers, group, step, coded, fine)
    begins = [0] * size
    for owner, duration, start in zip(network.owner, network.duration, starts):
        if duration < 0:
            begins[group[owner]] = start
    return [b // size for b in begins], [b % size for b in begins]
