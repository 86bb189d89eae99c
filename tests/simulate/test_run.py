"""The account of a run: closed forms, conservation, monotonicity, and the same again for the same seed."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from megatron_recycle.plan import Worker
from megatron_recycle.tools.simulate.cluster import Cluster
from megatron_recycle.tools.simulate.compare import ORDER, makers
from megatron_recycle.tools.simulate.generating import Failures, generate, spaced
from megatron_recycle.tools.simulate.policies.others import FaultScaled, Ideal
from megatron_recycle.tools.simulate.policies.recycling import Recycling, Stalls
from megatron_recycle.tools.simulate.trace import HOST, Cleaning, Outage, Trace, checked
from tests.seeds import examples
from tests.simulate.small import CLUSTER, JOB, PLANS, run, total, trace

FREE = Stalls(exit=0, host=0, rejoin=0, start=0, save=0, restart=0)
ALL = makers(ORDER, Stalls())


def test_without_failures_iterations_follow_one_another():
    stock = PLANS.stock()
    outcome = run(Ideal(), trace(duration=3600))
    assert outcome.iterations == int((3600 - stock.makespan) / stock.period) + 1
    assert outcome.samples == outcome.iterations * JOB.batch
    figures = PLANS.rerouted(())
    ours = run(Recycling(FREE), trace(duration=3600), commits=True)
    assert ours.iterations == int((3600 - figures.makespan) / figures.period) + 1
    assert ours.commits[0] == pytest.approx(figures.makespan)
    assert ours.commits[-1] == pytest.approx(figures.makespan + (ours.iterations - 1) * figures.period)


def test_one_failure_for_ever():
    """Before it the fault-free plan, a stall, the rest of the iteration by the plan without the worker, whose two peers
    do again what it had done, then that plan's period. The stall begins when the longest action is over that may be
    under way."""
    stalls, stall = Stalls(exit=2.0, save=0), 2.0 + JOB.longest_action
    before, after = PLANS.rerouted(()), PLANS.rerouted([Worker(0, 0)])
    at = before.makespan + 10 * before.period + 0.4 * before.period  # in the middle of the twelfth iteration
    outcome = run(Recycling(stalls), trace(Outage(at, float("inf"), "host0"), duration=1000), commits=True)
    assert outcome.spent["redone"] == pytest.approx(0.4 / 2 * before.period)
    assert outcome.spent["recovery"] == pytest.approx(stall) and stall > 2.0
    rest = (1 - 0.4 / 2) * after.period
    assert outcome.commits[11] == pytest.approx(at + stall + rest)
    assert outcome.commits[12] == pytest.approx(at + stall + rest + after.period)
    assert outcome.iterations == 11 + 1 + int((1000 - at - stall - rest) / after.period)
    assert outcome.survived == 1 and outcome.fatal == 0 and outcome.lost == pytest.approx(0.4 / 2)


def test_a_worker_comes_back_at_the_end_of_an_iteration():
    """The end of the iteration in flight promises it, and all stand at the end of the next one."""
    stalls = Stalls(exit=0.0, rejoin=3.0, start=5.0, save=0)
    alone, all_ = PLANS.rerouted([Worker(0, 0)]), PLANS.rerouted(())
    outcome = run(Recycling(stalls), trace(Outage(0.001, 20.0, "host0"), duration=100), commits=True)
    promised = next(index for index, end in enumerate(outcome.commits) if end > 25.0)
    rest = (1 - 0.001 / 2 / all_.makespan) * alone.period
    boundary = 0.001 + JOB.longest_action + rest + (promised + 1) * alone.period
    assert outcome.commits[promised + 1] == pytest.approx(boundary)
    assert outcome.commits[promised + 2] == pytest.approx(boundary + 3.0 + all_.makespan)
    assert outcome.commits[promised + 3] == pytest.approx(boundary + 3.0 + all_.makespan + all_.period)


def test_fault_scaled_is_in_proportion_to_what_lives():
    outcome = run(FaultScaled(), trace(Outage(1800, float("inf"), "host0"), Outage(1800, float("inf"), "host1"),
                                       duration=3600))
    free = run(Ideal(), trace(duration=3600))
    assert outcome.throughput / free.throughput == pytest.approx((1 + 4 / 6) / 2, rel=2e-3)


def test_a_stage_that_is_lost_goes_back_to_the_checkpoint():
    stalls = Stalls(save=1.0, save_every=100.0, restart=50.0)
    dead = [Outage(250.0, 260.0, f"host{host}", HOST) for host in (0, 1, 2)]  # stage 0
    outcome = run(Recycling(stalls), trace(*dead, duration=1000), commits=True)
    assert outcome.fatal == 1 and outcome.spent["restart"] >= 50.0
    assert 40 < outcome.spent["rolled back"] + outcome.spent["redone"] < 60  # since the checkpoint after 200 s
    assert outcome.samples == outcome.iterations * JOB.batch


@pytest.mark.parametrize("name", ORDER)
def test_nothing_is_left_of_any_policy_without_workers_and_all_come_back(name: str):
    dead = [Outage(500.0, 900.0, f"host{host}", HOST) for host in range(6)]
    outcome = run(ALL[name](), trace(*dead, duration=3600))
    assert total(outcome) == pytest.approx(3600)
    if name != "fault-free":
        assert outcome.spent["stopped"] >= 300
        assert outcome.rate[-1][1] > 0  # it trains again at the end


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.sampled_from(ORDER), some.lists(some.tuples(some.integers(0, 5), some.floats(0, 900), some.floats(1, 400),
                                                        some.booleans()), max_size=14))
def test_time_and_samples_are_conserved(name: str, drawn: list[tuple[int, float, float, bool]]):
    outages = [Outage(down, down + length, f"host{host}", HOST if whole else "exit")
               for host, down, length, whole in drawn]
    made = checked([f"host{number}" for number in range(6)], outages, 1000.0, Cleaning())
    outcome = run(ALL[name](), made, commits=True)
    assert total(outcome) == pytest.approx(1000.0)
    assert min(outcome.spent.values(), default=0) >= 0
    if name not in ("torchft", "rollback", "lossy-forward", "elastic-batch"):
        assert outcome.samples == outcome.iterations * JOB.batch
    assert outcome.samples <= outcome.iterations * JOB.batch
    assert outcome.survived + outcome.fatal <= outcome.failures or name == "bamboo"
    assert outcome.commits == sorted(outcome.commits)
    times = [at for at, _ in outcome.rate]
    assert times == sorted(times) and times[0] >= 0


VARIANTS = ("ours-no-moves", "lent-and-moves", "lent-layers", "drop", "rollback", "lossy-forward", "elastic-batch")
"""Policies that differ from another one in a setting."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.night) if name in VARIANTS else name
                                  for name in ORDER if name != "fault-free"])
