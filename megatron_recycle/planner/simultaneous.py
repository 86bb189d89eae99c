"""One order for actions that times alone leave open: actions without duration, and others that begin with them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from .instance import Instance, needed


def trace_of(instance: Instance, route: Sequence[int], starts: Mapping[int, int]) -> list[int] | None:
    """A trace in which actions begin in the order of ``starts`` (by code), and no worker holds more than its cap.

    A model of times takes a micro-batch whose F, B and W fall together for one that needs no memory. So where several
    actions begin at once, a worker first frees memory, then runs the micro-batches that come and leave at that time,
    one after the other, then takes those that stay. None: no order was found in which they fit.
    """
    at: dict[int, list[int]] = defaultdict(list)
    for code, start in starts.items():
        at[start].append(code)
    board = _Board(instance, route, starts)
    if not all(board.place(at[start]) for start in sorted(at)):
        return None
    return board.trace


class _Board:
    """Placed actions, and the memory that each worker has left after them."""

    def __init__(self, instance: Instance, route: Sequence[int], starts: Mapping[int, int]) -> None:
        self.trace: list[int] = []
        self._instance, self._route = instance, route
        self._count, self._nodes = len(instance.jobs), len(route)
        self._done: set[int] = set()
        self._room = list(instance.cap)
        lengths = instance.lengths(route)
        self._long = {code for code in starts if lengths[code // self._nodes][code % self._nodes]}
        last = 2 if instance.problem.split_backward else 1
        self._first, self._then = instance.held(route)
        self._passes = {node for node in range(self._nodes) if starts[node] == starts[last * self._nodes + node]
                        and not self._long & {kind * self._nodes + node for kind in range(last + 1)}}

    def place(self, codes: Sequence[int]) -> bool:
        """Place all ``codes``, which begin at one time; returns whether they fit."""
        left = set(codes)
        short = Counter(self._worker(code) for code in codes if code not in self._long)
        passing = Counter(self._worker(code) for code in codes if code < self._nodes and code in self._passes)
        before = self._before(codes)

        def may(code: int) -> bool:
            needs, w = needed(code, self._count, self._nodes), self._worker(code)
            return ((needs < 0 or needs in self._done) and before.get(code) not in left
                    and self._takes(code) <= max(0, self._room[w])
                    and not (code in self._long and short[w]))  # an action without duration is over when it begins

        def turn(code: int) -> tuple[bool, bool, bool, int, int]:
            kind, node = divmod(code, self._nodes)
            if kind:
                return False, False, False, -kind, node
            stays = node not in self._passes
            return True, stays and passing[self._worker(code)] > 0, stays, -(node // self._count), node

        while left:
            code = min(filter(may, left), key=turn, default=-1)
            if code < 0:
                return False
            w = self._worker(code)
            left.discard(code)
            self._done.add(code)
            self.trace.append(code)
            self._room[w] -= self._takes(code)
            short[w] -= code not in self._long
            passing[w] -= code in self._passes
        return True

    def _worker(self, code: int) -> int:
        return self._route[code % self._nodes]

    def _takes(self, code: int) -> int:
        """Units of memory that the action takes (negative: frees)."""
        before, after = self._first[code % self._nodes], self._then[code % self._nodes]
        return (before, after - before, -after)[code // self._nodes]

    def _before(self, codes: Sequence[int]) -> dict[int, int]:
        """For each of ``codes``, if any, its direct predecessor among them by the rule of order."""
        if not self._instance.ordered:
            return {}
        rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for code in sorted(codes):
            job = self._instance.jobs[code % self._count]
            rows[code // self._nodes, self._worker(code), job[0]].append(code)
        return {then: first for row in rows.values() for first, then in pairwise(row)}
