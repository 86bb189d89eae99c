"""Each policy by its own rules."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from megatron_recycle.plan import Costs, PlanError, Worker
from megatron_recycle.planner import plan_for
from megatron_recycle.policy import POLICIES
from megatron_recycle.tools.simulate.cluster import Cluster, Slots, Unit
from megatron_recycle.tools.simulate.compare import ORDER, makers
from megatron_recycle.tools.simulate.job import Job
from megatron_recycle.tools.simulate.plans import Plans
from megatron_recycle.tools.simulate.policies.bamboo import Bamboo, BambooConstants, redundant
from megatron_recycle.tools.simulate.policies.base import Setting
from megatron_recycle.tools.simulate.policies.oobleck import Oobleck, OobleckConstants
from megatron_recycle.tools.simulate.policies.others import MovedLayers, TorchFT, recut
from megatron_recycle.tools.simulate.policies.recycling import (
    CheckpointRestart,
    Dropping,
    LentLayers,
    LossyForward,
    Recycling,
    RollBack,
    Stalls,
    WithoutMoves,
)
from megatron_recycle.tools.simulate.trace import HOST, Outage, TraceError
from tests.seeds import examples
from tests.simulate.small import JOB, PLANS, run, trace

FOR_GOOD = float("inf")
QUIET = Stalls(exit=0, host=0, rejoin=0, start=0, save=0, restart=0)


def rate(policy: object, *outages: Outage, **other: object) -> float:
    """Samples per second at the end."""
    return run(policy, trace(*outages, duration=600), **other).rate[-1][1]  # type: ignore[arg-type]


ONE = Outage(100.0, FOR_GOOD, "host0")


def test_policies_of_the_product_are_those_that_it_has():
    products = {Dropping.product, RollBack.product, LossyForward.product}
    assert products == {name for name, policy in POLICIES.items() if policy.avoids_hit}
    assert Recycling.product == "reroute" and CheckpointRestart.product == "restart"


def test_dropping_keeps_the_batch_and_rolling_back_does_not():
    assert rate(Dropping(QUIET), ONE) == pytest.approx(JOB.batch / PLANS.dropped(1).period)
    own = JOB.batch * 2 / 3 / PLANS.rerouted(()).period
    assert rate(RollBack(QUIET), ONE) == rate(LossyForward(QUIET), ONE) == pytest.approx(own)


def test_lossy_forward_loses_nothing_of_the_iteration_in_flight():
    lossy, back = (run(made(QUIET), trace(ONE, duration=600)) for made in (LossyForward, RollBack))
    assert "redone" not in lossy.spent and back.spent["redone"] > 0


def test_figures_are_the_planners_own():
    for failed in ((), (Worker(1, 0),), (Worker(1, 0), Worker(2, 1))):
        plan = plan_for(JOB.problem(failed=failed), work=0)
        assert (PLANS.rerouted(failed).period, PLANS.rerouted(failed).makespan) == pytest.approx(
            (plan.period * JOB.unit, plan.makespan * JOB.unit))


def test_plans_are_made_once_for_memberships_that_need_the_same():
    plans = Plans(JOB, work=0)
    assert plans.rerouted([Worker(0, 1)]) == plans.rerouted([Worker(2, 1)]) and len(plans) == 1
    plans.rerouted([Worker(0, 0)])
    assert len(plans) == 2
    coarse = Plans(JOB, shapes="multiset", work=0)
    assert coarse.rerouted([Worker(0, 1)]) == coarse.rerouted([Worker(1, 0)]) and len(coarse) == 1
    with pytest.raises(PlanError, match="stage 0"):
        plans.rerouted([Worker(pipeline, 0) for pipeline in range(3)])


def test_moves_fill_a_stage_that_was_hit_too_hard():
    """One stage is left with one worker: a worker of the other moves over, while all train."""
    dead = [Outage(100.0, FOR_GOOD, f"host{host}", HOST) for host in (0, 1)]
    stays, moves = rate(WithoutMoves(QUIET), *dead), rate(Recycling(QUIET), *dead)
    assert moves == pytest.approx(JOB.batch / PLANS.rerouted([Worker(0, 0), Worker(0, 1)]).period)
    assert moves > 1.2 * stays


def test_layers_are_lent_once_the_search_has_ended_and_until_the_next_change():
    """At once the job goes on as without lending; a comeback's first iterations do, too."""
    gone = Outage(100.0, 300.0, "host0")
    plain, lent = (run(made(QUIET), trace(gone, duration=600)) for made in (WithoutMoves, LentLayers))
    with_layers = PLANS.lent([Worker(0, 0)])
    assert with_layers.period < 0.98 * PLANS.rerouted([Worker(0, 0)]).period
    assert with_layers.period > PLANS.rerouted(()).period * 5 / 6
    told = [rate for at, rate in lent.rate if 100 < at < 300 and rate]
    assert told == pytest.approx([JOB.batch / PLANS.rerouted([Worker(0, 0)]).period, JOB.batch / with_layers.period])
    assert lent.rate[-1][1] == plain.rate[-1][1] == pytest.approx(JOB.batch / PLANS.rerouted(()).period)
    assert lent.samples > plain.samples


