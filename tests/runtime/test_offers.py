"""When a worker takes what the coordinator offers: two iterations after all have promised, and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_recycle.membership import Offer
from megatron_recycle.plan import Costs, Grid, Problem
from megatron_recycle.planner import quick
from megatron_recycle.runtime.offers import Offers


def test_a_plan_is_taken_two_iterations_after_the_promise_and_once():
    plan = quick(Problem(Grid(2, (2, 2)), Costs.parse("1,1,1", 2)))
    agent: Any = SimpleNamespace(offer=None)
    offers = Offers(agent)
    assert offers.promise(1) == 0
    agent.offer = Offer(1, 3, plan.to_json())
    assert offers.promise(2) == 0, "of another generation"
    assert offers.promise(1) == 3
    assert offers.plan_from(9) is None, "nobody has said that all have promised"
    offers.agreed(5)
    assert offers.plan_from(6) is None
    taken = offers.plan_from(7)
    assert taken is not None and taken.digest == plan.digest
    assert offers.plan_from(7) is None and offers.promise(1) == 0 and not offers.ends_before(9)


def test_a_switch_ends_the_generation_two_iterations_later_unless_a_failure_ends_it_first():
    agent: Any = SimpleNamespace(offer=Offer(1, 1, None))
    offers = Offers(agent)
    assert offers.promise(1) == 1
    offers.agreed(5)
    assert not offers.ends_before(6) and offers.ends_before(7)
    offers.forget()
    assert not offers.ends_before(7)
