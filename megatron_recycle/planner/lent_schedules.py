"""Schedules with lent layers: routes and crossings that level the load, list-scheduled, the best one kept.

Each worker's target load follows from the period and from its stage's place in the pipeline: the first stages wait for
their first B, the last ones for the others' way there and back around their own work. The share of that wait that a
schedule can hide is not known beforehand, so the search tries several shares, several ways to pick the micro-batches
that cross, and then seeded changes of rules and of single crossings. Everything is limited by work, never by the clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from megatron_recycle.planner.alignment import Alignment, aligned
from megatron_recycle.planner.crossing_flow import Crossings, Flow, Lendable
from megatron_recycle.planner.routing import route
from megatron_recycle.planner.timing import objective, timed

from ..plan import Problem
from .greedy import Rules, guests, leading, schedule
from .instance import NO_CAP, Instance, Schedule, roomy, spanned
from .portfolio import CHUNK_TEMPLATES, LEADS, TEMPLATES, Cancelled, Found, Template, filled, mutated


@dataclass(frozen=True)
class Target:
    """Target load of each worker: its period, less the shares of it that count as lost (see `allowance`).

    ``idle``: share of the time that it waits for its first B, and the first stages for their last one. ``late``: share
    of the way of the first F to it. ``above``: excess of the period over the least one for which loads can be level.
    ``alone``: +1: stages behind the last hurt one lend no layers, -1: those before the first hurt one.
    """

    idle: float = 0.0
    late: float = 0.0
    above: float = 0.0
    alone: int = 0


_TARGETS = (Target(0.5), Target(1.0), Target(0.5, 0.5), Target(1.0, 0.0, 0.02), Target(0.5, alone=-1),
            Target(0.5, 0.0, 0.02), Target(0.5, 0.5, 0.02), Target(0.0), Target(1.0, 1.0), Target(0.5, 0.0, 0.04),
            Target(1.0, 0.0, 0.04), Target(0.0, 0.0, 0.02), Target(0.5, 0.0, 0.06), Target(1.0, 0.0, 0.06))
#: the same where stages have several chunks: a worker runs one while it waits for the other
_CHUNK_TARGETS = (Target(alone=1), Target(late=1.0), Target(late=0.5), Target(late=1.0, above=0.02), Target(),
                  Target(above=0.02, alone=1), Target(late=0.5, above=0.02), Target(above=0.02))
#: which micro-batches cross: their order, and whether all cross by one layer before any crosses by two
_PICKS = (("middle", True), ("even", True), ("middle", False), ("even", False), ("late", True), ("early", True))
_DEALS = ("spread", "runs")
#: rules that do well with spans
_FIRST = (TEMPLATES[5], TEMPLATES[0])
_CHUNK_FIRST = (CHUNK_TEMPLATES[0], Template(Rules(forward_first=1, backlog=4)))
#: the least number of trials, however large the plan
LEAST = 1
#: share of a search's trials for starting points, and the number of these from which it climbs
_STARTS, _CLIMBS = 0.2, 8


@dataclass(frozen=True)
class Choice:
    """One point of the search: route, lent layers, and the list scheduler's rules and leads."""

    table: tuple[int, ...]
    crossings: Crossings
    rules: tuple[Rules, ...]
    lead_f: int = 0
    lead_b: int = 0


def helps(problem: Problem) -> bool:
    """Whether lending may shorten an iteration: some layer may be lent, and workers differ or are missing."""
    return problem.lends and bool(problem.failed or problem.costs.speed)