def test_nothing_is_lent_where_a_stage_costs_nothing():
    plans = Plans(Job(3, 2, 4, Costs((0, 20), (0, 22), (0, 18), 0, (0, 0))), work=0)
    assert plans.lent([Worker(0, 1)]) == plans.rerouted([Worker(0, 1)])


def test_a_moving_workers_own_end_ends_the_move():
    dead = [Outage(100.0, FOR_GOOD, f"host{host}", HOST) for host in (0, 1)]
    for host in (3, 4, 5):
        later = Outage(110.0, FOR_GOOD, f"host{host}", HOST)  # its second process is still being started
        outcome = run(Recycling(Stalls(start=30.0, save=0)), trace(*dead, later, duration=600))
        assert outcome.fatal == 0 and outcome.rate[-1][1] > 0


# Bamboo: workers are numbered through pipelines, so that host2 is 1:0, host3 1:1


def test_bamboo_computes_a_lost_stage_in_the_one_before():
    constants = BambooConstants(risk=1.0, save=0)
    before = JOB.batch / (PLANS.stock().period + redundant_of())
    outcome = run(Bamboo(constants), trace(Outage(100.0, FOR_GOOD, "host3"), duration=600))
    assert outcome.survived == 1 and outcome.fatal == 0 and "redone" not in outcome.spent
    assert outcome.rate[0][1] == pytest.approx(before) and outcome.rate[-1][1] == pytest.approx(before / 1.5)


def redundant_of() -> float:
    return redundant(Setting(JOB, Cluster(6, 1), PLANS, (), FOR_GOOD), JOB.microbatches)


@pytest.mark.parametrize("second", ["host2", "host3"])
def test_bamboo_fails_with_both_copies(second: str):
    """At once, or when the one that stands in is lost."""
    first = "host3" if second == "host2" else "host2"
    dead = [Outage(100.0, FOR_GOOD, first), Outage(100.0 if first == "host2" else 200.0, FOR_GOOD, second)]
    outcome = run(Bamboo(BambooConstants(risk=1.0, save=0)), trace(*dead, duration=600))
    assert outcome.fatal == 1
    again = JOB.dealt(2)  # two pipelines are left, for the same batch
    assert outcome.rate[-1][1] == pytest.approx(JOB.batch / (PLANS.stock(again).period + redundant(
        Setting(JOB, Cluster(6, 1), PLANS, (), FOR_GOOD), max(again))))


def test_bamboo_puts_machines_together_anew_when_spares_wait():
    outcome = run(Bamboo(BambooConstants(save=0)), trace(Outage(100.0, 200.0, "host3"), duration=600))
    assert outcome.spent["reconfigure"] >= 20.0
    assert outcome.rate[-1][1] == outcome.rate[0][1]


# Oobleck


