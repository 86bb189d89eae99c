"""Replay of a plan: every action as early as possible, with the memory it holds, its makespan and its period."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import itemgetter
from typing import NamedTuple

from megatron_recycle.plan.crossings import borrowed, lent

from .action import PASSES_ON, Action
from .cycles import cycle_mean
from .errors import DeadlockError
from .grid import Worker
from .plan import Plan
from .problem import Problem


@dataclass(frozen=True)
class Timeline:
    """Times of all actions from a cold start: ``times[worker][i]`` is (start, end) of the worker's i-th action, (0, 0)
    where it was done before the plan begins.

    ``makespan`` ends the last ``S``. ``period`` is the steady-state time per iteration (a fraction may remain); for a
    plan that begins with done actions, which runs once, the makespan. ``peak``: most memory units a worker holds at any
    time.
    """

    times: Mapping[Worker, tuple[tuple[int, int], ...]]
    makespan: int
    period: float
    peak: Mapping[Worker, int]


class _Entry(NamedTuple):
    """An action: the ``position``-th of worker number ``owner``. ``needs``: the entry (another chunk's action, or the
    own forward) that must have ended ``lag`` before (-1: none). ``duration``: -1 for S."""

    owner: int
    position: int
    needs: int = -1
    lag: int = 0
    duration: int = 0


@dataclass(frozen=True)
class _Network:
    """The plan's actions in an order in which each can be timed."""

    entries: list[_Entry] = field(default_factory=list)
    awaits: dict[int, list[int]] = field(default_factory=dict)
    """For a F: groups whose step its lent layers wait for."""
    summed: dict[int, list[int]] = field(default_factory=dict)
    """For a group: last actions of the helpers whose gradients it sums."""


def replay(plan: Plan) -> Timeline:
    """Time a plan. Raises DeadlockError, naming an action that can never start; all other faults are validate's."""
    clock = Clock(plan)
    network = clock.network
    starts, ends = clock.times([0] * clock.groups, 1)
    spans: list[list[tuple[int, int]]] = [[(0, 0)] * len(plan.workers[name]) for name in clock.names]
    for entry, start, end in zip(network.entries, starts, ends):
        spans[entry.owner][entry.position] = (start, end)
    makespan = max(ends, default=0)
    mean = Fraction(makespan) if plan.done else cycle_mean(clock.groups, clock.release)
    return Timeline(
        times={name: tuple(spans[w]) for w, name in enumerate(clock.names)},
        makespan=makespan,
        period=int(mean) if mean.denominator == 1 else float(mean),
        peak={name: peak(plan.problem, name, plan.workers[name], plan) for name in clock.names})


def in_order_of_ends(plan: Plan) -> list[tuple[Worker, Action]]:
    """All actions of one iteration by their planned ends, each after its inputs, also where durations are 0.

    The same on all workers. Raises DeadlockError.
    """
    clock = Clock(plan)
    _, ends = clock.times([0] * clock.groups, 1)
    # Entries of the network come after their inputs, and no entry ends before its inputs do.
    ordered = sorted(zip(ends, clock.network.entries), key=itemgetter(0))
    return [(clock.names[entry.owner], plan.workers[clock.names[entry.owner]][entry.position]) for _, entry in ordered]


def peak(problem: Problem, worker: Worker, actions: Sequence[Action], plan: Plan | None = None) -> int:
    """Most memory units ``worker`` holds when it runs ``actions`` in order, with the crossings of ``plan`` (default:
    none)."""
    chunks = problem.chunks_of[worker.stage]
    held = most = 0
    if plan is not None and plan.crossings:
        held = most = sum(count * problem.layer_parameters[chunk]
                          for (chunk, _), count in borrowed(plan, worker).items())
    for action in actions:
        if action.kind == "S":
            continue
        crossing = plan.crossing(action.pipeline, action.microbatch) if plan is not None else ()
        before, after = problem.held(chunks[action.chunk], crossing)
        held += {"F": before, "B": after - before, "W": -after, "FB": -before}[action.kind]
        most = max(most, held)
    return most