def first(instance: Instance, work: int) -> Found:
    """The best of the starting points, as many as ``work`` scheduled actions allow, and at least LEAST."""
    search = _Search(instance, 0, lambda: False, None)
    search.starts(max(LEAST, work // instance.actions))
    return search.found()


def search(instance: Instance, work: int, seed: int = 0, cancelled: Cancelled = lambda: False,
           better: Callable[[Schedule], None] | None = None) -> Found:
    """The best schedule with lent layers within ``work`` scheduled actions."""
    found = _Search(instance, seed, cancelled, better)
    found.run(max(LEAST, work // instance.actions))
    return found.found()


def lendable(instance: Instance, table: Sequence[int]) -> Lendable:
    """The lending limits of a route."""
    problem, costs, count = instance.problem, instance.problem.costs, len(instance.jobs)
    chunks, units = range(problem.chunks), _units(instance)
    return Lendable(
        who=[table[c * count:(c + 1) * count] for c in chunks], units=units,
        place=[instance.jobs[unit[0]][1] for unit in units], layers=problem.layers, limit=problem.lend,
        home=[[costs.scaled(costs.work(c), worker) for worker in instance.workers] for c in chunks],
        layer=[[costs.scaled(sum(costs.layer[c]), worker) for worker in instance.workers] for c in chunks],
        room=[_room(instance, w) for w in range(len(instance.workers))])


def _units(instance: Instance) -> list[tuple[int, ...]]:
    """Units of jobs that cross alike, by their first job: one each, or blocks."""
    units: dict[tuple[int, int], list[int]] = {}
    for j, (d, m) in enumerate(instance.jobs):
        units.setdefault((d, m // (instance.problem.block or 1)), []).append(j)
    return [tuple(unit) for unit in units.values()]


def _room(instance: Instance, w: int) -> int:
    """Layers that a worker has memory to borrow at either side, with one micro-batch under way."""
    problem, cap = instance.problem, instance.cap[w]
    sides = 2 * len(problem.chunks_of[instance.stage[w]])
    each = max(max(held) + own for held, own in zip(problem.layer_held, problem.layer_parameters))
    return NO_CAP if cap >= NO_CAP or not each else (cap - problem.weight(instance.stage[w])) // (sides * each)


def allowance(instance: Instance, period: float, target: Target, own: Sequence[float]) -> list[float]:
    """For each worker the time that it may compute in an iteration of ``period``; ``own``: its compute time where
    nothing is lent.

    Borrowing from an earlier stage delays that stage's step, and so the borrower's next first F, by ``late``; borrowing
    from a later stage does not.
    """
    problem, costs, stages = instance.problem, instance.problem.costs, instance.stages
    f, b, w = costs.forward, costs.backward_input, costs.backward_weight
    failed_stages = [worker.stage for worker in problem.failed] or [0, stages - 1]
    allowances = []
    for worker, s in enumerate(instance.stage):
        way = sum(f[c] + costs.hop for c in range(problem.chunks_of[s][0]))
        room = period - costs.step[s] - target.late * way
        if not problem.placement:
            ahead = min(instance.cap[worker] // max(1, problem.weight(s)), problem.grid.total) - 1
            idle = max(0, sum(f[x] + b[x] + 2 * costs.hop for x in range(s + 1, stages)) - ahead * f[s])
            room -= target.idle * idle
            if s:  # the first stage begins before the first F comes here, and ends after the last B has gone back
                around = w[0] + sum(f[x] + b[x] + 2 * costs.hop for x in range(s))
                lead = period - costs.step[0] - target.late * way - target.idle * (around + idle)
                room = min(room, lead * (f[s] + b[s] + w[s]) / max(1, f[s] + b[s]))
        if (target.alone > 0 and s > max(failed_stages)) or (target.alone < 0 and s < min(failed_stages)):
            room = min(room, own[worker])
        allowances.append(room)
    return allowances


def candidates(instance: Instance, alignment: Alignment) -> Iterator[tuple[list[int], Crossings]]:
    """Routes with crossings that level the loads, the most promising first."""
    flows: dict[str, tuple[list[int], Flow]] = {}
    least: dict[tuple[str, Target], float] = {}
    seen: set[tuple[str, Crossings]] = set()
    targets = _CHUNK_TARGETS if instance.problem.placement else _TARGETS
    points = [*product(_DEALS, targets, _PICKS)]
    rank = {point: (_PICKS.index(point[2]) // 2 + targets.index(point[1]) + 3 * _DEALS.index(point[0]), i)
            for i, point in enumerate(points)}
    for deal, target, (order, spread) in sorted(points, key=rank.__getitem__):
        if deal not in flows:
            table = route(instance, alignment, deal)
            flows[deal] = table, Flow(lendable(instance, table))
        table, flow = flows[deal]
        level = replace(target, above=0.0)
        if (deal, level) not in least:
            least[deal, level] = _least(instance, flow, level)
        flow.levelled(allowance(instance, least[deal, level] * (1 + target.above), target, flow.base))
        crossings = flow.crossings(order, spread)
        if any(map(any, crossings)) and (deal, crossings) not in seen:
            seen.add((deal, crossings))
            yield table, crossings


def _least(instance: Instance, flow: Flow, target: Target) -> float:
    """The least period for which loads can be made level, to a part in 500."""
    low, high = 0.0, max(1.0, 2.0 * max(flow.base))  # steps alone may take time
    while not flow.levelled(allowance(instance, high, target, flow.base)):
        high *= 2
    while high - low > high / 500:
        middle = (low + high) / 2
        if flow.levelled(allowance(instance, middle, target, flow.base)):
            high = middle
        else:
            low = middle
    return high


class _Search:
    """Starting points, then climbs from the best of them; the worse half of these is dropped again and again."""

    def __init__(self, instance: Instance, seed: int, cancelled: Cancelled,
                 better: Callable[[Schedule], None] | None) -> None:
        self.instance, self.cancelled, self.better = instance, cancelled, better
        self.alignment = aligned(instance)
        self.draw, self.units = random.Random(seed), _units(instance)
        self.best: Schedule | None = None
        self.target = float("inf")
        self.trials, self.cut = 0, False
        self.away: dict[tuple[int, ...], set[int]] = {}

    def found(self) -> Found:
        """The best schedule found."""
        return Found(self.best, self.trials, self.cut)

    def run(self, limit: int) -> None:
        """Try ``limit`` choices."""
        at = self.starts(max(LEAST, int(limit * _STARTS)))
        while at and limit > self.trials and not self.cut:
            each = max(1, (limit - self.trials) // (2 * len(at) if len(at) > 1 else 1))
            at = sorted((self._climb(*point, each) for point in at), key=lambda point: point[0])[:(len(at) + 1) // 2]

    def starts(self, limit: int) -> list[tuple[float, Choice]]:
        """Try so many starting points; returns the best, one for each crossings."""
        found: dict[Crossings, tuple[float, Choice]] = {}
        points = ((table, crossings, template) for table, crossings in candidates(self.instance, self.alignment)
                  for template in (_CHUNK_FIRST if self.instance.problem.placement else _FIRST))
        for table, crossings, template in islice(points, limit):
            choice = Choice(tuple(table), crossings, filled(self.instance, self.alignment, table, template))
            outcome = self._try(choice)
            if outcome < found.get(crossings, (float("inf"),))[0]:
                found[crossings] = outcome, choice
            if self.cut:
                break
        return sorted(found.values(), key=lambda point: point[0])[:_CLIMBS]

    def _climb(self, best: float, at: Choice, trials: int) -> tuple[float, Choice]:
        """Seeded changes; a change that does no harm is kept."""
        for _ in range(trials):
            choice = self._changed(at)
            outcome = self._try(choice)
            if outcome <= best:
                best, at = outcome, choice
            if self.cut:
                break
        return best, at

    def _try(self, choice: Choice) -> float:
        """The goal of a choice; inf if a helper has no memory for it."""
        self.trials += 1
        self.cut = self.cut or self.cancelled()
        table = list(choice.table)
        instance = spanned(self.instance, table, choice.crossings)
        if not roomy(instance, table):
            return float("inf")
        if choice.table not in self.away:
            self.away[choice.table] = guests(instance, self.alignment, table)
        away = self.away[choice.table]
        trace = schedule(instance, table, choice.rules,
                         (leading(instance, away, choice.lead_f), leading(instance, away, choice.lead_b)))
        outcome = objective(instance, table, trace)
        if outcome < self.target:
            self.target = outcome
            self.best = timed(self.instance, table, trace, choice.crossings)
            if self.better:
                self.better(self.best)
        return outcome

    # ---- seeded changes, which keep a choice legal

    def _changed(self, choice: Choice) -> Choice:
        """One change."""
        draw, kind = self.draw, self.draw.random()
        if kind < 0.4:
            return replace(choice, crossings=self._crossed(choice.crossings))
        if kind < 0.5:
            return replace(choice, lead_f=draw.choice(LEADS), lead_b=draw.choice(LEADS))
        unit = max(1, *self.instance.problem.before_b)
        return replace(choice, rules=mutated(choice.rules, draw, alike=kind < 0.6, unit=unit))

    def _crossed(self, crossings: Crossings) -> Crossings:
        """Some unit crosses a layer later or earlier, or two units change places at a boundary."""
        draw, rows, lend = self.draw, [list(row) for row in crossings], self.instance.problem.lend
        boundaries = [c for c, limit in enumerate(lend) if any(limit)]
        touched = set()
        for _ in range(draw.choice((1, 1, 2, 3))):
            c = draw.choice(boundaries)
            one = draw.choice(self.units)
            if draw.random() < 0.5:
                changes = [(one, rows[c][one[0]] + draw.choice((-1, 1)))]
            else:
                other = draw.choice(self.units)
                changes = [(one, rows[c][other[0]]), (other, rows[c][one[0]])]
            earlier, later = lend[c]
            if all(-earlier <= by <= later for _, by in changes):
                for unit, by in changes:
                    touched.add(unit)
                    for j in unit:
                        rows[c][j] = by
        if all(self._keeps(rows, unit[0]) for unit in touched):
            return tuple(map(tuple, rows))
        return crossings

    def _keeps(self, rows: Sequence[Sequence[int]], j: int) -> bool:
        """Whether each chunk keeps a layer of the job."""
        crossing = tuple(row[j] for row in rows)
        problem = self.instance.problem
        return all(-problem.more(c, crossing).get(c, 0) < (problem.layers[c] or 1) for c in range(problem.chunks))
