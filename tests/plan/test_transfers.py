"""No legal plan can deadlock where communicators run their operations one after the other, as NCCL's do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recycle.plan import Costs, Grid, Message, Plan, Problem, Worker, channels, postings, reads, transfers
from megatron_recycle.planner import quick
from tests.plan.queues import Queues, Rules
from tests.planner.problems import problems
from tests.seeds import by_day

RULES = [Rules(cut=cut, connected=connected, host_waits=host, buffered=buffered, exact=exact)
         for cut in ("all", "pair", "direction") for connected in (True, False) for host in (False, True)
         for buffered in (False, True) for exact in (False, True)]


def plan_of(pipelines: int, stages: int, microbatches: int, failed: tuple[Worker, ...] = ()) -> Plan:
    return quick(Problem(Grid(stages, (microbatches,) * pipelines), Costs.uniform(stages, 1, 1, 1), failed))


def small_plans(pipelines: int, stages: int, microbatches: int, most: int) -> Iterator[Plan]:
    """With every so many failures at most."""
    workers = [Worker(d, s) for d in range(pipelines) for s in range(stages)]
    for failed in itertools.chain.from_iterable(itertools.combinations(workers, n) for n in range(most + 1)):
        if all(sum(worker.stage == s for worker in failed) < pipelines for s in range(stages)):
            yield plan_of(pipelines, stages, microbatches, failed)


EVERY = [Rules(exact=True), *(pytest.param(rules, marks=pytest.mark.night) for rules in (
    RULES[0], RULES[-1], Rules(cut="pair", connected=False)))]


@pytest.mark.parametrize("rules", EVERY, ids=str)
@pytest.mark.parametrize("grid", by_day(3, [(2, 2, 4, 1), (3, 2, 4, 2), (2, 3, 4, 1), (3, 4, 6, 1)]), ids=str)
def test_every_plan_of_small_grids_comes_to_its_end(grid: tuple[int, int, int, int], rules: Rules):
    for plan in small_plans(*grid):
        assert not (stuck := Queues(plan, rules).stuck()), "\n".join([str(plan.problem.failed), *stuck])


@pytest.mark.parametrize("rules", EVERY, ids=str)
@pytest.mark.parametrize("grid", by_day(2, [(3, 4, 6, 2), (4, 4, 8, 3), (6, 4, 8, 3), (8, 8, 16, 3)]), ids=str)
def test_a_plan_of_a_larger_grid_comes_to_its_end(grid: tuple[int, int, int, int], rules: Rules):
    pipelines, stages, microbatches, count = grid
    workers = [Worker(d, s) for d in range(pipelines) for s in range(stages)]
    failed = sorted(random.Random(1).sample(workers, count))
    stuck = Queues(plan_of(pipelines, stages, microbatches, tuple(failed)), rules).stuck()
    assert not stuck, "\n".join([str(failed), *stuck])


@pytest.mark.parametrize("cut", ["all", "pair"])
def test_what_is_posted_ahead_without_an_order_hangs(cut: str):
    """1F1B of two stages: the first has posted a gradient's receive before the activation that the second waits for."""
    assert Queues(plan_of(2, 2, 4), Rules(order="ahead", cut=cut)).stuck()


def test_a_queue_per_direction_does_not_help_where_first_uses_block():
    """Stock pipelines use two: it is enough once everything is connected, so it would look right in a small trial."""
    apart = Rules(order="ahead", cut="direction")
    assert not Queues(plan_of(4, 4, 8), apart).stuck()
    assert Queues(plan_of(4, 4, 8), replace(apart, connected=False)).stuck()


@settings(deadline=None)
@given(problem=problems(), rules=st.sampled_from(RULES))
def test_transfers_of_any_plan_come_to_their_end_under_every_rule(problem: Problem, rules: Rules):
    """Also where durations are 0, so that many actions end at once."""
    assert not (stuck := Queues(quick(problem), rules).stuck()), "\n".join(stuck)


@given(problem=problems())
def test_the_order_holds_every_message_once_and_each_workers_own_order(problem: Problem):
    plan = quick(problem)
    order = transfers(plan)
    assert sorted((source, target, message) for source, target, message in order) == sorted(
        (source, target, message) for (source, target), messages in channels(plan).items() for message in messages)
    place = {each: number for number, each in enumerate(order)}
    for me in plan.workers:
        sends = [each for each in postings(order, me) if each.source == me]
        assert [each.message for each in sends] == [
            message for message in _made(plan, me) if message in {each.message for each in sends}]
        for source, message in reads(plan, me):
            answer = next((each for each in sends if each.message == message), None)
            assert answer is None or place[source, me, message] < place[answer]


def _made(plan: Plan, me: Worker) -> list[Message]:
    return [Message("F" if kind == "F" else "B", d, m) for kind, d, m, _ in plan.actions(me)
            if kind in ("F", "B", "FB")]
