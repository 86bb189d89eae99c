"""Greedy list scheduling: simulate one iteration, and let each free worker pick its next action by simple rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from megatron_recycle.planner.alignment import Alignment

from .instance import Instance


@dataclass(frozen=True)
class Rules:
    """Rules by which a free worker picks its next action. The defaults are the quick plan's; the portfolio tries many.

    ``forward_first``: a forward before a backward whenever memory allows. ``drain``: a weight gradient first when a
    forward waits for memory. ``wait_b``/``wait_f``: leave a worker idle, rather than start a W, when a B (an F) arrives
    within this percentage of W's duration. ``backlog``: a weight gradient first when this many wait (0: never).
    ``reserve``: memory units per worker left unused.
    """

    forward_first: int = 0
    drain: int = 0
    wait_b: int = 0
    wait_f: int = 0
    give_way: int = 0
    ways: int = 0
    backlog: int = 0
    reserve: int = 0


@dataclass(frozen=True)
class Begun:
    """Actions that were done before. ``progress``: of each node (0: nothing, 1: its F, 2: its B too, 3: all). ``late``:
    for each worker the nodes whose W is due, in the order of their B. ``actions``: number of done actions.

    An input of a done action may still be to do: its worker is dead, and another worker runs it once more."""

    progress: Sequence[int]
    late: Sequence[Sequence[int]]
    actions: int


def schedule(instance: Instance, route: list[int], rules: Sequence[Rules],
             keys: tuple[list[int], list[int]] | None = None, strict: bool = False,
             begun: Begun | None = None) -> list[int]:
    """A legal trace for these routes; ``rules[s]`` is for stage ``s``, ``keys`` order the ready F and B queues.

    Every legal problem gets one: should orders that must be kept and full memories block each other, the simulation is
    run again with every worker's forwards in one global order, in which nothing can block. With ``strict`` it is run in
    that order only.

    ``begun``: the trace is of the rest. It may be short then, where memories are full of done actions.
    """
    plain = leading(instance, set(), 0)
    begun = begun or Begun(bytes(len(route)), [()] * len(instance.workers), 0)
    trace = [] if strict else _simulate(instance, route, rules, keys or (plain, plain), False, begun)
    if len(trace) < instance.actions - begun.actions:
        trace = _simulate(instance, route, rules, (plain, plain), True, begun)
    return trace


def guests(instance: Instance, alignment: Alignment, route: list[int]) -> set[int]:
    """Jobs that visit a worker other than their logical pipeline's at some stage."""
    count, label = len(instance.jobs), alignment.label
    homes = [alignment.home[instance.problem.stage_of(chunk)] for chunk in range(instance.chunks)]
    return {j for chunk, home in enumerate(homes) for j in range(count) if route[chunk * count + j] != home[label[j]]}


def leading(instance: Instance, jobs: set[int], lead: int) -> list[int]:
    """Sort keys of a ready queue, one per node: ``jobs`` come ``lead`` micro-batches earlier than the others. Where
    stages have several chunks the earlier micro-batch comes first, in any chunk."""
    count = len(instance.jobs)
    nodes = count * instance.chunks
    if (lead == 0 or not jobs) and not instance.problem.placement:
        return list(range(nodes))
    place = sorted(range(count), key=lambda j: (instance.jobs[j][1] - (lead if j in jobs else 0), j))
    rank = [0] * count
    for r, j in enumerate(place):
        rank[j] = r
    bits = nodes.bit_length()
    return [(rank[node % count] << bits) | node for node in range(nodes)]


