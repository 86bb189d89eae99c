"""The rounds in which pairs of workers meet for the first time."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from megatron_recycle.plan import Costs, Grid, Problem, Worker, channels, pair_of, pairs, rounds, tied_pairs
from megatron_recycle.planner import quick

NODES = draw.integers(0, 11)
ANY = draw.sets(draw.tuples(NODES, NODES).filter(lambda pair: pair[0] < pair[1]))
OF_TWO_KINDS = draw.sets(draw.tuples(NODES, NODES.map(lambda node: 100 + node)))


def busiest(found: set[tuple[int, int]]) -> int:
    return max(Counter(node for pair in found for node in pair).values(), default=0)


@given(ANY | OF_TWO_KINDS)
def test_each_pair_meets_once_and_nobody_has_two_partners_in_a_round(found):
    made = rounds(found)
    assert sorted(pair for each in made for pair in each) == sorted(found)
    assert all(busiest(set(each)) == 1 for each in made)
    assert made == rounds(sorted(found, reverse=True)), "whoever asks"
    assert len(made) <= max(2 * busiest(found) - 1, 0)


@given(OF_TWO_KINDS)
def test_between_two_kinds_there_are_as_many_rounds_as_the_busiest_has_partners(found):
    assert len(rounds(found)) == busiest(found)


@given(ANY | OF_TWO_KINDS)
def test_who_stands_at_a_pair_until_its_partner_comes_is_never_left_there(found):
    """Each goes through its own pairs in the order of the rounds, and both have to be there."""
    order = [pair for each in rounds(found) for pair in each]
    left = {node: [pair for pair in order if node in pair] for pair in order for node in pair}
    steps = 0
    while any(left.values()):
        met = [pair for pair in found if all(left[node] and left[node][0] == pair for node in pair)]
        assert met, left
        for pair in met:
            for node in pair:
                left[node].pop(0)
        steps += 1
    assert steps <= len(rounds(found)), "those of a round do not wait for each other"


@pytest.mark.parametrize("peers", [2, 3, 5, 8, 33])
def test_peers_who_all_meet_each_other_need_few_rounds_more_than_each_has_peers(peers):
    assert len(rounds(list(combinations(range(peers), 2)))) <= 1.2 * peers


@pytest.mark.parametrize("failed", [(), (Worker(1, 1),), (Worker(1, 1), Worker(2, 0)), (Worker(0, 2), Worker(1, 2))])
def test_a_plans_pairs_need_as_many_rounds_as_its_busiest_worker_has_partners(failed):
    plan = quick(Problem(Grid(3, (4, 4, 4)), Costs.uniform(3, 20, 22, 18), failed))
    found = pairs(plan)
    assert {pair_of(*pair) for pair in channels(plan)} == found
    assert len(rounds(found)) == busiest(set(found)) >= 2


def test_tied_stages_give_each_other_by_turns():
    plan = quick(Problem(Grid(3, (2, 2, 2)), Costs.uniform(3, 20, 22, 18), (Worker(1, 2),), tied=((0, 2),)))
    given_to = {(Worker(0, 0), Worker(0, 2)), (Worker(1, 0), Worker(2, 2)), (Worker(0, 2), Worker(2, 0))}
    assert tied_pairs(plan) == given_to
    assert tied_pairs(quick(Problem(Grid(3, (2, 2, 2)), Costs.uniform(3, 20, 22, 18)))) == frozenset()
