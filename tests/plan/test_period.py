"""The period is the maximum cycle mean: checked against brute force and against a long simulated run."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recycle.plan import Costs, Grid, Problem, replay
from megatron_recycle.plan.cycles import cycle_mean
from megatron_recycle.plan.replay import ordered
from megatron_recycle.planner import quick
from tests.planner.problems import problems
from tests.seeds import examples


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


@settings(max_examples=examples(100), deadline=None)
@given(problems())
def test_period_equals_karps_on_the_matrix_of_single_releases(problem):
    """Entry (i, j): from group i's step to group j's next one, found by replaying with all others free long
    ago."""
    plan = quick(problem)
    _, clock = ordered(plan)
    matrix = []
    for source in range(clock.groups):
        _, begins = clock.times([0 if g == source else -10 ** 9 for g in range(clock.groups)])
        matrix.append(begins)
    assert replay(plan).period == float(karp(matrix)) == plan.period


def test_an_iteration_in_steady_state_may_be_shorter_than_a_cold_one():
    grid = Grid(2, (4,))
    timeline = replay(quick(Problem(grid, Costs.uniform(2, 1, 1, 1, step=1))))
    assert timeline.period == 13 and timeline.makespan == 14
