"""Greedy list scheduling: simulate one iteration, and let each free worker pick its next action by simple
rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .align import Layout
from .instance import Instance


@dataclass(frozen=True)
class Rules:
    """How a free worker picks. The defaults are the quick plan's; the portfolio tries many.

    ``forward_first``: a forward before a backward whenever memory allows. ``drain``: a weight gradient first
    when a forward waits for memory. ``wait_b``/``wait_f``: leave a worker idle, rather than start a W, when a
    B (an F) arrives within this percentage of W's duration. ``backlog``: a weight gradient first when this
    many wait (0: never). ``spare``: memory units per worker left unused.
    """

    forward_first: int = 0
    drain: int = 0
    wait_b: int = 0
    wait_f: int = 0
    give_way: int = 0
    ways: int = 0
    backlog: int = 0
    spare: int = 0


def schedule(instance: Instance, route: list[int], rules: Sequence[Rules],
             keys: tuple[list[int], list[int]] | None = None) -> list[int]:
    """A legal trace for these routes; ``rules[s]`` is for stage ``s``, ``keys`` order the ready F and B
    queues.

    Every legal problem gets one: should orders that must be kept and full memories block each other, the
    simulation is run again with every worker's forwards in one global order, in which nothing can block.
    """
    plain = list(range(len(route)))
    trace = _simulate(instance, route, rules, keys or (plain, plain), strict=False)
    if len(trace) < instance.actions:
        trace = _simulate(instance, route, rules, (plain, plain), strict=True)
    return trace


def guests(instance: Instance, layout: Layout, route: list[int]) -> set[int]:
    """Jobs that visit a worker other than their logical pipeline's at some stage."""
    count, label = len(instance.jobs), layout.label
    return {j for s, home in enumerate(layout.home) for j in range(count) if route[s * count + j] != home[label[j]]}


def leading(instance: Instance, jobs: set[int], lead: int) -> list[int]:
    """What a ready queue is sorted by, per node: ``jobs`` come ``lead`` micro-batches earlier than the
    others."""
    count = len(instance.jobs)
    nodes = count * instance.stages
    if lead == 0 or not jobs:
        return list(range(nodes))
    place = sorted(range(count), key=lambda j: (instance.jobs[j][1] - (lead if j in jobs else 0), j))
    rank = [0] * count
    for r, j in enumerate(place):
        rank[j] = r
    bits = nodes.bit_length()
    return [(rank[node % count] << bits) | node for node in range(nodes)]


def _chains(instance: Instance, route: list[int], strict: bool) -> tuple[list[int], list[int]]:
    """For every node the next one whose F (and whose B) has to wait for it on its worker, -1 for none."""
    count, pipelines = len(instance.jobs), instance.problem.grid.pipelines
    nodes = count * instance.stages
    after_f, after_b = [-1] * nodes, [-1] * nodes
    last_f: dict[int, int] = {}
    last_b: dict[int, int] = {}
    for node, w in enumerate(route):
        own = w * pipelines + instance.jobs[node % count][0]
        key = w if strict else own
        if key in last_f:
            after_f[last_f[key]] = node
        last_f[key] = node
        if instance.ordered:
            if own in last_b:
                after_b[last_b[own]] = node
            last_b[own] = node
    return after_f, after_b


