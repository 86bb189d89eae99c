"""The period is the maximum cycle mean: checked against brute force and against a long simulated run."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recycle.plan import replay
from megatron_recycle.plan.cycles import cycle_mean
from megatron_recycle.plan.replay import _order, _times
from megatron_recycle.planner import quick
from tests.planner.problems import problems


def karp(matrix):
    """Karp's maximum cycle mean of a full matrix."""
    n = len(matrix)
    walk = [[0] + [None] * (n - 1)]
    for _ in range(n):
        last = walk[-1]
        walk.append([max(last[i] + matrix[i][j] for i in range(n) if last[i] is not None) for j in range(n)])
    return max(min(Fraction(walk[n][j] - walk[k][j], n - k) for k in range(n) if walk[k][j] is not None)
               for j in range(n) if walk[n][j] is not None)


@given(st.integers(1, 6).flatmap(lambda n: st.lists(
    st.lists(st.integers(0, 30), min_size=n, max_size=n), min_size=n, max_size=n)))
def test_cycle_mean_equals_karps(matrix):
    n = len(matrix)

    def step(times, scale):
        best = [max((times[i] + matrix[i][j] * scale, i) for i in range(n)) for j in range(n)]
        return [b[0] for b in best], [b[1] for b in best]

    assert cycle_mean(n, step) == karp(matrix)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_period_is_the_growth_of_a_long_run(problem):
    plan = quick(problem)
    timeline = replay(plan)
    names = sorted(plan.workers)
    network = _order(problem, names, [plan.workers[n] for n in names])
    groups = problem.groups()
    group = [next(g for g, stages in enumerate(groups) if problem.stage(n) in stages) for n in names]
    step = [problem.costs.step[problem.stage(n)] for n in names]
    release, history = [0] * len(groups), []
    for _ in range(80):
        _, ends = _times(network, len(names), group, step, release, 1)
        done = [0] * len(groups)
        for owner, duration, end in zip(network.owner, network.duration, ends):
            if duration < 0:
                done[group[owner]] = max(done[group[owner]], end)
        release = done
        history.append(max(done))
    growth = (history[-1] - history[19]) / 60
    assert abs(growth - timeline.period) <= max(history[0], 1) / 60 + 1e-9
    assert max(history) <= timeline.makespan + 79 * timeline.period + 1e-6 or history[0] == timeline.makespan
