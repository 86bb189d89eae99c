"""Routes, the worker of each micro-batch at each stage: guests are dealt to peers by how much more each can take."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from megatron_recycle.planner.alignment import Alignment, Unit

from .instance import Instance

#: ways to deal the guests of a stage to its peers; the portfolio tries all
DEALS = ("spread", "runs", "late")
#: which of its own micro-batches an overloaded worker gives away
PICKS = ("even", "first", "last")


def route(instance: Instance, alignment: Alignment, deal: str = "spread", fewer: int = 0,
          pick: str = "even") -> list[int]:
    """The worker of every node. ``fewer``: so many micro-batches fewer than possible stay on a slower worker."""
    count = len(instance.jobs)
    table = [-1] * (count * instance.chunks)
    sizes = [sum(len(unit.jobs) for unit in crew) for crew in alignment.crews]
    loads: dict[int, int] = {}  # of earlier chunks
    for chunk in range(instance.chunks):
        s, base = instance.problem.stage_of(chunk), chunk * count
        for unit, w in _stage(instance, alignment, s, sizes, deal, fewer, pick, loads):
            for j in unit.jobs:
                table[base + j] = w
            loads[w] = loads.get(w, 0) + len(unit.jobs)
    return table


def cost(instance: Instance, w: int) -> int:
    """Time that a worker needs for one micro-batch."""
    return instance.forward[w] + instance.backward[w] + instance.weight[w]


def _stage(instance: Instance, alignment: Alignment, s: int, sizes: list[int], deal: str,
           fewer: int, pick: str, before: Mapping[int, int]) -> list[tuple[Unit, int]]:
    """Units of a stage with their workers: homes keep as many as the best possible slowest load allows."""
    keep = _targets(instance, alignment, s, fewer)
    placed: list[tuple[Unit, int]] = []
    guests: list[Unit] = []
    load = dict.fromkeys(alignment.at[s], 0)
    for d, own in enumerate(alignment.crews):
        w = alignment.home[s][d]
        if w < 0:
            guests.extend(own)
            continue
        surplus = sizes[d] - keep[w]
        away = _away(own, surplus, pick) if surplus > 0 else set()
        for i, unit in enumerate(own):
            if i in away:
                guests.append(unit)
            else:
                placed.append((unit, w))
                load[w] += len(unit.jobs)
    guests.sort(key=lambda unit: unit.jobs[0])
    level = min((before.get(w, 0) for w in load), default=0)  # more of an earlier chunk means less of this one
    placed.extend(_deal(instance, guests, {w: n + before.get(w, 0) - level for w, n in load.items()}, deal))
    return placed


def _away(own: list[Unit], surplus: int, pick: str) -> set[int]:
    """Indices of units of a pipeline that hold at least ``surplus`` micro-batches."""
    size = max(len(unit.jobs) for unit in own)
    leave = min(len(own), -(-surplus // size))
    if pick == "first":
        return set(range(leave))
    if pick == "last":
        return set(range(len(own) - leave, len(own)))
    return {(2 * i + 1) * len(own) // (2 * leave) for i in range(leave)}


def _targets(instance: Instance, alignment: Alignment, s: int, fewer: int) -> dict[int, int]:
    """The most micro-batches for each worker of a stage, with the slowest one's load as small as possible."""
    workers = alignment.at[s]
    each = {w: max(1, cost(instance, w)) for w in workers}
    total = len(instance.jobs)
    low, high = 0, total * max(each.values())
    while low < high:  # smallest load at which everything fits
        middle = (low + high) // 2
        if sum(middle // each[w] for w in workers) >= total:
            high = middle
        else:
            low = middle + 1
    quickest = min(each.values())
    return {w: max(0, low // each[w] - (fewer if each[w] > quickest else 0)) for w in workers}


def _deal(instance: Instance, guests: list[Unit], load: dict[int, int], deal: str) -> list[tuple[Unit, int]]:
    """Deal guests so that loads end level: first how many each peer takes, then which."""
    if not guests:
        return []
    size = max(len(unit.jobs) for unit in guests)
    if any(len(unit.jobs) < size for unit in guests):
        return _by_size(instance, guests, load)
    heap = [((n + size) * cost(instance, w), w) for w, n in load.items()]
    heapq.heapify(heap)
    now = dict(load)
    share: dict[int, int] = {}
    for _ in guests:
        _, w = heap[0]
        now[w] += size
        share[w] = share.get(w, 0) + 1
        heapq.heapreplace(heap, ((now[w] + size) * cost(instance, w), w))
    peers = sorted(share)
    if deal == "runs":
        turn = [w for w in peers for _ in range(share[w])]
    else:
        # every peer's turns are spread evenly over the sequence; "late" starts with peers that have fewer
        first = 1 if deal == "late" else -1
        slots = sorted(((2 * i + 1) / share[w], first * share[w], w) for w in peers for i in range(share[w]))
        turn = [w for _, _, w in slots]
    return list(zip(guests, turn))


def _by_size(instance: Instance, guests: list[Unit], load: dict[int, int]) -> list[tuple[Unit, int]]:
    """Deal blocks of unequal size, largest first, each to the worker that ends least loaded."""
    now = dict(load)
    dealt = []
    for unit in sorted(guests, key=lambda unit: (-len(unit.jobs), unit.jobs[0])):
        w = min(now, key=lambda w: ((now[w] + len(unit.jobs)) * cost(instance, w), w))
        now[w] += len(unit.jobs)
        dealt.append((unit, w))
    return dealt