def _simulate(instance: Instance, route: list[int], rules: Sequence[Rules], keys: tuple[list[int], list[int]],
              strict: bool) -> list[int]:
    """The event loop: ``agenda`` wakes workers; ``soon_*`` are known arrivals, ``*_queue`` what is ready.

    Everything that a started action will cause is entered at once, as its end is known: its worker cannot
    decide again before that end. Times and numbers are packed into one integer per entry, smallest first.
    """
    count, edge = len(instance.jobs), (instance.stages - 1) * len(instance.jobs)
    nodes = count * instance.stages
    workers = len(instance.workers)
    stage, hop = instance.stage, instance.problem.costs.hop
    split = instance.problem.split_backward
    d_forward, d_backward, d_weight = instance.forward, instance.backward, instance.weight
    hold, keep = instance.hold, instance.keep
    freed = [h - k for h, k in zip(hold, keep)]
    mine = [rules[s] for s in stage]
    left = [max(cap - rule.spare, h) for cap, h, rule in zip(instance.cap, hold, mine)]
    shift, job_bits = workers.bit_length(), nodes.bit_length()
    mask, job_mask = (1 << shift) - 1, (1 << job_bits) - 1
    key_f, key_b = keys
    gated = instance.ordered or strict
    after_f, after_b = _chains(instance, route, strict) if gated else ([], [])
    shut_f, shut_b = _shut(after_f, nodes), _shut(after_b, nodes)
    early: set[int] = set()  # codes that arrived before their turn

    soon_f: list[list[int]] = [[] for _ in range(workers)]
    soon_b: list[list[int]] = [[] for _ in range(workers)]
    f_queue: list[list[int]] = [[] for _ in range(workers)]
    b_queue: list[list[int]] = [[] for _ in range(workers)]
    w_queue: list[list[int]] = [[] for _ in range(workers)]
    w_next = [0] * workers
    busy = [0] * workers
    ahead = [0] * workers  # forwards still to do
    for w in route:
        ahead[w] += 1
    for node in range(count):
        w = route[node]
        if shut_f[node]:
            early.add(node)
        else:
            f_queue[w].append(key_f[node])
    for queue in f_queue:
        heapify(queue)
    agenda = list(range(workers))
    trace: list[int] = []
    forward_first, drain = [rule.forward_first for rule in mine], [rule.drain for rule in mine]
    backlog = [rule.backlog or nodes + 1 for rule in mine]
    slack_b = [rule.wait_b * x // 100 for rule, x in zip(mine, d_weight)]
    slack_w = [rule.give_way * x // 100 for rule, x in zip(mine, d_forward)]
    ways = [rule.ways for rule in mine]
    b_done = [0] * workers
    slack_f = [rule.wait_f * x // 100 for rule, x in zip(mine, d_weight)]
    waits = any(slack_b) or any(slack_f)

    while agenda:
        code = heappop(agenda)
        t, w = code >> shift, code & mask
        if busy[w] > t:
            continue
        limit = (t + 1) << job_bits
        coming_f, coming_b, fs, bs = soon_f[w], soon_b[w], f_queue[w], b_queue[w]
        while coming_b and coming_b[0] < limit:
            node = heappop(coming_b) & job_mask
            if shut_b[node]:
                early.add(nodes + node)
            else:
                heappush(bs, key_b[node])
        while coming_f and coming_f[0] < limit:
            node = heappop(coming_f) & job_mask
            if shut_f[node]:
                early.add(node)
            else:
                heappush(fs, key_f[node])
        room = left[w] >= hold[w]
        pending = len(w_queue[w]) - w_next[w]
        if pending >= backlog[w] and ahead[w]:
            kind = 2
        elif fs and room and (forward_first[w] or not bs):
            kind = 0
            if slack_w[w] and coming_b and (coming_b[0] >> job_bits) - t < slack_w[w] and b_done[w] < ways[w]:
                heappush(agenda, ((coming_b[0] >> job_bits) << shift) | w)
                continue
        elif pending and drain[w] and fs and not room:
            kind = 2
        elif bs:
            kind = 1
        elif pending:
            kind = 2
            if waits and not (fs and not room):
                until = 0
                if coming_b and (coming_b[0] >> job_bits) - t < slack_b[w]:
                    until = coming_b[0] >> job_bits
                elif room and coming_f and (coming_f[0] >> job_bits) - t < slack_f[w]:
                    until = coming_f[0] >> job_bits
                if until:
                    heappush(agenda, (until << shift) | w)
                    continue
        else:
            if coming_b:
                first = coming_b[0]
                if coming_f and coming_f[0] < first:
                    first = coming_f[0]
                heappush(agenda, ((first >> job_bits) << shift) | w)
            elif coming_f:
                heappush(agenda, ((coming_f[0] >> job_bits) << shift) | w)
            continue

        if kind == 0:
            node = heappop(fs) & job_mask
            end = t + d_forward[w]
            left[w] -= hold[w]
            ahead[w] -= 1
            trace.append(node)
            if node < edge:
                to, entry, box = route[node + count], node + count, soon_f
                arrival = end + hop
            else:
                to, entry, box, arrival = w, node, soon_b, end
            if gated:
                follow = after_f[node]
                if follow >= 0:
                    shut_f[follow] = 0
                    if follow in early:
                        heappush(fs, key_f[follow])
        elif kind == 1:
            node = heappop(bs) & job_mask
            end = t + d_backward[w]
            left[w] += freed[w]
            b_done[w] += 1
            trace.append(nodes + node)
            if split:
                w_queue[w].append(node)
            if node >= count:
                to, entry, box = route[node - count], node - count, soon_b
                arrival = end + hop
            else:
                to = -1
            if gated:
                follow = after_b[node]
                if follow >= 0:
                    shut_b[follow] = 0
                    if nodes + follow in early:
                        heappush(bs, key_b[follow])
        else:
            node = w_queue[w][w_next[w]]
            w_next[w] += 1
            end = t + d_weight[w]
            left[w] += keep[w]
            trace.append(2 * nodes + node)
            to = -1
        busy[w] = end
        heappush(agenda, (end << shift) | w)
        if to >= 0:
            heappush(box[to], (arrival << job_bits) | entry)
            if to != w and busy[to] <= t:
                heappush(agenda, (arrival << shift) | to)
    return trace


def _shut(after: list[int], nodes: int) -> bytearray:
    """Flags of the nodes that must wait for another one's turn."""
    flags = bytearray(nodes)
    for node in after:
        if node >= 0:
            flags[node] = 1
    return flags
