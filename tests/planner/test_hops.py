"""Transfer times from both ends' own clocks."""

from __future__ import annotations

from random import Random

import pytest

from megatron_recycle.measure.hops import Hops
from megatron_recycle.plan import Worker

STAGES, PIPELINES, MICROBATCHES = 3, 2, 6


def told(hops, iteration, hop, offset, late, seed=0, drift=0.0, waited=lambda kind, m: True):
    """One iteration of messages up and down each pipeline; ``hop(stage)`` seconds over the boundary after a stage."""
    random = Random((seed, iteration).__hash__())
    clocks = {Worker(d, s): offset(d, s) + drift * iteration * s for d in range(PIPELINES) for s in range(STAGES)}
    ends = {worker: {"of": [iteration, 1], "sent": {}, "came": {}} for worker in clocks}
    for d in range(PIPELINES):
        for m in range(MICROBATCHES):
            for s in range(STAGES - 1):
                for kind, source, target in (("F", s, s + 1), ("B", s + 1, s)):
                    name, now = f"{kind}{d}.{m}", iteration + random.random()
                    ends[Worker(d, source)]["sent"][name] = now + clocks[Worker(d, source)]
                    if waited(kind, m):
                        came = now + hop(s) + late * random.expovariate(1.0)
                        ends[Worker(d, target)]["came"][name] = came + clocks[Worker(d, target)]
    for worker, times in ends.items():
        hops.take(worker, times)


@pytest.mark.parametrize("late", [0.0, 2e-4])
def test_clocks_that_do_not_agree_cancel(late):
    hops = Hops()
    told(hops, 5, lambda s: 0.003, lambda d, s: 1000.0 * d - 77.7 * s, late)
    assert len(hops.pairs()) == PIPELINES * (STAGES - 1)
    assert 0.003 - 1e-6 <= hops.seconds() <= 0.003 + late


def test_clocks_may_drift_from_iteration_to_iteration():
    hops = Hops()
    for iteration in range(0, 40, 5):
        told(hops, iteration, lambda s: 0.003, lambda d, s: 50.0 * s, 0.0, drift=0.01)
    assert hops.seconds() == pytest.approx(0.003, abs=1e-6)


def test_a_busy_machine_s_lateness_is_left_out_as_far_as_some_message_was_in_time():
    hops = Hops()
    for iteration in range(6):
        told(hops, iteration, lambda s: 0.002, lambda d, s: 0.0, 0.02, seed=3)
    assert 0.002 <= hops.seconds() < 0.006, "while a message is 20 ms late on the average"
    assert 0.014 <= hops.usual() < 0.022, "which is what it takes, and no ground to plan on"


def test_boundaries_differ_and_plans_take_their_median():
    hops = Hops()
    told(hops, 0, lambda s: (0.001, 0.005)[s], lambda d, s: 3.0 * s, 0.0)
    pairs = hops.pairs()
    assert pairs[Worker(1, 0), Worker(1, 1)] == pytest.approx(0.001, abs=1e-6)
    assert pairs[Worker(1, 1), Worker(1, 2)] == pytest.approx(0.005, abs=1e-6)
    assert hops.seconds() == pytest.approx(0.003, abs=1e-6)


def test_one_direction_alone_says_nothing():
    hops = Hops()
    told(hops, 0, lambda s: 0.003, lambda d, s: 9.0 * s, 0.0, waited=lambda kind, m: kind == "F")
    assert hops.seconds() is None and hops.usual() is None
    told(hops, 1, lambda s: 0.003, lambda d, s: 9.0 * s, 0.0, waited=lambda kind, m: kind == "F" or m == 4)
    assert hops.seconds() == pytest.approx(0.003, abs=1e-6)


def test_a_guest_s_messages_are_those_of_the_workers_that_ran_it():
    hops = Hops()
    hops.take(Worker(0, 0), {"of": [0, 1], "sent": {"F0.0": 1.0}, "came": {"B0.0": 9.5}})
    hops.take(Worker(1, 1), {"of": [0, 1], "sent": {"B0.0": 7.0}, "came": {"F0.0": 3.5}})
    assert hops.pairs() == {(Worker(0, 0), Worker(1, 1)): pytest.approx(2.5)}
    hops.take(Worker(2, 1), {"of": [0, 2], "sent": {}, "came": {"F0.0": 99.0}})
    assert len(hops.pairs()) == 1, "another attempt"
