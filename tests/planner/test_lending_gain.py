"""Lending is decided by its gain until the membership changes, against what copying costs, and one line says so."""

from __future__ import annotations

import functools
from dataclasses import replace

from megatron_recycle.plan import Plan, Worker, borrowings
from megatron_recycle.planner import quick
from megatron_recycle.planner.lending_gain import CopyPrice, worth
from megatron_recycle.planner.terminal import table
from tests.planner.test_crossing_flow import job

PROBLEM = job(3, 4, 6, [(1, 2)])
PRICE = CopyPrice((8 << 20,) * 4, bandwidth=1e9, horizon=100, unit=2.5e-4)  # a unit of the benchmark is 1 ms


@functools.cache
def lent() -> Plan:
    return quick(PROBLEM)


@functools.cache
def rerouted() -> Plan:
    return quick(replace(PROBLEM, lend=()))


def test_it_pays_where_the_horizon_is_long_enough():
    found = worth(rerouted(), lent(), PRICE)
    copies = sum(count for held in borrowings(lent()).values() for count in held.values())
    assert found.pays and found.copied == copies * 8 << 20
    assert 0 < found.copying < found.copied / 1e9  # workers copy at the same time
    assert abs(found.gain - (rerouted().period - lent().period) * 2.5e-4) < 1e-9
    assert found.line == f"lends up to 2 layers at boundaries 1-2 and 2-3: 552 -> 448 ms; copies {copies * 8} MiB"
    assert worth(rerouted(), lent(), replace(PRICE, horizon=found.copying / found.gain * 1.01)).pays
    short = worth(rerouted(), lent(), replace(PRICE, horizon=found.copying / found.gain * 0.99))
    assert not short.pays and short.line.startswith("does not lend up to 2 layers") and "iterations" in short.line


def test_what_helpers_have_is_not_copied_again():
    found = worth(rerouted(), lent(), replace(PRICE, horizon=1e-9), borrowings(lent()))
    assert found.pays and found.copied == 0 and found.copying == 0
    helper, held = next(iter(borrowings(lent()).items()))
    assert worth(rerouted(), lent(), PRICE, {helper: held}).copied == worth(rerouted(), lent(), PRICE).copied - sum(
        held.values()) * (8 << 20)


def test_nothing_is_lent_when_all_are_back_or_nothing_may_be():
    whole = quick(replace(PROBLEM, failed=()))
    assert not whole.crossings, "a rejoin takes lending back"
    assert worth(whole, whole, PRICE).line == "does not lend: no lent layer shortens an iteration"
    assert worth(rerouted(), rerouted(), PRICE).line == "does not lend: no layers may be lent"


def test_the_peers_of_a_hurt_stage_share_the_sending():
    alone = job(3, 4, 6, [(0, 2), (1, 2)])
    plan, rerouted = quick(alone), quick(replace(alone, lend=()))
    found = worth(rerouted, plan, PRICE)
    of_it = sum(count for held in borrowings(plan).values() for (chunk, _), count in held.items() if chunk == 2)
    assert found.pays and found.copying >= of_it * (8 << 20) / 1e9  # one worker sends all copies of stage 2
    assert Worker(2, 2) in plan.workers


def test_the_table_of_a_plan_says_what_it_lends():
    assert "up to 2 layers at boundaries 1-2 and 2-3, for" in table(lent(), {})
    assert "boundaries" not in table(rerouted(), {})
