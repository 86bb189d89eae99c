"""When a worker takes what the coordinator offers: two iterations after all have promised, and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recycle.control import Offer
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


# ---- all workers follow the same plan, whenever each of them learns what


PLANS = [quick(Problem(Grid(2, (2, 2)), Costs.parse(f"{forward},1,1", 2))) for forward in range(1, 6)]


class Member:
    """What decides about one worker's plans: it begins an iteration once it holds the last one, holds it once the last
    one's verdict is known, and learns a verdict at any time between that all hold the iteration and its next hold."""

    def __init__(self) -> None:
        self.agent: Any = SimpleNamespace(offer=None)
        self.offers = Offers(self.agent)
        self.enter(0, PLANS[0].digest)

    def enter(self, iteration: int, digest: str) -> None:
        """A generation begins."""
        self.offers.forget()
        self.digest, self.iteration, self.known = digest, iteration, iteration - 1
        self.attempt, self.rolled, self.began = 1, 0, False
        self.promises: dict[int, int] = {}


class Training:
    """Workers that begin, hold and learn in any order, offers that reach each at another moment, verdicts that void the
    next iteration, and failures."""

    def __init__(self, workers: int) -> None:
        self.members = [Member() for _ in range(workers)]
        self.generation, self.number, self.plan = 1, 0, 0
        self.wrong: set[int] = set()
        self.used: dict[tuple[int, int, int], set[str]] = {}

    def step(self, who: int, what: str) -> bool:
        """Worker ``who`` does ``what``, if it can; whether it could."""
        member = self.members[who % len(self.members)]
        all_hold = all(member.known + 1 in other.promises for other in self.members)
        same_handles = {other.rolled for other in self.members} == {member.rolled}
        if what == "offer":
            self.number, self.plan = self.number + 1, (self.plan + 1) % len(PLANS)
        elif what == "hear" and self.number:
            member.agent.offer = Offer(self.generation, self.number, PLANS[self.plan].to_json())
        elif what == "wrong":
            self.wrong.add(member.iteration)
        elif what == "begin" and not member.began and same_handles:
            self._begin(member)
        elif what == "hold" and member.began and same_handles and member.known == member.iteration - 1:
            member.promises[member.iteration] = member.offers.promise(self.generation)
            member.iteration, member.attempt, member.began = member.iteration + 1, 1, False
        elif what == "learn" and all_hold:
            self._learn(member)
        elif what == "fail":
            self._fail()
        else:
            return False
        return True

    def _begin(self, member: Member) -> None:
        while plan := member.offers.plan_from(member.iteration):
            member.digest = plan.digest
        member.began = True
        key = self.generation, member.iteration, member.attempt
        self.used.setdefault(key, set()).add(member.digest)

    def _learn(self, member: Member) -> None:
        member.known += 1
        promised = {other.promises[member.known] for other in self.members}
        if len(promised) == 1 and promised != {0}:
            member.offers.agreed(member.known)
        if member.known in self.wrong:
            # What it has of the next iteration is void; nobody goes on before all have new handles.
            member.rolled, member.attempt, member.began = member.rolled + 1, member.attempt + 1, False

    def _fail(self) -> None:
        """Another generation begins after what all hold, with the last plan that was offered, and a new worker."""
        first = min(member.iteration for member in self.members)
        self.generation, self.number = self.generation + 1, 0
        self.members[0] = Member()
        for member in self.members:
            member.enter(first, PLANS[self.plan].digest)


ORDERS = {"eager": ("learn", "hold", "begin"), "lazy": ("begin", "hold", "learn")}
"""What a worker does next, of what it can: it hears of a verdict early, or as late as it may."""


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 3), st.lists(st.tuples(st.integers(0, 2), st.sampled_from(
    ["eager"] * 8 + ["lazy"] * 8 + ["offer", "offer", "hear", "wrong", "fail"])), min_size=40, max_size=120))
def test_all_workers_follow_the_same_plan_in_every_attempt(workers, steps):
    training = Training(workers)
    for who, what in steps:
        if what in ORDERS:
            next(filter(None, (training.step(who, each) for each in ORDERS[what])), None)
            continue
        training.step(who, what)
        for other in range(workers) if what == "offer" else [who]:
            # All hear of most offers at once, of some only one does.
            if who or other:
                training.step(other, "hear")
    assert all(len(plans) == 1 for plans in training.used.values()), training.used


def test_a_plan_agreed_upon_is_taken_by_who_had_not_begun_when_the_verdict_before_was_wrong():
    """Two plans are agreed upon in a row, with the verdicts on 0 and 1; that on 1 voids what some have of 2."""
    training = Training(2)

    def both(*what: str) -> None:
        for each in what:
            for who in range(2):
                training.step(who, each)

    training.wrong.add(1)
    training.step(0, "offer")
    both("hear", "begin", "hold", "begin", "learn")
    training.step(0, "offer")
    both("hear", "hold")
    training.step(0, "begin")  # iteration 2, with the first plan
    both("learn", "begin", "hold", "learn", "begin")
    assert training.used[1, 2, 1] == training.used[1, 2, 2] == {PLANS[1].digest}
    assert training.used[1, 3, 1] == {PLANS[2].digest}
