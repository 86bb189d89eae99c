"""Measured durations become costs that noise does not shift, and plans are made again when they drift."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_recycle.plan import Costs, PlanError, Problem, Worker, violations
from megatron_recycle.plan.grid import Grid
from megatron_recycle.planner import quick
from megatron_recycle.planner.profile import Profile, caps, drifted


def measured(slow=None, odd=False, stages=2, pipelines=3):
    profile = Profile(stages)
    for d in range(pipelines):
        for s in range(stages):
            factor = 1.5 if Worker(d, s) == slow else 1.0
            for kind, seconds in (("F", 20e-6), ("B", 22e-6), ("W", 18e-6), ("S", 15e-6), ("hop", 1e-6)):
                for i in range(9):
                    noise = 1 + 0.01 * (i % 3 - 1)
                    profile.add(kind, Worker(d, s), seconds * factor * noise)
    if odd:
        profile.add("F", Worker(0, 0), 1.0)
    return profile


def test_costs_are_medians_in_microseconds():
    expected = Costs.uniform(2, 20, 22, 18, 1, 15)
    assert measured().costs() == expected and measured(odd=True).costs() == expected


def test_a_slow_worker_is_found_and_does_not_shift_its_stage():
    costs = measured(slow=Worker(1, 1)).costs()
    assert costs.speed == {Worker(1, 1): 1.5} and costs.forward == (20, 20)


def test_nothing_is_said_before_every_stage_was_measured():
    profile = Profile(2)
    profile.add("F", Worker(0, 0), 1e-3)
    assert profile.costs() is None
    with pytest.raises(PlanError):
        profile.add("X", Worker(0, 0), 1.0)


def test_drift_is_a_notable_change_only():
    old = Costs.uniform(2, 20, 22, 18, 1, 15)
    assert not drifted(old, replace(old, forward=(21, 20)))
    assert drifted(old, replace(old, forward=(30, 20)))
    assert drifted(old, replace(old, speed={Worker(0, 0): 1.5}))
    assert not drifted(replace(old, speed={Worker(0, 0): 1.5}), replace(old, speed={Worker(0, 0): 1.45}))


def test_caps_from_bytes_never_promise_more_than_there_is():
    before, after = (100 << 20, 90 << 20), (70 << 20, 33 << 20)
    free = {Worker(d, s): (1 << 30) + d * 12345 for d in range(2) for s in range(2)}
    cap, units_before, units_after = caps(free, before, after)
    unit = -(-(100 << 20) // 8)
    assert all(cap[w] * unit <= free[w] for w in free)
    assert all(units_before[s] * unit >= before[s] and units_after[s] * unit >= after[s] for s in range(2))
    plan = quick(Problem(Grid(2, (12, 12)), Costs.uniform(2, 2, 2, 1), (Worker(0, 1),), {}, cap,
                         units_before, units_after))
    assert violations(plan) == []
    with pytest.raises(PlanError, match="bytes"):
        caps({Worker(0, 0): 5}, (10,), (10,))
