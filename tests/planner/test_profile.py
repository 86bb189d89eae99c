"""Measured durations become costs that noise does not shift, and plans are made again when they drift."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recycle.measure.durations import Profile, caps, drifted
from megatron_recycle.measure.noise import LONG, spread
from megatron_recycle.plan import Costs, PlanError, Problem, Worker, violations
from megatron_recycle.plan.grid import Grid
from megatron_recycle.planner import quick

GRID = [Worker(d, s) for d in range(3) for s in range(2)]
TAKES = {"F": 20e-6, "B": 22e-6, "W": 18e-6, "S": 15e-6}


def measured(slow=None, odd=False):
    profile = Profile()
    for worker in GRID:
        factor = 1.5 if worker == slow else 1.0
        for i in range(9):
            profile.add(worker, {kind: seconds * (1 if kind == "S" else factor) * (1 + 0.01 * (i % 3 - 1))
                                 for kind, seconds in TAKES.items()})
    if odd:
        profile.add(GRID[0], {**TAKES, "F": 1.0})
    profile.factors(GRID)
    return profile.costs(GRID, (0, 1), hop=1e-6)


def test_costs_are_medians_in_microseconds():
    expected = Costs.uniform(2, 20, 22, 18, 1, 15)
    assert measured() == expected and measured(odd=True) == expected


def test_a_slow_worker_is_found_and_does_not_shift_its_stage():
    costs = measured(slow=Worker(1, 1))
    assert costs.speed == {Worker(1, 1): 1.5} and costs.forward == (20, 20)


def test_of_two_peers_one_is_slow_and_the_other_is_what_is_usual():
    profile = Profile()
    for _ in range(4):
        profile.add(Worker(0, 0), TAKES)
        profile.add(Worker(1, 0), {kind: 4 * seconds for kind, seconds in TAKES.items()})
    pair = [Worker(0, 0), Worker(1, 0)]
    profile.factors(pair)
    costs = profile.costs(pair, (0,))
    assert costs.speed == {Worker(1, 0): 4.0} and costs.forward == (20,)


def test_a_step_takes_what_it_takes_the_last_one_who_comes_to_it():
    profile = Profile()
    for one, other in ((5e-6, 90e-6), (80e-6, 6e-6), (7e-6, 70e-6), (1e-6, 99e-6), (60e-6, 6e-6)):
        for worker, seconds in ((Worker(0, 0), one), (Worker(1, 0), other)):
            profile.add(worker, {**TAKES, "S": seconds})
    assert profile.costs([Worker(0, 0), Worker(1, 0)], (0,)).step == (6,), "the usual one, not a lucky one"


def test_nothing_is_said_before_every_stage_was_measured():
    profile = Profile()
    profile.add(Worker(0, 0), TAKES)
    assert profile.costs(GRID, (0, 1)) is None
    with pytest.raises(PlanError):
        profile.add(Worker(0, 0), {"X": 1.0})


def test_drift_is_a_notable_change_only():
    old = Costs.uniform(2, 20, 22, 18, 1, 15)
    assert not drifted(old, replace(old, forward=(21, 20)))
    assert drifted(old, replace(old, forward=(30, 20)))
    assert not drifted(old, replace(old, forward=(30, 20)), {"F": 0.12}), "so much is chance"
    assert drifted(old, replace(old, forward=(30, 20)), {"F": 0.12}, LONG), "but not in so many iterations"
    assert drifted(old, replace(old, hop=17))
    assert not drifted(old, replace(old, hop=15)), "less than a quarter of the work"
    assert drifted(old, replace(old, speed={Worker(0, 0): 1.5}))
    assert not drifted(replace(old, speed={Worker(0, 0): 1.5}), replace(old, speed={Worker(0, 0): 1.45}))


# ---- several chunks of the model on a stage

V = (0, 1, 1, 0)
LAST = {"F/1": 40e-6, "B/1": 44e-6, "W/1": 36e-6}
"""The second chunk of a stage takes twice as long as the first."""


def measured_of_v(slow=None, partial=None):
    """Durations of the grid's workers. ``slow`` takes half as long again; ``partial`` has no first chunks to run."""
    profile = Profile()
    for worker in GRID:
        for _ in range(9):
            factor = 1.5 if worker == slow else 1.0
            own = {**({"S": 15e-6} if worker == partial else TAKES), **LAST}
            profile.add(worker, {kind: factor * seconds for kind, seconds in own.items()}, chunks=2)
    return profile


