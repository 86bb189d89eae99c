"""Times of an iteration's actions in given orders, each as early as possible; makespan and period follow from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .cycles import cycle_mean
from .grid import Worker
from .problem import Problem


class Clock:
    """Times of actions that run in an ``order`` in which each can be timed.

    A worker runs its actions in that order, and then the step of its stage, which begins when all workers of the
    stage's group are ready. Several passes are needed for a period; anything constant between them is worked out once.

    Args:
        workers: the workers by number.
        order: the numbers of the actions.
        where: by action, the number of its worker, and so on for the next three lists.
        needs: the action that must have ended before, -1 for none.
        lags: how long before.
        lengths: its duration.
        borrows: by action, the groups of stages from which it has lent layers: it waits for their parameters.
        helpers: by group, the workers whose sums of lent layers its step waits for; they send them after all actions.
    """

    def __init__(self, problem: Problem, workers: Sequence[Worker], order: Sequence[int], where: Sequence[int],
                 needs: Sequence[int], lags: Sequence[int], lengths: Sequence[int],
                 borrows: Mapping[int, Collection[int]], helpers: Mapping[int, Collection[int]]) -> None:
        self._order, self._where, self._needs, self._lags, self._lengths = order, where, needs, lags, lengths
        self._borrows, self._helpers = borrows, helpers
        self._group = [problem.group[worker.stage] for worker in workers]
        self._step = [problem.costs.step[worker.stage] for worker in workers]
        self._lent = problem.costs.lent
        self.groups = max(problem.group) + 1
        self._longest = [0] * self.groups  # the step of a group's slowest stage
        for g, step in zip(self._group, self._step):
            self._longest[g] = max(self._longest[g], step)

    def times(self, begin: Sequence[int], scale: int = 1, cold: bool = False) -> tuple[list[int], list[int]]:
        """End of each action, and the time at which each group of stages begins its step.

        Args:
            begin: when each group began its step of the iteration before.
            scale: multiplies every duration, so that times that are fractions of a unit stay whole numbers.
            cold: there was no step before; all is free from ``begin`` on.
        """
        given, summed = self._lent
        where, needs, lags, lengths, borrows = self._where, self._needs, self._lags, self._lengths, self._borrows
        if scale != 1:
            lags, lengths = [lag * scale for lag in lags], [length * scale for length in lengths]
        free = [begin[g] + (0 if cold else step * scale) for g, step in zip(self._group, self._step)]
        there = [at + (0 if cold else (longest + given) * scale) for at, longest in zip(begin, self._longest)]
        ends = [min(begin)] * (len(where) + 1)  # the last one is for actions that need none
        for number in self._order:
            worker = where[number]
            time = free[worker]
            ready = ends[needs[number]] + lags[number]
            if ready > time:
                time = ready
            if borrows and number in borrows:
                time = max(time, *(there[g] for g in borrows[number]))
            ends[number] = free[worker] = time + lengths[number]
        steps = [max(time for time, other in zip(free, self._group) if other == g) for g in range(self.groups)]
        for g, workers in self._helpers.items():
            steps[g] = max(steps[g], *(free[worker] + summed * scale for worker in workers))
        return ends, steps

    def makespan(self) -> int:
        """End of the last step from a cold start."""
        _, steps = self.times([0] * self.groups, cold=True)
        return max(steps[g] + step for g, step in zip(self._group, self._step))

    def period(self) -> float:
        """Steady-state time of an iteration, a fraction or an int: the maximum cycle mean of the steps' begins."""
        size = self.groups

        def step(begin: Sequence[int], scale: int) -> tuple[list[int], list[int]]:
            # The group that decides a time rides along in its low digits.
            _, steps = self.times([time * size + g for g, time in enumerate(begin)], scale * size)
            return [time // size for time in steps], [time % size for time in steps]

        mean = cycle_mean(size, step)
        return int(mean) if mean.denominator == 1 else float(mean)

    def phases(self, period: int) -> list[int]:
        """When each group begins its step in a strictly periodic run; ``period`` must not be below the true one."""
        begin = [0] * self.groups
        while True:
            _, steps = self.times(begin)
            later = [max(old, new - period) for old, new in zip(begin, steps)]
            if later == begin:
                return begin
            begin = later
