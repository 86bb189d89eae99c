"""Many greedy schedules, the best kept: rules that are known to do well, then a climb over the rules per stage.

The search is limited by work (actions scheduled), not by the clock, so that it is the same on every machine. Every
smaller cap is searched as if it were the problem's own, so that a raised cap never makes the outcome worse: a level is
left out only where its lower bound shows that it cannot win.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from megatron_recycle.planner.alignment import Alignment, aligned, natural
from megatron_recycle.planner.routing import DEALS, PICKS, cost, route
from megatron_recycle.planner.timing import objective, timed

from ..plan import Problem, lower_bound
from .greedy import Rules, guests, leading, schedule
from .instance import NO_CAP, Instance, Schedule


@dataclass(frozen=True)
class Template:
    """Rules for all stages; stages with guests run forwards first instead, with a backlog of weight gradients
    that is ``hot`` sixths of their cap, unless ``hot`` is 0."""

    base: Rules
    hot: int = 0


_PLAIN, _WAIT, _WAIT_F = Rules(), Rules(wait_b=50, wait_f=50), Rules(wait_f=50)
#: rules that do well on the benchmark's grids; the quick plan is the better of the first two
TEMPLATES = (
    Template(Rules(wait_b=50, wait_f=50, give_way=50, ways=2)),
    Template(_PLAIN, 3),
    Template(_WAIT_F, 4),
    Template(_PLAIN),
    Template(_WAIT, 3),
    Template(_WAIT),
    Template(Rules(wait_b=50, wait_f=50, give_way=75, ways=2)),
    Template(_PLAIN, 4),
    Template(_WAIT_F),
    Template(_PLAIN, 2),
    Template(Rules(wait_b=50, wait_f=50, give_way=50, ways=1)),
    Template(Rules(wait_b=50, wait_f=100)),
    Template(Rules(wait_b=50)),
    Template(Rules(forward_first=1)),
    Template(Rules(wait_b=50, wait_f=50, give_way=50, ways=3)),
    Template(Rules(drain=1)),
    Template(Rules(give_way=100, ways=1)),
)
#: rules that do well where a stage has several chunks: then all stages wait for forwards of later chunks
CHUNK_TEMPLATES = (
    Template(Rules(forward_first=1, drain=1)),
    Template(Rules(forward_first=1, wait_b=100, wait_f=50, backlog=2)),
    Template(Rules(forward_first=1, drain=1, wait_b=50, wait_f=50)),
    Template(Rules(forward_first=1, wait_b=50, wait_f=50, backlog=2)),
)
#: the same where chunks are interleaved: a micro-batch passes all other stages before it returns, and is awaited then
ROUND_TEMPLATES = (
    Template(Rules(forward_first=1, drain=1)),
    Template(Rules(give_way=100, ways=1)),
    Template(Rules(wait_b=50, wait_f=50, give_way=50, ways=2)),
    Template(_WAIT_F, 4),
    Template(_PLAIN, 3),
)
DOMAIN: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("forward_first", (0, 1)), ("drain", (0, 1)), ("wait_b", (0, 50, 100)), ("wait_f", (0, 50, 100)),
    ("give_way", (0, 50, 75, 100)), ("ways", (1, 2, 3, 1000)), ("backlog", (0, 1, 2, 3, 4, 6, 8)),
    ("reserve", (0, 1, 2, 4)),
)
LEADS = (-4, -2, -1, 0, 1, 2, 4, 8)

#: the search goes on to smaller caps until it has done the work of so many levels, or this many actions per level
LEVELS, MOST_PER_LEVEL = 3, 50_000
#: True when the search should end now (the clock's safety net, or a newer membership)
Cancelled = Callable[[], bool]


def templates(problem: Problem) -> tuple[Template, ...]:
    """The templates for a problem, best first."""
    if not problem.placement:
        return TEMPLATES
    turns = any(one == other for one, other in pairwise(problem.placement))
    return (*(CHUNK_TEMPLATES if turns else ROUND_TEMPLATES), *TEMPLATES)


@dataclass(frozen=True)
class Choice:
    """One point of the search: alignment, deal, leads of guest jobs, and rules per stage. Slow workers keep ``fewer``
    micro-batches less; ``pick`` says which they give away."""

    alignment: int
    deal: str
    fewer: int
    pick: str
    lead_f: int
    lead_b: int
    rules: tuple[Rules, ...]


@dataclass(frozen=True)
class Found:
    """The best schedule of a search, the trials it took, and whether the clock cut it short."""

    best: Schedule | None
    trials: int
    cut: bool


def goal(problem: Problem, schedule: Schedule) -> float:
    """The problem's objective of a schedule."""
    return schedule.makespan if problem.objective == "makespan" else schedule.period


