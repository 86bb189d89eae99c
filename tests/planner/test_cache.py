"""A plan is remembered for every membership that is the same up to names."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from megatron_recycle.plan import Costs, Grid, Problem, Worker, violations
from megatron_recycle.planner import Cache, ahead, plan_for, quick
from megatron_recycle.planner.baselines import drop
from megatron_recycle.planner.canonical import canonical
from tests.planner.problems import placed, problems
from tests.seeds import examples


def problem(*failed, pipelines=4, **changes):
    grid = Grid(4, (8,) * pipelines)
    return Problem(grid, Costs.uniform(4, 20, 22, 18, 1, 15), tuple(map(Worker.parse, failed)),
                   cap=dict.fromkeys(grid.workers(), 6), **changes)


def test_any_failure_of_one_stage_finds_the_plan_of_another():
    cache = Cache()
    first = plan_for(problem("1:2"), cache, work=20_000)
    again = plan_for(problem("3:2"), cache, work=20_000)
    assert len(cache) == 1 and first.period == again.period and first.workers != again.workers
    assert violations(again) == [] and again.stats["cached"]
    assert again.problem.failed == (Worker(3, 2),)


def test_aligned_failures_of_two_stages_are_one_membership():
    assert canonical(problem("1:2", "3:0")).problem == canonical(problem("0:0", "2:2")).problem
    assert canonical(problem("1:2")).problem != canonical(problem("1:3")).problem


def test_unlike_peers_are_told_apart():
    slow = replace(problem("1:2"), costs=Costs.uniform(4, 20, 22, 18, 1, 15, {Worker(0, 2): 2}))
    assert canonical(slow).problem != canonical(problem("1:2")).problem


@settings(max_examples=examples(60), deadline=None)
@given(problems())
def test_cache_hit_equals_a_fresh_solve(asked):
    cache = Cache()
    fresh = plan_for(asked, None, work=2_000)
    missed, hit = plan_for(asked, cache, work=2_000), plan_for(asked, cache, work=2_000)
    assert fresh.digest == missed.digest == hit.digest
    assert fresh.to_json()["period"] == hit.to_json()["period"]
    assert violations(hit) == []
    assert quick(asked).lower_bound == hit.lower_bound


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.one_of(problems(), placed()))
def test_a_search_is_never_worse_than_the_plan_at_once(asked):
    """Both begin with the same plan, that of the membership's canonical form."""
    at_once = quick(asked)
    assert plan_for(asked, work=0).digest == at_once.digest
    assert plan_for(asked, work=200).objective_value <= at_once.objective_value


def test_a_better_plan_replaces_a_worse_one_and_not_the_other_way_round():
    cache, asked = Cache(), problem("1:2")
    better = quick(asked)
    worse = drop(asked)
    assert better.period < worse.period
    for plan in (worse, better, worse):
        cache.put(asked, plan)
    assert cache.get(asked).period == better.period


def test_what_is_planned_ahead_covers_every_single_failure_first():
    upcoming = list(ahead(problem()))
    assert [len(p.failed) for p in upcoming[:5]] == [1, 1, 1, 1, 2]
    assert len(upcoming) == 4 + 4 + 6  # per stage; two of one stage; two stages
    cache = Cache()
    for candidate in upcoming[:4]:
        cache.put(candidate, quick(candidate))
    assert all(problem(f"{d}:{s}") in cache for d in range(4) for s in range(4))


def test_after_a_failure_its_return_is_planned_ahead_too():
    assert any(not p.failed for p in ahead(problem("1:2")))
