"""Pairs of workers that send to each other, and the rounds in which they connect.

A library may connect two workers at their first transfer, and block both meanwhile (NCCL). In one round every worker
has one partner at most, and all workers go through the rounds in the same order: of the pairs that have not met, the
first is next for both of its workers. So no wait cycle can arise, and pairs of one round do not wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

from megatron_recycle.plan.messages import channels

from .crossings import lent
from .grid import Worker
from .plan import Plan

Pair = tuple[Worker, Worker]
Node = TypeVar("Node", bound=Any)


def pair_of(one: Node, other: Node) -> tuple[Node, Node]:
    """The two in ascending order: a pair has one name."""
    return (one, other) if one < other else (other, one)


def pairs(plan: Plan) -> frozenset[Pair]:
    """Pairs that send each other activations and gradients, or copies and sums of lent layers, in an iteration of
    ``plan``."""
    neighbours = frozenset(pair_of(*pair) for pair, messages in channels(plan).items() if messages)
    return neighbours | {pair_of(each.helper, each.principal) for each in lent(plan)}


def tied_givers(mine: Sequence[Worker], theirs: Sequence[Worker]) -> dict[Worker, Worker]:
    """Sender of a tied parameter's gradient for each of ``theirs``: one of the live workers ``mine`` of another stage,
    by turns, both stages in ascending order."""
    return {receiver: mine[place % len(mine)] for place, receiver in enumerate(theirs)}


def tied_pairs(plan: Plan) -> frozenset[Pair]:
    """Pairs that send each other tied parameters' gradients."""
    problem = plan.problem
    return frozenset(pair_of(*pair) for tied in problem.tied
                     for one, other in combinations(sorted({problem.stage_of(chunk) for chunk in tied}), 2)
                     for mine, theirs in ((one, other), (other, one))
                     for pair in tied_givers(problem.live(mine), problem.live(theirs)).items())


def rounds(pairs: Collection[tuple[Node, Node]]) -> list[list[tuple[Node, Node]]]:
    """Edge colouring: ``pairs``, each once, in rounds in which no node has two partners; the same for all callers.

    As many rounds as the busiest node has partners if the graph is bipartite, as neighbouring stages are (König's
    theorem); otherwise few more, and fewer than twice as many.
    """
    colours: dict[Node, dict[int, Node]] = defaultdict(dict)
    """For each node its partner in each round."""
    degree: dict[Node, int] = defaultdict(int)
    for pair in pairs:
        for node in pair:
            degree[node] += 1
    count = max(degree.values(), default=0)
    for one, other in sorted(pairs):
        free = _free(colours, one, other, count)
        if free is None:
            free, count = count, count + 1
        colours[one][free], colours[other][free] = other, one
    return [sorted(pair_of(*pair) for pair in {frozenset((node, partners[number]))
                                               for node, partners in colours.items() if number in partners})
            for number in range(count)]


def _free(colours: dict[Node, dict[int, Node]], one: Node, other: Node, count: int) -> int | None:
    """A round below ``count`` in which neither of the two has a partner, if need be after other pairs have changed
    rounds; None if there is none."""
    ours = [number for number in range(count) if number not in colours[one]]
    theirs = [number for number in range(count) if number not in colours[other]]
    for number in ours:
        if number in theirs:
            return number
    for mine in ours:
        for their in theirs:
            # Swap the two rounds along the alternating path that begins with ``other``.
            path = _turns(colours, other, mine, their)
            if path[-1] != one:
                _swap(colours, path, mine, their)
                return mine
    return None


def _turns(colours: dict[Node, dict[int, Node]], start: Node, first: int, second: int) -> list[Node]:
    """Alternating path from ``start``: its partner in round ``first``, the partner's in round ``second``, and so on."""
    path, number = [start], first
    while number in colours[path[-1]]:
        path.append(colours[path[-1]][number])
        number = second if number == first else first
    return path


def _swap(colours: dict[Node, dict[int, Node]], path: Iterable[Node], first: int, second: int) -> None:
    for node in path:
        partners = {number: colours[node].pop(number) for number in (first, second) if number in colours[node]}
        colours[node].update({second if number == first else first: partner for number, partner in partners.items()})
