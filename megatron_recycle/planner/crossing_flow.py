"""Which layers are lent where: how far from home each micro-batch crosses each boundary, so that loads are level.

Two workers that run the same micro-batches on neighbouring chunks may share the layers between them. So excess work
flows from worker to worker, in cascade over the stages, to a worker with time to spare. Only amounts between pairs of
workers flow (`levelled`); afterwards each pair deals its amount to its micro-batches (`_dealt`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Crossings = tuple[tuple[int, ...], ...]
"""``crossings[c][j]``: layers later (+) or earlier (-) than at home that job ``j`` crosses boundary ``c``."""

#: sort orders by which a pair picks the micro-batches that cross first
ORDERS: dict[str, Callable[[int, int], float]] = {
    "middle": lambda m, last: abs(2 * m - last),
    "late": lambda m, last: -m,
    "early": lambda m, last: m,
    "even": lambda m, last: int(f"{m:012b}"[::-1], 2),
}


@dataclass(frozen=True)
class Lendable:
    """Lending limits of a route, as numbers.

    ``who[c][j]``: worker of chunk ``c`` of job ``j``. ``units``: jobs that cross alike (one each, or blocks), each with
    its micro-batch number in ``place``. ``layers[c]``: layers of chunk ``c`` that are alike. ``limit[c]``: most layers
    (earlier, later) that boundary ``c`` may move. ``home[c][w]``, ``layer[c][w]``: time of the whole chunk and of one
    layer on worker ``w``. ``room[w]``: layers of neighbours' chunks that worker ``w`` has memory for, per boundary.
    """

    who: Sequence[Sequence[int]]
    units: Sequence[tuple[int, ...]]
    place: Sequence[int]
    layers: Sequence[int]
    limit: Sequence[tuple[int, int]]
    home: Sequence[Sequence[int]]
    layer: Sequence[Sequence[int]]
    room: Sequence[int]

    def loads(self, crossings: Crossings) -> list[int]:
        """Compute time of each worker in an iteration."""
        load = [0] * len(self.room)
        for c, row in enumerate(self.who):
            for w in row:
                load[w] += self.home[c][w]
        for c, shifts in enumerate(crossings):
            for j, shift in enumerate(shifts):
                if shift:
                    chunk = c + 1 if shift > 0 else c
                    load[self.who[c][j]] += self.layer[chunk][self.who[c][j]] * shift
                    load[self.who[c + 1][j]] -= self.layer[chunk][self.who[c + 1][j]] * shift
        return load


@dataclass
class _Pair:
    """Two workers that share ``units`` at boundary ``c``; ``net``: layers times units by which they cross later."""

    c: int
    before: int
    after: int
    units: list[int]
    low: int
    high: int
    net: int = 0

    def gives(self, later: bool) -> tuple[int, int]:
        """The chunk, and its worker, whose layers change hands where micro-batches cross later (or earlier)."""
        return (self.c + 1, self.after) if later else (self.c, self.before)


class Flow:
    """Excess work on its way through pairs of workers; made once per route, used for many targets."""

    def __init__(self, lendable: Lendable) -> None:
        self.lendable = lendable
        self.size = max(map(len, lendable.units), default=1)
        shared: dict[tuple[int, int, int], list[int]] = {}
        for c in range(len(lendable.who) - 1):
            if any(lendable.limit[c]):
                for u, unit in enumerate(lendable.units):
                    a, b = lendable.who[c][unit[0]], lendable.who[c + 1][unit[0]]
                    if a != b:
                        shared.setdefault((c, a, b), []).append(u)
        self.pairs = []
        self.most = {(c, w): 0 for c, row in enumerate(lendable.who) for w in row}  # layers that a worker may give
        for unit in lendable.units:
            for c, row in enumerate(lendable.who):
                self.most[c, row[unit[0]]] += lendable.layers[c] - 1
        for (c, a, b), units in shared.items():
            earlier, later = lendable.limit[c]
            # a chunk keeps a layer of each micro-batch
            low = min(earlier, lendable.room[b], lendable.layers[c] - 1)
            high = min(later, lendable.room[a], lendable.layers[c + 1] - 1)
            if max(low, high) > 0:
                self.pairs.append(_Pair(c, a, b, units, -max(0, low) * len(units), max(0, high) * len(units)))
        self.arcs: list[list[tuple[int, _Pair, bool]]] = [[] for _ in lendable.room]
        for pair in self.pairs:  # work leaves ``after`` where micro-batches cross later
            self.arcs[pair.after].append((pair.before, pair, True))
            self.arcs[pair.before].append((pair.after, pair, False))
        self.base = lendable.loads(())

    def levelled(self, most: Sequence[float]) -> bool:
        """Move work until no worker's load is above ``most``; False if some load remains above."""
        for pair in self.pairs:
            pair.net = 0
        self.spare = dict(self.most)
        load = self.load = list(self.base)
        stuck: set[int] = set()
        while True:
            over = [w for w in range(len(load)) if load[w] > most[w] and w not in stuck]
            if not over:
                return not stuck
            source = max(over, key=lambda w: (load[w] - most[w], -w))
            path = self._path(source, most)
            if path is None:
                stuck.add(source)
                continue
            self._send(path, source, most)

    def _path(self, source: int, most: Sequence[float]) -> list[tuple[int, _Pair, bool]] | None:
        """A shortest path from an overloaded worker to a worker that can take a layer of a unit."""
        came: dict[int, tuple[int, _Pair, bool]] = {}
        queue = deque([source])
        while queue:
            u = queue.popleft()
            for v, pair, later in self.arcs[u]:
                if v in came or v == source or self._can(pair, later) <= 0:
                    continue
                came[v] = (u, pair, later)
                if self.load[v] + self._layer(pair, later, v) * self.size <= most[v]:
                    path = []
                    while v != source:
                        u, pair, later = came[v]
                        path.append((v, pair, later))
                        v = u
                    return path[::-1]
                queue.append(v)
        return None

    def _can(self, pair: _Pair, later: bool) -> int:
        """How much more may cross later (or earlier), of one chunk: a pair first takes back its loans, and each chunk
        of a micro-batch keeps a layer."""
        if later:
            return -pair.net if pair.net < 0 else min(pair.high - pair.net, self.spare[pair.gives(later)])
        return pair.net if pair.net > 0 else min(pair.net - pair.low, self.spare[pair.gives(later)])

    def _layer(self, pair: _Pair, later: bool, w: int) -> int:
        """Time on worker ``w`` of the next layer that changes hands."""
        chunk = pair.c + 1 if (pair.net >= 0 if later else pair.net > 0) else pair.c
        return self.lendable.layer[chunk][w]

    def _send(self, path: list[tuple[int, _Pair, bool]], source: int, most: Sequence[float]) -> None:
        """Send as much as the path, the need and the last worker's time allow; at least a layer of a unit."""
        load, size = self.load, self.size
        amount = min(self._can(pair, later) for _, pair, later in path)
        _, first, first_later = path[0]
        end, last, last_later = path[-1]
        need = -(-(load[source] - most[source]) // max(1, self._layer(first, first_later, source) * size))
        takes = (most[end] - load[end]) // max(1, self._layer(last, last_later, end) * size)
        amount = max(1, min(amount, int(need), int(takes)))
        giver = source
        for v, pair, later in path:
            load[giver] -= self._layer(pair, later, giver) * size * amount
            load[v] += self._layer(pair, later, v) * size * amount
            back = pair.net < 0 if later else pair.net > 0
            self.spare[pair.gives(later != back)] += amount if back else -amount
            pair.net += amount if later else -amount
            giver = v

    def crossings(self, order: str, spread: bool) -> Crossings:
        """The crossings of each job: every pair's amount dealt to its units, the first ones of ``order`` first.

        ``spread``: all cross by one layer before any crosses by two; else as far as may be, one after the other. The
        part that a chunk of a micro-batch cannot give, as it must keep a layer, stays at home.
        """
        lendable = self.lendable
        jobs = len(lendable.who[0])
        crossings = [[0] * jobs for _ in range(len(lendable.who) - 1)]
        spare = [[n - 1] * len(lendable.units) for n in lendable.layers]  # layers that a chunk of a unit can yet give
        last = max(lendable.place, default=0)
        for pair in self.pairs:
            if not pair.net:
                continue
            sign = 1 if pair.net > 0 else -1
            chunk = pair.c + 1 if sign > 0 else pair.c
            cap = (pair.high if sign > 0 else -pair.low) // len(pair.units)
            ranked = sorted(pair.units, key=lambda u: (ORDERS[order](lendable.place[u], last), u))
            for u, share in zip(ranked, _dealt(abs(pair.net), [min(cap, spare[chunk][u]) for u in ranked], spread)):
                spare[chunk][u] -= share
                for j in lendable.units[u]:
                    crossings[pair.c][j] = sign * share
        return tuple(map(tuple, crossings))


def _dealt(amount: int, caps: Sequence[int], spread: bool) -> list[int]:
    """``amount`` dealt to as many units as there are caps, in their order."""
    shares = [0] * len(caps)
    if not spread:
        for i, cap in enumerate(caps):
            shares[i] = min(cap, amount)
            amount -= shares[i]
        return shares
    while amount > 0:
        before = amount
        for i, cap in enumerate(caps):
            if amount and shares[i] < cap:
                shares[i] += 1
                amount -= 1
        if amount == before:
            break
    return shares