class Clock:
    """Times of the actions of a plan, with each group of stages released from a given time on."""

    def __init__(self, plan: Plan) -> None:
        problem = plan.problem
        self.names = sorted(plan.workers)
        groups = problem.groups()
        self.groups = len(groups)
        of_stage = {stage: g for g, group in enumerate(groups) for stage in group}
        self._group = [of_stage[name.stage] for name in self.names]
        self._step = [problem.costs.step[name.stage] for name in self.names]
        self._lent = problem.costs.lent
        self.network = _order(plan, self.names, self._group)
        self._longest = [0] * self.groups  # the step of a group's slowest stage, after which a helper gets parameters
        for g, step in zip(self._group, self._step):
            self._longest[g] = max(self._longest[g], step)

    def times(self, release: Sequence[int], scale: int, step: int = 0) -> tuple[list[int], list[int]]:
        """Start and end of every action where group ``g`` is free from ``release[g]`` on, or, with ``step`` (the scale
        of step times), from the end of a step that begins then."""
        network, group = self.network, self._group
        starts: list[int] = []
        ends: list[int] = []
        free = [release[g] + own * step for g, own in zip(group, self._step)]
        given = [begin + (longest + self._lent[0]) * step for begin, longest in zip(release, self._longest)]
        barrier: dict[int, int] = {}
        for i, (owner, _, needs, lag, duration) in enumerate(network.entries):
            start = free[owner]
            if duration < 0:
                g = group[owner]
                if g not in barrier:
                    barrier[g] = max([free[w] for w, other in enumerate(group) if other == g]
                                     + [ends[last] + self._lent[1] * scale for last in network.summed.get(g, ())])
                start = barrier[g]
                end = start + self._step[owner] * scale
            else:
                if needs >= 0:
                    start = max(start, ends[needs] + lag * scale)
                if i in network.awaits:
                    start = max(start, *(given[g] for g in network.awaits[i]))
                end = start + duration * scale
            free[owner] = end
            starts.append(start)
            ends.append(end)
        return starts, ends

    def release(self, begin: Sequence[int], scale: int) -> tuple[list[int], list[int]]:
        """Time of each group's next step begin, from the begins of the current ones; the deciding group rides along in
        the low digits of every time."""
        size = self.groups
        fine = scale * size
        starts, _ = self.times([t * size + g for g, t in enumerate(begin)], fine, fine)
        begins = [0] * size
        for entry, start in zip(self.network.entries, starts):
            if entry.duration < 0:
                begins[self._group[entry.owner]] = start
        return [b // size for b in begins], [b % size for b in begins]


def _order(plan: Plan, names: Sequence[Worker], group: Sequence[int]) -> _Network:
    """Sort all actions so that each comes after its inputs, done ones first. Raises DeadlockError."""
    problem = plan.problem
    last, hop, chunks_of = problem.chunks - 1, problem.costs.hop, problem.chunks_of
    orders = [plan.workers[name] for name in names]
    usual = [[{kind: problem.duration(kind, name, place) for kind in ("F", "B", "W", "FB")}
              for place in range(len(chunks_of[name.stage]))] for name in names]
    network = _Network()
    entries = network.entries
    node: dict[tuple[str, int, int, int], int] = {}
    waiting: dict[tuple[str, int, int, int], list[int]] = {}
    pointer = [0] * len(names)
    for w, name in enumerate(names):
        for kind, d, m, place in orders[w][:plan.done.get(name, 0)]:  # over at once: their inputs may not be there
            node[PASSES_ON.get(kind, kind), d, m, chunks_of[name.stage][place]] = len(entries)
            entries.append(_Entry(w, pointer[w]))
            pointer[w] += 1
    work = list(range(len(names) - 1, -1, -1))
    while work:
        w = work.pop()
        order, chunks = orders[w], chunks_of[names[w].stage]
        while pointer[w] < len(order):
            action = order[pointer[w]]
            kind, d, m, place = action
            if kind == "S":
                break
            chunk = chunks[place]
            key: tuple[str, int, int, int] | None = None
            if kind == "F":
                key = ("F", d, m, chunk - 1) if chunk else None
            elif kind == "W":
                key = ("B", d, m, chunk)
            else:
                key = ("B", d, m, chunk + 1) if chunk < last else ("F", d, m, chunk)
            if key is not None and key not in node:
                waiting.setdefault(key, []).append(w)
                break
            needs = -1 if key is None else node[key]
            lag = hop if needs >= 0 and entries[needs].owner != w else 0
            own = (PASSES_ON.get(kind, kind), d, m, chunk)  # an action that waits for a B waits for the end of a FB
            node[own] = len(entries)
            long = usual[w][place][kind] if (d, m) not in plan.crossings else plan.duration(names[w], action)
            entries.append(_Entry(w, pointer[w], needs, lag, long))
            pointer[w] += 1
            work.extend(waiting.pop(own, ()))
    _lendings(plan, network, node, {name.stage: g for name, g in zip(names, group)},
              {names[each.owner]: i for i, each in enumerate(entries)})
    size, at_step = Counter(group), Counter(
        g for w, g in enumerate(group) if pointer[w] < len(orders[w]) and orders[w][pointer[w]].kind == "S")
    for w, order in enumerate(orders):  # steps come last
        if pointer[w] < len(order) and order[pointer[w]].kind == "S" and at_step[group[w]] == size[group[w]]:
            entries.append(_Entry(w, pointer[w], duration=-1))
            pointer[w] += 1
    for w, order in enumerate(orders):
        if pointer[w] < len(order):
            raise DeadlockError(f"deadlock: {order[pointer[w]]} of worker {names[w]} can never start")
    return network


def _lendings(plan: Plan, network: _Network, node: Mapping[tuple[str, int, int, int], int],
              group_of: Mapping[int, int], last: Mapping[Worker, int]) -> None:
    """Couplings of lent layers: a helper has their parameters some time after their own stage's step, and sends the
    sums of their gradients after its ``last`` action, some time before the next step."""
    for each in lent(plan):
        g = group_of[plan.problem.stage_of(each.chunk)]
        item = each.pipeline, each.microbatch, each.by
        begin = node.get(("F", *item))
        if begin is not None:
            network.awaits.setdefault(begin, []).append(g)
        if each.helper in last:
            network.summed.setdefault(g, []).append(last[each.helper])