def _chains(instance: Instance, route: list[int], strict: bool, begun: Begun) -> tuple[list[int], list[int]]:
    """The successor of every node, once by F and once by B: it waits for the node on their worker. -1: none."""
    count, pipelines = len(instance.jobs), instance.problem.grid.pipelines
    nodes = count * instance.chunks
    after_f, after_b = [-1] * nodes, [-1] * nodes
    last_f: dict[int, int] = {}
    last_b: dict[int, int] = {}
    for node, w in enumerate(route):
        chunk, j = divmod(node, count)
        key = w * instance.chunks + chunk
        own = key * pipelines + instance.jobs[j][0]
        key = key if strict else own
        if not begun.progress[node]:
            if key in last_f:
                after_f[last_f[key]] = node
            last_f[key] = node
        if instance.ordered and begun.progress[node] < 2:
            if own in last_b:
                after_b[last_b[own]] = node
            last_b[own] = node
    return after_f, after_b


class _Board:
    """The state of the event loop (_simulate), per worker.

    ``soon_*`` are known arrivals, ``*_queue`` ready nodes, ``early`` codes that arrived before their turn, and
    ``shut_*`` nodes whose turn has not come. ``passed``: 1 where F has been run, more where B had been before.
    ``returned``: when a gradient arrives at a node whose F has not been run.
    """

    def __init__(self, instance: Instance, route: list[int], rules: Sequence[Rules],
                 keys: tuple[list[int], list[int]], strict: bool, begun: Begun) -> None:
        workers, nodes = len(instance.workers), len(route)
        mine = [rules[s] for s in instance.stage]
        self.hold, self.keep = instance.weights(route)
        self.need, self.usual = instance.needs(self.hold), [0] * workers
        for w, units in zip(route, self.need):
            self.usual[w] = max(self.usual[w], units)
        self.least = list(self.usual)  # with less memory free no F of the worker can begin
        for w, units in zip(route, self.need):
            self.least[w] = min(self.least[w], units)
        self.left = [max(cap - rule.reserve, hold) for cap, hold, rule in zip(instance.cap, self.usual, mine)]
        self.gated = instance.ordered or strict
        self.after_f, self.after_b = _chains(instance, route, strict, begun) if self.gated else ([], [])
        self.shut_f, self.shut_b = _shut(self.after_f, nodes), _shut(self.after_b, nodes)
        self.early: set[int] = set()
        self.soon_f: list[list[int]] = [[] for _ in range(workers)]
        self.soon_b: list[list[int]] = [[] for _ in range(workers)]
        self.f_queue: list[list[int]] = [[] for _ in range(workers)]
        self.b_queue: list[list[int]] = [[] for _ in range(workers)]
        self.ahead = [0] * workers  # forwards still to do
        for w, progress in zip(route, begun.progress):
            self.ahead[w] += not progress
        for node in range(len(instance.jobs)):
            if begun.progress[node]:
                continue
            if self.shut_f[node]:
                self.early.add(node)
            else:
                self.f_queue[route[node]].append(keys[0][node])
        self.passed = bytearray(begun.progress)
        self.returned: dict[int, int] = {}
        if begun.actions:
            self._resume(instance, route, begun)
        for queue in self.f_queue:
            heapify(queue)
        self.forward_first, self.drain = [rule.forward_first for rule in mine], [rule.drain for rule in mine]
        self.backlog = [rule.backlog or nodes + 1 for rule in mine]
        self.plain = [not (rule.forward_first or rule.drain or rule.backlog) for rule in mine]  # B before all else
        self.slack_b = [rule.wait_b * x // 100 for rule, x in zip(mine, instance.weight)]
        self.slack_f = [rule.wait_f * x // 100 for rule, x in zip(mine, instance.weight)]
        self.slack_w = [rule.give_way * x // 100 for rule, x in zip(mine, instance.forward)]
        self.ways = [rule.ways for rule in mine]
        self.waits = any(self.slack_b) or any(self.slack_f)
        self.b_done = [0] * workers

    def _resume(self, instance: Instance, route: list[int], begun: Begun) -> None:
        """Enter the memory that done actions hold, and their outputs for other workers."""
        count, nodes, progress, lag = len(instance.jobs), len(route), begun.progress, instance.lags(route)
        bits = nodes.bit_length()
        for node, w in enumerate(route):
            done, behind = progress[node], node + count
            self.left[w] -= (0, self.hold[node], self.keep[node], 0)[done]
            if done and behind < nodes and not progress[behind]:
                self.soon_f[route[behind]].append((lag[behind] << bits) | behind)
            if done < 2:
                if done and (behind >= nodes or progress[behind] >= 2):
                    self.soon_b[w].append(((lag[behind] if behind < nodes else 0) << bits) | node)
                elif behind < nodes and progress[behind] >= 2:
                    self.returned[node] = lag[behind]
        for queue in (*self.soon_f, *self.soon_b):
            heapify(queue)

    def choose(self, w: int, t: int, pending: int, room: bool, bits: int) -> int:
        """The best choice of a worker that is free at ``t`` and has ``pending`` W waiting: a kind (0 F, 1 B, 2 W), 3
        for nothing, or minus the time until which it waits."""
        fs, bs = self.f_queue[w], self.b_queue[w]
        if pending >= self.backlog[w] and self.ahead[w]:
            return 2
        if fs and room and (self.forward_first[w] or not bs):
            coming = self.soon_b[w]
            if (self.slack_w[w] and coming and self.b_done[w] < self.ways[w]
                    and (coming[0] >> bits) - t < self.slack_w[w]):
                return -(coming[0] >> bits)  # one of its first B is about to come
            return 0
        if pending and self.drain[w] and fs and not room:
            return 2
        if bs:
            return 1
        if not pending:
            return 3
        return self._wait(w, t, room, bits) if self.waits and (room or not fs) else 2

    def _wait(self, w: int, t: int, room: bool, bits: int) -> int:
        """The choice, as `choose` gives it, of a worker with nothing but W to do."""
        coming_b, coming_f = self.soon_b[w], self.soon_f[w]
        if coming_b and (coming_b[0] >> bits) - t < self.slack_b[w]:
            return -(coming_b[0] >> bits)
        if room and coming_f and (coming_f[0] >> bits) - t < self.slack_f[w]:
            return -(coming_f[0] >> bits)
        return 2


def _simulate(instance: Instance, route: list[int], rules: Sequence[Rules], keys: tuple[list[int], list[int]],
              strict: bool, begun: Begun) -> list[int]:
    """The event loop: ``agenda`` wakes workers, and each free worker picks its next action.

    The effects of an action are entered when it starts, as its end is known: its worker cannot decide again before that
    end. Times and numbers are packed into one integer per entry, smallest first.
    """
    board = _Board(instance, route, rules, keys, strict, begun)
    count, nodes = len(instance.jobs), len(route)
    edge, workers = nodes - count, len(instance.workers)
    lag, split, again = instance.lags(route), instance.problem.split_backward, bool(instance.problem.placement)
    d_forward, d_backward, d_weight = instance.lengths(route)
    hold, keep, need, left, usual, least = board.hold, board.keep, board.need, board.left, board.usual, board.least
    shift, bits = workers.bit_length(), nodes.bit_length()
    mask, job_mask = (1 << shift) - 1, (1 << bits) - 1
    (key_f, key_b), gated, ahead = keys, board.gated, board.ahead
    soon_f, soon_b, f_queue, b_queue = board.soon_f, board.soon_b, board.f_queue, board.b_queue
    choose, b_done, plain, passed, returned = board.choose, board.b_done, board.plain, board.passed, board.returned
    w_queue = [[*late] for late in begun.late]
    w_next, busy = [0] * workers, [0] * workers
    agenda, trace = list(range(workers)), []

    while agenda:
        code = heappop(agenda)
        t, w = code >> shift, code & mask
        if busy[w] > t:
            continue
        limit = (t + 1) << bits
        coming_f, coming_b, fs, bs = soon_f[w], soon_b[w], f_queue[w], b_queue[w]
        if coming_b and coming_b[0] < limit:
            _arrive(coming_b, bs, key_b, board.shut_b, board.early, nodes, limit, job_mask)
        if coming_f and coming_f[0] < limit:
            _arrive(coming_f, fs, key_f, board.shut_f, board.early, 0, limit, job_mask)
        room = left[w] >= (need[fs[0] & job_mask] if fs else usual[w])
        if again and fs and not room and left[w] >= least[w]:
            room = _fitting(fs, left[w], need, job_mask)
        kind = 1 if bs and plain[w] else choose(w, t, len(w_queue[w]) - w_next[w], room, bits)
        if kind == 3:
            if coming_b or coming_f:
                heappush(agenda, (min(coming_b[:1] + coming_f[:1]) >> bits << shift) | w)
            continue
        if kind < 0:
            heappush(agenda, (-kind << shift) | w)
            continue

        to = -1
        if kind == 0:
            node = heappop(fs) & job_mask
            arrival = end = t + d_forward[node]
            left[w] -= hold[node]
            ahead[w] -= 1
            passed[node] = 1
            trace.append(node)
            if node < edge and not passed[node + count]:
                to, entry, box, arrival = route[node + count], node + count, soon_f, end + lag[node + count]
            elif node >= edge or node in returned:
                to, entry, box, arrival = w, node, soon_b, max(end, returned.get(node, 0))
            if gated:
                _release(board.after_f[node], fs, key_f, board.shut_f, board.early, 0)
        elif kind == 1:
            node = heappop(bs) & job_mask
            end = t + d_backward[node]
            left[w] += hold[node] - keep[node]
            b_done[w] += 1
            trace.append(nodes + node)
            if split:
                w_queue[w].append(node)
            if node >= count:
                if passed[node - count] == 1:
                    to, entry, box, arrival = route[node - count], node - count, soon_b, end + lag[node]
                elif not passed[node - count]:
                    returned[node - count] = end + lag[node]
            if gated:
                _release(board.after_b[node], bs, key_b, board.shut_b, board.early, nodes)
        else:
            node = w_queue[w][w_next[w]]
            trace.append(2 * nodes + node)
            w_next[w] += 1
            end = t + d_weight[node]
            left[w] += keep[node]
        busy[w] = end
        heappush(agenda, (end << shift) | w)
        if to >= 0:
            heappush(box[to], (arrival << bits) | entry)
            if to != w and busy[to] <= t:
                heappush(agenda, (arrival << shift) | to)
    return trace


def _fitting(queue: list[int], left: int, need: list[int], mask: int) -> bool:
    """Put the first micro-batch that fits (one that returns to the stage) at the head of the queue, if there is one."""
    fit = [key for key in queue if need[key & mask] <= left]
    if not fit:
        return False
    first = min(fit)
    place, head = queue.index(first), first & mask  # below every other key
    while place:
        above = (place - 1) >> 1
        if queue[above] <= head:
            break
        queue[place] = queue[above]
        place = above
    queue[place] = head
    return True


def _arrive(coming: list[int], queue: list[int], key: list[int], shut: bytearray, early: set[int], offset: int,
            limit: int, mask: int) -> None:
    """Move arrived nodes into the ready queue, or aside if it is not yet their turn."""
    while coming and coming[0] < limit:
        node = heappop(coming) & mask
        if shut[node]:
            early.add(offset + node)
        else:
            heappush(queue, key[node])


def _release(follow: int, queue: list[int], key: list[int], shut: bytearray, early: set[int],
             offset: int) -> None:
    """Give the next node of a chain its turn; the node may have arrived long ago."""
    if follow >= 0:
        shut[follow] = 0
        if offset + follow in early:
            heappush(queue, key[follow])


def _shut(after: list[int], nodes: int) -> bytearray:
    """Flags of the nodes that must wait for another node's turn."""
    flags = bytearray(nodes)
    for node in after:
        if node >= 0:
            flags[node] = 1
    return flags
