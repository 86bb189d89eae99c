"""Workers move where a stage was hit hard, and only if the move pays off."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recycle.plan import Costs, Grid, Problem, Worker, lower_bound, violations
from megatron_recycle.planner import quick
from megatron_recycle.planner.normalise import Prices, load, moved, normalise
from tests.seeds import examples


def problem(pipelines, stages, microbatches, lost, costs=None):
    """``lost[s]`` workers of stage s have failed, those of the first pipelines."""
    grid = Grid(stages, (microbatches,) * pipelines)
    return Problem(grid, costs or Costs.uniform(stages, 20, 22, 18, 1, 15),
                   tuple(Worker(d, s) for s, n in enumerate(lost) for d in range(n)))


def left(solved):
    return [len(solved.live(s)) for s in range(solved.grid.stages)]


def test_two_failures_of_one_stage_are_shared_with_another():
    before = problem(8, 4, 16, (2, 0, 0, 0))
    moves = normalise(before)
    ((mover, to),) = moves.items()
    after = moved(before, moves)
    assert sorted(left(after)) == [7, 7, 8, 8] and to in before.failed and mover.stage != to.stage == 0
    assert set(after.failed) == {*before.failed, mover} - {to}
    assert lower_bound(after) < lower_bound(before)
    assert violations(quick(after)) == []


def test_nobody_moves_where_lent_layers_level_the_load():
    plain = problem(8, 4, 16, (2, 0, 0, 0), Costs.uniform(4, 80, 88, 72))
    few = replace(plain, costs=replace(plain.costs, layer=((20, 22, 18),) * 4), layers=(4,) * 4, lend=((2, 2),) * 3,
                  layer_held=((0, 0),) * 4, layer_parameters=(0,) * 4)
    assert normalise(plain) and not normalise(few)
    hard = replace(few, failed=tuple(Worker(d, 0) for d in range(7)), lend=((1, 1),) * 3)
    moves = normalise(hard)
    assert moves and lower_bound(moved(hard, moves)) < lower_bound(hard)
    assert violations(quick(moved(hard, moves))) == []


def test_a_stage_without_a_worker_is_filled_where_layers_are_lent_too():
    plain = problem(2, 2, 4, (2, 0), Costs.uniform(2, 80, 88, 72))
    lends = replace(plain, costs=replace(plain.costs, layer=((20, 22, 18),) * 2), layers=(4, 4), lend=((2, 2),),
                    layer_held=((0, 0),) * 2, layer_parameters=(0, 0))
    assert len(normalise(lends)) == 1 and left(moved(lends, normalise(lends))) == [1, 1]


def test_a_slow_worker_is_slow_where_it_moves():
    before = problem(3, 2, 4, (1, 0))
    slow = replace(before, costs=replace(before.costs, speed={Worker(0, 0): 3.0, Worker(2, 1): 1.5}))
    assert moved(slow, {Worker(2, 1): Worker(0, 0)}).costs.speed == {Worker(0, 0): 1.5}


def test_a_single_failure_moves_nobody():
    before = problem(3, 4, 6, (0, 0, 1, 0))
    assert normalise(before) == {}


def test_a_move_that_costs_more_than_it_saves_is_left():
    before = problem(8, 4, 16, (2, 0, 0, 0))
    assert not normalise(before, Prices(move_cost=1000, horizon=10))
    assert normalise(before, Prices(move_cost=0.5, horizon=10))


def test_an_empty_stage_is_filled_whatever_it_costs():
    before = problem(2, 2, 4, (2, 0))
    after = moved(before, normalise(before, Prices(move_cost=1e9, horizon=1)))
    assert left(after) == [1, 1] and violations(quick(after)) == []


def test_workers_leave_the_stage_that_feels_it_least():
    cheap_last = Costs((20, 20, 20), (22, 22, 2), (18, 18, 2), 1, (15, 15, 15))
    before = problem(4, 3, 8, (2, 0, 0), cheap_last)
    after = moved(before, normalise(before))
    assert [len(after.live(s)) for s in range(3)] == [4, 4, 2]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(2, 6), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 9))
def test_moves_never_make_the_slowest_stage_slower_and_keep_every_worker(pipelines, lost, microbatches):
    before = problem(pipelines, len(lost), microbatches, [min(n, pipelines) for n in lost])
    after = moved(before, normalise(before))
    assert sum(left(after)) == sum(left(before))
    slowest = [max(load(p, s, n) for s, n in enumerate(left(p))) for p in (before, after)]
    assert slowest[1] <= slowest[0]
    if sum(left(before)) >= len(lost):
        assert min(left(after)) >= 1


def test_moves_are_the_fewest_for_their_load():
    """Against brute force over all ways to spread the live workers."""
    from itertools import product

    for lost in product(range(4), repeat=3):
        before = problem(4, 3, 8, lost)
        moves = normalise(before, Prices(move_cost=1e-9, horizon=1e9))
        have, total = left(before), sum(left(before))
        ways = [w for w in product(range(1, 5), repeat=3) if sum(w) == total]

        def cost(way, have=have, before=before):
            return (max(load(before, s, n) for s, n in enumerate(way)),
                    sum(max(0, n - h) for n, h in zip(way, have)))

        best = min(cost(way) for way in ways)
        assert (cost(left(moved(before, moves)))[0], len(moves)) == best