def test_each_chunk_costs_what_it_takes_itself():
    costs = measured_of_v().costs(GRID, V)
    assert costs.forward == (20, 20, 40, 40) and costs.backward_input == (22, 22, 44, 44)
    assert costs.backward_weight == (18, 18, 36, 36) and len(costs.step) == 2 and not costs.speed
    assert measured_of_v().costs(GRID, (0, 1, 0, 1)).forward == (20, 20, 40, 40), "interleaved"
    lacks = Profile()
    for worker in GRID:
        lacks.add(worker, TAKES if worker.stage else {**TAKES, **LAST}, chunks=2)
    assert lacks.costs(GRID, V) is None, "of one chunk nothing is known"


def test_a_worker_of_several_chunks_is_slow_by_all_its_work_and_not_because_it_has_none_in_one():
    slow, partial = measured_of_v(slow=Worker(1, 1)), measured_of_v(partial=Worker(1, 1))
    assert slow.factors(GRID) == {Worker(1, 1): pytest.approx(1.5)} and partial.factors(GRID) == {}
    for profile in (slow, partial):
        assert profile.costs(GRID, V).forward == (20, 20, 40, 40)


def test_a_chunk_that_has_changed_is_a_drift_also_where_its_stage_takes_as_long_as_before():
    old = Costs((20, 20, 40, 40), (22, 22, 44, 44), (18, 18, 36, 36), 1, (15, 15))
    assert not drifted(old, old, placement=V)
    assert drifted(old, replace(old, forward=(40, 20, 40, 20)), placement=V), "a stage's average chunk is as it was"
    assert not drifted(old, replace(old, forward=(20, 20, 45, 40)), placement=V), "less than a tenth of the chunk"
    assert not drifted(old, replace(old, forward=(28, 20, 40, 40)), placement=V), "nor of the stage's average chunk"
    assert drifted(old, replace(old, step=(15, 40)), placement=V)
    assert not drifted(old, replace(old, step=(15, 32)), placement=V), "less than a tenth of both chunks"
    tiny = replace(old, forward=(1, 20, 40, 40), backward_input=(1, 22, 44, 44), backward_weight=(1, 18, 36, 36))
    assert not drifted(tiny, replace(tiny, forward=(4, 20, 40, 40)), placement=V), "it costs next to nothing"


# ---- noise


class Busy:
    """Iterations of all workers on a busy machine: durations that scatter, and stay long or short for a while."""

    def __init__(self, scatter, slow_changes, seed):
        self.random = Random(seed)
        self.scatter, self.slow_changes = scatter, slow_changes
        self.phase = dict.fromkeys(GRID, 0.0)

    def iteration(self, factors):
        found = {}
        for worker in GRID:
            self.phase[worker] = 0.7 * self.phase[worker] + self.random.gauss(0, self.slow_changes)
            found[worker] = {
                kind: seconds * (1 if kind == "S" else factors.get(worker, 1.0))
                * math.exp(self.phase[worker] + self.random.gauss(0, self.scatter)) for kind, seconds in TAKES.items()}
        return found


def history(profile, busy, iterations, factors=()):
    """The factors that are found after each iteration."""
    found = []
    for _ in range(iterations):
        for worker, seconds in busy.iteration(dict(factors)).items():
            profile.add(worker, seconds)
        found.append(profile.factors(GRID))
    return found


@pytest.mark.parametrize(("scatter", "slow_changes", "reports"), [
    (0.02, 0.0, 0), (0.2, 0.0, 0), (0.5, 0.0, 0), (0.3, 0.3, 3), (0.1, 0.5, 8)])
def test_noise_makes_nobody_slow(scatter, slow_changes, reports):
    found = 0
    for seed in range(20):  # jobs of 25 iterations
        known = [set(), *map(set, history(Profile(), Busy(scatter, slow_changes, seed), 25))]
        found += sum(len(now - before) for before, now in pairwise(known))
    assert found <= reports, "noise that stays for a while is told from slowness most of the time"


