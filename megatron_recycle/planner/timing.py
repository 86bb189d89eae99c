"""Exact makespan and period of a trace, fast: one pass times every action as early as its order allows."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.cycles import cycle_mean
from .crossing_flow import Crossings
from .instance import Instance, Schedule, spanned


class Clock:
    """A trace that is timed in several passes; anything constant between these is worked out once.

    ``scale`` multiplies every duration of a pass, so that times that are fractions of a unit stay whole numbers.
    """

    def __init__(self, instance: Instance, route: Sequence[int], trace: Sequence[int]) -> None:
        self.instance, self.route, self.trace = instance, route, trace
        self.plain = *instance.lengths(route), instance.lags(route)
        self.gates = instance.spans.gates if instance.spans else {}
        step = set(instance.problem.costs.step)
        #: the step of all stages; a run that begins with it is a cold start but for that
        self.alike = step.pop() if len(step) == 1 and not self.gates else None
        self.cold: int | None = None  # the makespan, once known

    def times(self, release: Sequence[int], scale: int = 1, cold: bool = False) -> tuple[list[int], list[int]]:
        """End of every action (by code) and of every stage's work, with stage ``s`` free from ``release[s]`` on.

        ``cold``: helpers have the parameters of lent layers from the beginning, not some time after a step."""
        instance, route, nodes, count = self.instance, self.route, len(self.route), len(self.instance.jobs)
        two, edge = 2 * nodes, nodes - count
        forward, backward, weight, lag = self.plain
        if scale != 1:
            forward, backward, weight, lag = ([x * scale for x in each] for each in self.plain)
        given, summed = instance.problem.costs.lent
        given = 0 if cold else given
        opens = {node: max(release[s] for s, g in enumerate(instance.group) if g in groups) + given * scale
                 for node, groups in self.gates.items()}
        end = [0] * (3 * nodes)
        free = [release[s] for s in instance.stage]
        for code in self.trace:
            if code < nodes:
                w = route[code]
                t = free[w]
                if code >= count:
                    u = end[code - count] + lag[code]
                    if u > t:
                        t = u
                if opens and code in opens and opens[code] > t:
                    t = opens[code]
                t += forward[code]
            elif code < two:
                node = code - nodes
                w = route[node]
                t = free[w]
                u = end[code + count] + lag[node + count] if node < edge else end[node]
                if u > t:
                    t = u
                t += backward[node]
            else:
                w = route[code - two]
                t = free[w] + weight[code - two]  # its B came earlier on the same worker
            end[code] = t
            free[w] = t
        done = list(release)
        for w, s in enumerate(instance.stage):
            if free[w] > done[s]:
                done[s] = free[w]
        for node, groups in self.gates.items():
            ready = free[route[node]] + summed * scale  # a helper's sums leave after all its actions
            for s, g in enumerate(instance.group):
                if g in groups and ready > done[s]:
                    done[s] = ready
        return end, done

    def stepping(self, begin: Sequence[int], scale: int = 1) -> list[int]:
        """When each group of stages begins its next step, if it began the last one at ``begin[g]``."""
        step, group = self.instance.problem.costs.step, self.instance.group
        _, done = self.times([begin[g] + step[s] * scale for s, g in enumerate(group)], scale)
        return self._ready(done)

    def _ready(self, done: Sequence[int]) -> list[int]:
        """When each group of stages begins its step, with all its work done by ``done``."""
        ready = [0] * self.instance.groups
        for s, g in enumerate(self.instance.group):
            ready[g] = max(ready[g], done[s])
        return ready

    def period(self) -> float:
        """Steady-state time of an iteration: the maximum cycle mean of the steps' begins."""
        size = self.instance.groups

        def once(begin: Sequence[int], scale: int) -> tuple[list[int], list[int]]:
            coded = self.stepping([t * size + g for g, t in enumerate(begin)], scale * size)
            if self.alike is not None and self.cold is None and scale == 1 and not any(begin):
                self.cold = max(coded) // size  # one step ahead of the work, rather than behind it
            return [t // size for t in coded], [t % size for t in coded]

        mean = cycle_mean(size, once)
        return int(mean) if mean.denominator == 1 else float(mean)

    def makespan(self) -> int:
        """End of the last step from a cold start."""
        if self.cold is None:
            _, done = self.times([0] * self.instance.stages, cold=True)
            step, ready = self.instance.problem.costs.step, self._ready(done)
            self.cold = max(ready[g] + step[s] for s, g in enumerate(self.instance.group))
        return self.cold

    def phases(self, period: int) -> list[int]:
        """Time from which each stage is free in a strictly periodic run; ``period`` must not be below the true one."""
        begin = [0] * self.instance.groups
        while True:
            fresh = self.stepping(begin)
            later = [max(old, new - period) for old, new in zip(begin, fresh)]
            if later == begin:
                step = self.instance.problem.costs.step
                return [begin[g] + step[s] for s, g in enumerate(self.instance.group)]
            begin = later

    def objective(self) -> float:
        """The problem's objective: period or makespan."""
        return self.makespan() if self.instance.problem.objective == "makespan" else self.period()


def timed(instance: Instance, route: list[int], trace: list[int], crossings: Crossings = ()) -> Schedule:
    """The schedule of a trace, with its figures."""
    clock = Clock(spanned(instance, route, crossings), route, trace)
    return Schedule(route, trace, clock.period(), clock.makespan(), crossings)
