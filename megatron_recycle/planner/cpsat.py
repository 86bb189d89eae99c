"""CP-SAT model of the same problem: fixed routes, a complete hint, and only the orders left to choose.

Only this module imports OR-Tools, and only inside functions, which run in the search process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_recycle.planner.timing import clock, objective

from .instance import NO_CAP, Instance
from .simultaneous import trace_of

#: called with the trace of each better solution, as it is found
Found = Callable[[list[int]], None]


@dataclass(frozen=True)
class Outcome:
    """``bound`` holds for these routes (and the symmetries removed). ``proven``: the last trace found (or the hint) is
    optimal for them. ``work``: CP-SAT's deterministic time. ``cut``: the wall clock ended the search."""

    proven: bool
    bound: int
    work: float
    cut: bool


@dataclass(frozen=True)
class Limits:
    """``work``: CP-SAT's deterministic time, the limit meant to bind; ``wall``: seconds, the safety net."""

    work: float
    wall: float
    seed: int = 0
    merge_only: bool = False


def available() -> bool:
    """Whether OR-Tools can be imported."""
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError:
        return False
    return True


def solve(instance: Instance, route: list[int], hint: list[int], bound: int, limits: Limits,
          found: Found) -> Outcome:
    """Search for better orders than ``hint``'s on the same routes; ``bound`` is a known lower bound. No layer is lent.

    With ``limits.merge_only`` every worker keeps the hint's sequences of F, of B and of W, and the search only
    interleaves the three: far smaller, solved in a moment, and a good polish.
    """
    from ortools.sat.python import cp_model

    model = _Model(instance, route, hint, bound, cp_model.CpModel(), limits.merge_only)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_deterministic_time = limits.work
    parameters.max_time_in_seconds = limits.wall
    parameters.random_seed = limits.seed
    parameters.num_workers = 1
    if limits.merge_only:
        parameters.linearization_level = 0
    else:
        parameters.interleave_search = True
        parameters.interleave_batch_size = 1

    last: list[int] | None = hint

    class Callback(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            nonlocal last
            last = model.trace(self.value)
            if last is not None:
                found(last)

    status = solver.solve(model.model, Callback())
    proven = status == cp_model.INFEASIBLE or (status == cp_model.OPTIMAL and last is not None)
    work = solver.response_proto.deterministic_time
    reached = model.top if status == cp_model.INFEASIBLE else int(solver.best_objective_bound)
    cut = status not in (cp_model.OPTIMAL, cp_model.INFEASIBLE) and work < limits.work
    return Outcome(proven, max(bound, reached), round(work, 3), cut)


class _Model:
    """Variables, then constraints, then objective; start times are shifted so that each stage has its phase."""

    def __init__(self, instance: Instance, route: list[int], hint: list[int], bound: int, model: Any,
                 merge_only: bool) -> None:
        self.instance, self.route, self.model = instance, route, model
        self.lengths, self.held = instance.lengths(route), instance.held(route)
        problem = instance.problem
        self.count = len(instance.jobs)
        self.nodes, self.lag = self.count * instance.chunks, instance.lags(route)
        self.period = problem.objective == "period"
        self.top = -int(-objective(instance, route, hint) // 1)
        timed = clock(instance, route, hint)
        begin = timed.phases(self.top) if self.period else [0] * timed.groups
        self.ends, self.ready = timed.times(begin, cold=not self.period)
        if self.period:  # room on both sides of the anchored group of stages, see _objective
            low = max(self.ready) - 2 * self.top
            self.ends, self.ready = [e - low for e in self.ends], [e - low for e in self.ready]
        longest = max(problem.costs.step)
        self.horizon = 3 * self.top + longest if self.period else self.top
        self.starts: list[Any] = [None] * (3 * self.nodes)
        self.kinds = (0, 1, 2) if problem.split_backward else (0, 1)
        self._variables(hint)
        self._flow()
        self.sequences = self._sequences(hint) if merge_only else {}
        self._workers()
        self._objective(bound)

    def length(self, code: int) -> int:
        """Duration of an action."""
        kind, node = divmod(code, self.nodes)
        return self.lengths[kind][node]

    def end(self, code: int) -> Any:
        """End of an action, as an expression."""
        return self.starts[code] + self.length(code)

    def _variables(self, hint: list[int]) -> None:
        for code in sorted(hint):
            self.starts[code] = self.model.new_int_var(0, self.horizon, "")
            self.model.add_hint(self.starts[code], self.ends[code] - self.length(code))

    def _flow(self) -> None:
        lag, nodes, count = self.lag, self.nodes, self.count
        for node in range(nodes):
            if node >= count:
                self.model.add(self.starts[node] >= self.end(node - count) + lag[node])
            if node + count < nodes:
                self.model.add(self.starts[nodes + node] >= self.end(nodes + node + count) + lag[node + count])
            else:
                self.model.add(self.starts[nodes + node] >= self.end(node))
            if 2 in self.kinds:
                self.model.add(self.starts[2 * nodes + node] >= self.end(nodes + node))

    def _chains(self) -> list[tuple[int, int]]:
        """Node pairs whose F, B and W come in this order: equal routes (a symmetry), or the rule of order."""
        instance, count = self.instance, self.count
        pairs = set()
        last: dict[tuple[int, ...], int] = {}
        for j in range(count):
            way = tuple(self.route[s * count + j] for s in range(instance.chunks))
            if way in last:
                pairs |= {(s * count + last[way], s * count + j) for s in range(instance.chunks)}
            last[way] = j
        if instance.ordered:
            latest: dict[tuple[int, int, int], int] = {}
            for node, w in enumerate(self.route):
                key = (w, node // count, instance.jobs[node % count][0])
                if key in latest:
                    pairs.add((latest[key], node))
                latest[key] = node
        return sorted(pairs)

    def _sequences(self, hint: list[int]) -> dict[tuple[int, int], list[int]]:
        """The hint's nodes per worker and kind, in order."""
        found: dict[tuple[int, int], list[int]] = {}
        for code in hint:
            kind, node = divmod(code, self.nodes)
            found.setdefault((self.route[node], kind), []).append(node)
        return found

    def _workers(self) -> None:
        model, nodes = self.model, self.nodes
        for (_, kind), sequence in self.sequences.items():
            for first, then in pairwise(sequence):
                model.add(self.starts[kind * nodes + then] >= self.end(kind * nodes + first))
        chained = [] if self.sequences else self._chains()
        for first, then in chained:
            for kind in self.kinds:
                model.add(self.starts[kind * nodes + then] >= self.end(kind * nodes + first))
        linked = set(chained)
        mine: dict[int, list[int]] = {}
        for node, w in enumerate(self.route):
            mine.setdefault(w, []).append(node)
        self.mine = mine
        for w, own in mine.items():
            model.add_no_overlap([model.new_fixed_size_interval_var(self.starts[kind * nodes + node],
                                                                    self.length(kind * nodes + node), "")
                                  for kind in self.kinds for node in own])
            self._memory(w, own, linked)

    def _memory(self, w: int, own: list[int], linked: set[tuple[int, int]]) -> None:
        instance, model, nodes = self.instance, self.model, self.nodes
        before, after = ([units[node] for node in own] for units in self.held)
        cap = instance.cap[w]
        if cap >= NO_CAP or cap >= sum(map(max, before, after)):
            return
        whole = before == after or 2 not in self.kinds
        release = self.kinds[-1]
        if whole and len(set(before)) == 1 and (self.sequences or all(pair in linked for pair in pairwise(own))):
            room = cap // before[0]
            starting = self.sequences.get((w, 0), own)
            for late, early in zip(starting[room:], self.sequences.get((w, release), own)):
                model.add(self.starts[late] >= self.end(release * nodes + early))
            return
        intervals, weights = [], []
        for node, first, then in zip(own, before, after):
            for opening, closing, weight in [(0, release, first)] if whole else [(0, 1, first), (1, 2, then)]:
                start = self.starts[node] if opening == 0 else self.end(nodes + node)
                close = closing * nodes + node
                size = model.new_int_var(0, self.horizon, "")
                opened = self.ends[node] - self.length(node) if opening == 0 else self.ends[nodes + node]
                model.add_hint(size, self.ends[close] - opened)
                intervals.append(model.new_interval_var(start, size, self.end(close), ""))
                weights.append(weight)
        model.add_cumulative(intervals, weights, cap)

    def _objective(self, bound: int) -> None:
        instance, model, nodes = self.instance, self.model, self.nodes
        step, of_stage = instance.problem.costs.step, instance.problem.group
        goal = model.new_int_var(min(bound, self.top), self.top, "")
        model.add_hint(goal, self.top)
        ready = [model.new_int_var(0, self.horizon, "") for _ in self.ready]
        for variable, time in zip(ready, self.ready):
            model.add_hint(variable, time)
        release = self.kinds[-1]
        for node in range(nodes):
            group = of_stage[instance.problem.stage_of(node // self.count)]
            model.add(ready[group] >= self.end(release * nodes + node))
        if not self.period:
            for s, g in enumerate(of_stage):
                model.add(goal >= ready[g] + step[s])
        else:
            # only time differences matter: the busiest stage is anchored, which narrows every window
            busiest = max(range(len(ready)), key=lambda g: max(
                sum(self.length(kind * nodes + node) for kind in self.kinds for node in own)
                for w, own in self.mine.items() if of_stage[instance.stage[w]] == g))
            model.add(ready[busiest] == self.ready[busiest])
            for w, own in self.mine.items():
                s = instance.stage[w]
                begin = model.new_int_var(0, self.horizon, "")
                model.add_hint(begin, min(self.ends[node] - self.length(node) for node in own))
                for node in own:
                    model.add(begin <= self.starts[node])
                model.add(goal >= ready[of_stage[s]] + step[s] - begin)
        model.minimize(goal)

    def trace(self, value: Callable[[Any], int]) -> list[int] | None:
        """The solution's actions in an order in which each can be timed; None: actions of zero duration leave no order
        that keeps to the caps."""
        starts = {code: value(start) for code, start in enumerate(self.starts) if start is not None}
        return trace_of(self.instance, self.route, starts)