def search(instance: Instance, work: int, seed: int = 0, cancelled: Cancelled = lambda: False,
           better: Callable[[Schedule], None] | None = None) -> Found:
    """Search every cap level within ``work`` scheduled actions per level; the given caps' level comes first."""
    best: Schedule | None = None
    target = 0.0
    trials, cut = 0, False
    floor = lower_bound(instance.problem)
    for level in levels(instance):
        if best is not None and (target <= floor or _floor(instance.problem, level) >= target):
            continue
        climb = _Climb(level, max(len(templates(instance.problem)), work // instance.actions), seed, floor)
        for choice_value, found in climb.run():
            if cancelled():
                cut = True
                break
            if best is None or choice_value < target:
                target = choice_value
                best = timed(instance, *found)
                if better:
                    better(best)
        trials += climb.trials
        if cut or trials * instance.actions > LEVELS * max(work, MOST_PER_LEVEL):
            break
    return Found(best, trials, cut)


def levels(instance: Instance) -> Iterator[Instance]:
    """The instance with its caps, then with every cap cut to each smaller number that holds a micro-batch."""
    count = len(instance.jobs)
    most = [min(cap, hold * count) for cap, hold in zip(instance.cap, instance.hold)]
    top = max(most)
    yield instance
    for limit in range(top - 1, max(instance.hold, default=1) - 1, -1):
        yield replace(instance, cap=[min(cap, limit) for cap in instance.cap])


def _floor(problem: Problem, level: Instance) -> int:
    """Lower bound of a level."""
    caps = {worker: cap for worker, cap in zip(level.workers, level.cap) if cap < NO_CAP}
    return lower_bound(replace(problem, cap={**problem.cap, **caps}))


class _Climb:
    """Trials on one instance: templates first, then seeded changes of the best choice so far."""

    def __init__(self, instance: Instance, limit: int, seed: int, floor: int) -> None:
        self.instance, self.limit, self.floor = instance, limit, floor
        self.random = random.Random(seed)
        self.alignments: list[Alignment] = [aligned(instance)]
        other = natural(instance)
        if other.home != self.alignments[0].home:
            self.alignments.append(other)
        self.uneven = any(len({cost(instance, w) for w in row}) > 1 for row in instance.at)
        self.routes: dict[tuple[int, str, int, str], tuple[list[int], set[int]]] = {}
        self.seen: set[Choice] = set()
        self.at: Choice | None = None  # the best choice
        self.trials = 0
        self.idle = 0  # choices in a row that were tried before

    def run(self) -> Iterator[tuple[float, tuple[list[int], list[int]]]]:
        """Value and (route, trace) of every trial that is as good as the best so far."""
        best = float("inf")
        for choice in chain(self._starts(), self._changes()):
            outcome = self._try(choice)
            if outcome is None:
                continue
            result, found = outcome
            if result <= best:
                best, self.at = result, choice
                yield result, found
            if best <= self.floor:
                return

    def _changes(self) -> Iterator[Choice]:
        """Seeded changes of the best choice so far."""
        while self.at is not None and self.trials < self.limit and self.idle < 200:
            yield self._changed(self.at)

    def _starts(self) -> Iterator[Choice]:
        """The starting points, a fixed list whose length the limit may cut."""
        for template in templates(self.instance.problem):
            for deal in DEALS[:2]:
                for fewer in (0, 1, 2) if self.uneven else (0,):
                    for alignment in range(len(self.alignments)):
                        if self.trials < self.limit:
                            table, _ = self._route(alignment, deal, fewer, PICKS[0])
                            rules = filled(self.instance, self.alignments[alignment], table, template)
                            yield Choice(alignment, deal, fewer, PICKS[0], 0, 0, rules)

    def _changed(self, at: Choice) -> Choice:
        draw = self.random
        kind = draw.random()
        if kind < 0.2:
            at = replace(at, deal=draw.choice(DEALS), lead_f=draw.choice(LEADS), lead_b=draw.choice(LEADS))
            if kind < 0.05:
                at = replace(at, alignment=draw.randrange(len(self.alignments)),
                             fewer=draw.choice((0, 1, 2, 3)) if self.uneven else 0)
            if kind < 0.1 and self.uneven:
                at = replace(at, pick=draw.choice(PICKS))
        return replace(at, rules=mutated(at.rules, draw, alike=kind < 0.35))

    def _route(self, number: int, deal: str, fewer: int, pick: str) -> tuple[list[int], set[int]]:
        """The route of an alignment, and its guest jobs."""
        key = (number, deal, fewer, pick)
        if key not in self.routes:
            alignment = self.alignments[number]
            table = route(self.instance, alignment, deal, fewer, pick)
            self.routes[key] = table, guests(self.instance, alignment, table)
        return self.routes[key]

    def _try(self, choice: Choice) -> tuple[float, tuple[list[int], list[int]]] | None:
        """Schedule a choice, unless it was tried before."""
        if choice in self.seen:
            self.idle += 1
            return None
        self.idle = 0
        self.seen.add(choice)
        self.trials += 1
        instance = self.instance
        table, away = self._route(choice.alignment, choice.deal, choice.fewer, choice.pick)
        keys = leading(instance, away, choice.lead_f), leading(instance, away, choice.lead_b)
        trace = schedule(instance, table, choice.rules, keys)
        return objective(instance, table, trace), (table, trace)


def mutated(rules: Sequence[Rules], draw: random.Random, alike: bool, unit: int = 2) -> tuple[Rules, ...]:
    """Seeded changes of the rules of a few stages, or one, ``alike`` in all stages. ``unit``: memory units of a
    micro-batch, by half of which reserves grow."""
    def change() -> dict[str, int]:
        name, domain = draw.choice(DOMAIN)
        setting = draw.choice(domain)
        return {name: setting * unit // 2 if name == "reserve" else setting}

    if alike:
        same = change()
        return tuple(replace(rule, **same) for rule in rules)
    found = list(rules)
    for _ in range(draw.choice((1, 1, 2, 3))):
        s = draw.randrange(len(found))
        found[s] = replace(found[s], **change())
    return tuple(found)


def filled(instance: Instance, alignment: Alignment, table: list[int], template: Template) -> tuple[Rules, ...]:
    """A template's rules for every stage of a route."""
    count = len(instance.jobs)
    rules = []
    for s, home in enumerate(alignment.home):
        homes = [home[d] for d in alignment.label]
        if not template.hot or all(table[chunk * count:(chunk + 1) * count] == homes
                                   for chunk in instance.problem.chunks_of[s]):
            rules.append(template.base)
            continue
        cap = min(instance.cap[w] // max(1, instance.hold[w]) for w in alignment.at[s])
        backlog = max(1, min(cap, count) * template.hot // 6)
        rules.append(replace(template.base, forward_first=1, backlog=backlog))
    return tuple(rules)


def run(instance: Instance, template: Template, alignment: Alignment | None = None) -> Schedule:
    """One greedy schedule by a template."""
    alignment = alignment or aligned(instance)
    table = route(instance, alignment)
    return timed(instance, table, schedule(instance, table, filled(instance, alignment, table, template)))


def one_by_one(instance: Instance, alignment: Alignment | None = None) -> Schedule:
    """Schedule in which no worker holds more than one micro-batch at a time, and all take them in the same order. No
    message is sent early, so every cap that holds a micro-batch suffices."""
    table = route(instance, alignment or aligned(instance))
    if instance.problem.placement:
        trace = _in_turn(instance)
    else:
        trace = schedule(instance, table, [Rules(reserve=NO_CAP)] * instance.stages, strict=True)
    return timed(instance, table, trace)


def _in_turn(instance: Instance) -> list[int]:
    """Each job through all chunks and back before the next job: all jobs take a stage's chunks in the same order."""
    count = len(instance.jobs)
    nodes = count * instance.chunks
    trace: list[int] = []
    for j in range(count):
        trace += range(j, nodes, count)
        for node in range(nodes - count + j, -1, -count):
            trace += [nodes + node, 2 * nodes + node] if instance.problem.split_backward else [nodes + node]
    return trace