@pytest.mark.parametrize(("factor", "scatter"), [(1.5, 0.0), (1.5, 0.02), (2.0, 0.04), (5.0, 0.1)])
def test_who_becomes_slow_is_found_within_three_iterations(factor, scatter):
    slow = Worker(1, 1)
    for seed in range(30):
        profile, busy = Profile(), Busy(scatter, 0.0, seed)
        history(profile, busy, 8)
        found = history(profile, busy, 3, {slow: factor})
        assert set(found[-1]) == {slow} and found[-1][slow] == pytest.approx(factor, rel=0.4)
        assert slow not in history(profile, busy, 4)[-1], "well again"


@pytest.mark.parametrize(("unit", "found"), [(1.0, 0), (20_000.0, 30)], ids=["microseconds", "seconds"])
def test_on_a_busy_machine_three_late_iterations_are_slowness_only_if_they_take_long(unit, found):
    late, reports = Worker(1, 1), 0
    for seed in range(30):
        profile, busy = Profile(), Busy(0.4, 0.0, seed)
        history(profile, busy, 12)
        for worker in GRID:
            for seconds in profile._series[worker].values():
                seconds.extend([unit * value for value in seconds])
        for _ in range(3):
            for worker, seconds in busy.iteration({late: 6.0}).items():
                profile.add(worker, {kind: unit * value for kind, value in seconds.items()})
            known = set(profile.factors(GRID))
            assert known <= {late}
        reports += late in known
    assert abs(reports - found) <= 6


def test_in_more_noise_it_takes_more_iterations():
    slow, found = Worker(0, 0), []
    for seed in range(30):
        profile, busy = Profile(), Busy(0.3, 0.0, seed)
        history(profile, busy, 12)
        found.append(slow in history(profile, busy, 12, {slow: 2.5})[-1])
    assert sum(found) >= 27


def test_a_worker_that_has_no_work_any_more_is_what_it_was_and_another_process_is_not():
    profile, slow = Profile(), Worker(0, 1)
    history(profile, Busy(0.01, 0.0, 1), 4, {slow: 3.0})
    for _ in range(20):
        for worker in GRID:
            profile.add(worker, {"S": 15e-6} if worker == slow else TAKES)
        assert profile.factors(GRID)[slow] == pytest.approx(3.0, rel=0.05)
    profile.forget(slow)
    assert profile.factors(GRID) == {}


@given(st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=12), st.floats(0.1, 10.0))
def test_the_spread_does_not_depend_on_the_unit(values, unit):
    assert spread([values]) == pytest.approx(spread([[unit * value for value in values]]), abs=1e-6)


def test_a_minority_that_has_changed_does_not_widen_the_spread():
    busy = Random(5)
    quiet = [[math.exp(busy.gauss(0, 0.1)) for _ in range(12)] for _ in range(10)]
    changed = [*quiet[1:], [*quiet[0][:6], *(5 * value for value in quiet[0][6:])]]
    assert 0.07 < spread(quiet) < 0.14 and spread(changed) < 1.2 * spread(quiet)
    assert spread([]) == spread([[1.0]]) == math.inf


def test_caps_from_bytes_never_promise_more_than_there_is():
    before, after = (100 << 20, 90 << 20), (70 << 20, 33 << 20)
    free = {Worker(d, s): (1 << 30) + d * 12345 for d in range(2) for s in range(2)}
    cap, units_before, units_after, message = caps(free, before, after, (0, 1))
    unit = -(-(100 << 20) // 8)
    assert all(cap[w] * unit <= free[w] for w in free)
    assert all(units_before[s] * unit >= before[s] and units_after[s] * unit >= after[s] for s in range(2))
    plan = quick(Problem(Grid(2, (12, 12)), Costs.uniform(2, 2, 2, 1), (Worker(0, 1),), cap,
                         units_before, units_after, message))
    assert message == (0, 1), "what a message takes is never nothing"
    assert violations(plan) == []
    with pytest.raises(PlanError, match="bytes"):
        caps({Worker(0, 0): 5}, (10,), (10,), (1,))