def test_more_failures_are_no_better(name: str):
    """Over some seeds; each failure costs time, and fewer workers are no faster."""
    def mean(every: float) -> float:
        return statistics.fmean(run(ALL[name](), spaced(6, every, 20_000, seed, repair=1500)).throughput
                                for seed in range(3))

    rates = [mean(every) for every in (18_000, 4000, 1000)]
    assert rates[0] >= rates[1] >= rates[2]


def test_the_same_seed_gives_the_same():
    def once() -> tuple[object, ...]:
        made = generate(6, 1, 20_000, 5, of_hosts=Failures(20_000, 0.8, 1000))
        outcome = run(Recycling(), made)
        return outcome.samples, outcome.spent, outcome.rate

    assert once() == once()


def test_spares_take_the_place_of_the_lost():
    wide = Cluster(8, 1)
    outcome = run(Recycling(Stalls(start=10.0, save=0)),
                  trace(Outage(100.0, float("inf"), "host3", HOST), duration=600, hosts=8), wide)
    full = PLANS.rerouted(())
    assert outcome.rate[-1][1] == pytest.approx(JOB.batch / full.period)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.integers(0, 10_000))
def test_every_member_has_a_unit_and_no_unit_is_idle_while_a_place_is_empty(seed: int):
    """Through failures, spares and moves, some time after the last change."""
    wide = Cluster(8, 1)
    made = generate(8, 1, 20_000, seed, of_hosts=Failures(6000, repair=2500)).part(0, 15_000)
    calm = Trace(made.hosts, tuple(replace(one, up=min(one.up, 15_000)) for one in made.outages), 16_500)
    policy = Recycling(Stalls(start=10.0, save=0))
    run(policy, calm, wide)
    assert policy.members is not None and not policy.members.empty
    assert {str(worker) for worker in policy.slots.of.values()} == policy.members.state.members.keys()
    assert len(policy.slots.of) + len(policy.slots.spare) == 8


def test_tensor_parallel_workers_are_lost_with_any_of_their_gpus():
    made = Trace(("a", "b", "c"), (Outage(100.0, 200.0, "a", gpu=5), Outage(150.0, 160.0, "a", gpu=4)), 400.0)
    outcome = run(Recycling(Stalls(start=0.0, save=0)), made, Cluster(3, 8, 4))
    assert outcome.failures == 1  # both GPUs are of the second worker of the host
    assert len(CLUSTER.units()) == len(Cluster(3, 8, 4).units())