def placed(count: int, job: Job = JOB, **constants: float) -> tuple[int, ...]:
    cluster = Cluster(job.size, 1)
    policy = Oobleck(OobleckConstants(**constants))  # type: ignore[arg-type]
    policy.begin(Setting(job, cluster, Plans(job, work=0), cluster.units()[:count], FOR_GOOD))
    return policy._lengths


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.integers(1, 24))
def test_oobleck_uses_every_unit_or_none(count: int):
    job = Job(6, 4, 8, Costs.uniform(4, 20, 22, 18, 1, 5))
    lengths = placed(count, job)
    assert sum(lengths) in (0, count)
    if lengths:
        assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 2 and len(lengths) >= 2
    else:
        assert count < 4


def test_oobleck_ends_when_every_pipeline_has_lost_a_layer():
    job = Job(2, 2, 4, Costs.uniform(2, 20, 22, 18))
    dead = [Outage(100.0, 300.0, host, HOST) for host in ("host0", "host2")]  # the first stages of both
    one, all_ = (run(Oobleck(OobleckConstants(least=1.0)), trace(*some_, duration=600, hosts=4), Cluster(4, 1), job=job)
                 for some_ in (dead[:1], dead))
    assert all_.fatal == 1 and one.fatal == 1  # with f = 1, three of four units are too few for two pipelines
    assert run(Oobleck(OobleckConstants(least=1.0, faults=0)), trace(*dead[:1], duration=600, hosts=4), Cluster(4, 1),
               job=job).fatal == 0


# Others


def test_torchft_goes_on_with_whole_pipelines():
    one = rate(TorchFT(QUIET), ONE)
    assert one == pytest.approx(JOB.batch * 2 / 3 / PLANS.stock().period)
    assert rate(TorchFT(QUIET), Outage(100.0, 200.0, "host0")) == pytest.approx(JOB.batch / PLANS.stock().period)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.lists(some.integers(1, 9), min_size=1, max_size=6), some.integers(1, 5))
def test_recut_layers_are_all_there_and_the_fullest_is_least(loads: list[int], each: int):
    layers = each * len(loads)
    shares = recut(loads, layers)
    assert sum(shares) == layers and min(shares) >= 1
    most = max(load * share for load, share in zip(loads, shares))
    for giver in range(len(loads)):  # no layer that moves makes the fullest one less full
        for taker in range(len(loads)):
            if giver != taker and shares[giver] > 1:
                other = [share - (stage == giver) + (stage == taker) for stage, share in enumerate(shares)]
                assert max(load * share for load, share in zip(loads, other)) >= most


def test_moved_layers_stall_longer_and_wait_for_the_grid_as_long_as_ours():
    stalls = MovedLayers(Stalls(exit=1.0, wait=5.0)).stalls
    assert (stalls.exit, stalls.wait) == (2.0, 5.0)


def test_layers_move_only_where_that_is_faster():
    assert rate(MovedLayers(QUIET), ONE) >= rate(WithoutMoves(QUIET), ONE)


def test_a_policy_that_is_none_is_named():
    with pytest.raises(TraceError, match="'nothing'.*ours"):
        makers(["ours", "nothing"], QUIET)
    assert [*makers(ORDER[::-1], QUIET)] == [*ORDER]


def test_a_unit_takes_its_old_place_if_it_can():
    slots = Slots({Worker(0, 0): Unit(0, 0), Worker(0, 1): Unit(1, 0)}, [Unit(2, 0)])
    assert slots.lose([Unit(0, 0)]) == [Worker(0, 0)]
    assert slots.fill([Worker(0, 0)]) == {Worker(0, 0): Unit(2, 0)}
    slots.gain([Unit(0, 0)])
    assert slots.fill([]) == {} and [*slots.spare] == [Unit(0, 0)]
    slots.lose([Unit(1, 0), Unit(2, 0)])
    assert slots.fill([Worker(0, 1), Worker(0, 0)]) == {Worker(0, 0): Unit(0, 0)}
