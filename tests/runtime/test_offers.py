"""When a worker takes what the coordinator offers: two iterations after all have promised, and not before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recycle.membership.promises import Promises
from megatron_recycle.membership.protocol import Offer
from megatron_recycle.plan import Costs, Grid, Problem
from megatron_recycle.planner import quick
from tests.membership.paper import GUESS, Paper, verdict
from tests.seeds import examples


def test_a_plan_is_taken_two_iterations_after_the_promise_and_once():
    plan = quick(Problem(Grid(2, (2, 2)), Costs.parse("1,1,1", 2)))
    promises = Promises(1)
    assert promises.promise(4, None) == 0
    assert promises.promise(4, Offer(2, 3, plan.to_file())) == 0, "of another generation"
    offer = Offer(1, 3, plan.to_file())
    assert promises.promise(5, offer) == 3
    assert promises.plan_from(9) is None, "nobody has said that all have promised"
    promises.agreed(5)
    assert promises.plan_from(6) is None
    taken = promises.plan_from(7)
    assert taken is not None and taken.digest == plan.digest
    assert promises.plan_from(7) is None and promises.promise(7, offer) == 0 and not promises.ends_before(9)


def test_a_switch_ends_the_generation_two_iterations_later():
    promises = Promises(1)
    assert promises.promise(5, Offer(1, 1, None)) == 1
    promises.agreed(5)
    assert not promises.ends_before(6) and promises.ends_before(7)


# ---- all workers follow the same plan, whenever each of them learns what


PLANS = [quick(Problem(Grid(2, (2, 2)), Costs.parse(f"{forward},1,1", 2))) for forward in range(1, 6)]


class Member(Paper):
    """What decides about one worker's plans: it begins an iteration once it has stepped the last one, holds it once the
    last one's verdict is known, and learns a verdict at any time between that all hold the iteration and its next
    hold."""

    def __init__(self) -> None:
        super().__init__("0:0", staggered=True)
        self.offer: Offer | None = None
        self.enter_generation(1, 0, PLANS[0].digest)

    def enter_generation(self, generation: int, iteration: int, digest: str) -> None:
        """A generation begins."""
        self.standing.join(generation)
        self.standing.stand_at(iteration)
        self.standing.next_attempt = 1
        self.digest = digest
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
        standing = member.standing
        all_hold = standing.held is not None and all(standing.held in other.promises for other in self.members)
        same_handles = {other.standing.epoch for other in self.members} == {standing.epoch}
        if what == "offer":
            self.number, self.plan = self.number + 1, (self.plan + 1) % len(PLANS)
        elif what == "hear" and self.number:
            member.offer = Offer(self.generation, self.number, PLANS[self.plan].to_file())
        elif what == "wrong":
            self.wrong.add(standing.stepped + 1)
        elif what == "begin" and standing.may_begin and same_handles:
            self._begin(member)
        elif what == "hold" and standing.may_reduce and same_handles:
            member.promises[standing.iteration] = standing.promises.promise(standing.iteration, member.offer)
            member.hold(standing.iteration)
        elif what == "learn" and all_hold:
            self._learn(member)
        elif what == "fail":
            self._fail()
        else:
            return False
        return True

    def _begin(self, member: Member) -> None:
        standing = member.standing
        while plan := standing.promises.plan_from(standing.stepped + 1):
            member.digest = plan.digest
        standing.begin(standing.stepped + 1)
        key = standing.epoch.generation, standing.iteration, standing.attempt
        self.used.setdefault(key, set()).add(member.digest)

    def _learn(self, member: Member) -> None:
        iteration = member.standing.held
        assert iteration is not None
        promised = {other.promises[iteration] for other in self.members}
        wrong = member.settle(verdict(iteration, 0.5 if iteration in self.wrong else GUESS))
        if len(promised) == 1 and promised != {0}:
            member.standing.promises.agreed(iteration)
        if wrong:
            # What it has of the next iteration is void; nobody goes on before all have new handles.
            member.standing.roll_back()
            member.standing.renew()

    def _fail(self) -> None:
        """Another generation begins after what all hold, with the last plan that was offered, and a new worker."""
        first = min(member.standing.stepped for member in self.members) + 1
        self.generation, self.number = self.generation + 1, 0
        self.members[0] = Member()
        for member in self.members:
            member.enter_generation(self.generation, first, PLANS[self.plan].digest)


ORDERS = {"eager": ("learn", "hold", "begin"), "lazy": ("begin", "hold", "learn")}
"""What a worker does next, of what it can: it hears of a verdict early, or as late as it may."""


@settings(max_examples=examples(150), deadline=None)
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
