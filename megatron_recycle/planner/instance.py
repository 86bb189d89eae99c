"""A problem as flat integer arrays, which the schedulers read instead of names and dictionaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_recycle.planner.merge_bw import merged

from ..plan import STEP, Action, Plan, Problem, Worker
from ..plan.replay import in_order_of_ends
from .crossing_flow import Crossings

KINDS = "FBW"
_NUMBERS = {"F": (0,), "B": (1,), "W": (2,), "FB": (1, 2)}
NO_CAP = 1 << 60
"""Cap of a worker without a cap."""


@dataclass(frozen=True)
class Spans:
    """Changes by lent layers, by node: times and memory of its F, B and W (their spans are not whole chunks).
    ``gates``: the groups of stages whose layers a node borrows; its F waits for their step, and they for its worker."""

    crossings: Crossings
    forward: list[int]
    backward: list[int]
    weight: list[int]
    before: list[int]
    keep: list[int]
    gates: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Instance:
    """A problem by numbers: of jobs, nodes and workers.

    ``jobs[j]`` is a (pipeline, micro-batch), in the order in which they enter the pipelines. A *node* ``chunk *
    len(jobs) + j`` is a job in a chunk. Lists about workers are indexed by their numbers; their figures for a
    micro-batch are sums over the worker's chunks."""

    problem: Problem
    jobs: list[tuple[int, int]]
    workers: list[Worker]
    stage: list[int]
    forward: list[int]
    backward: list[int]
    weight: list[int]
    cap: list[int]
    hold: list[int]  # units from F's start to B's end, enough that no later action needs more
    at: list[list[int]]  # usable workers of each stage
    home: list[list[int]]  # per stage and pipeline the home worker, -1 if it is out
    ordered: bool  # B and W of one pipeline in micro-batch order on every worker
    spans: Spans | None = None  # None: every micro-batch crosses every boundary at home
    known: dict[tuple[int, int, int, int], tuple[int, int, int, int, int]] = field(default_factory=dict)  # see spanned

    @cached_property
    def job(self) -> dict[tuple[int, int], int]:
        """The number of each job."""
        return {item: j for j, item in enumerate(self.jobs)}

    @cached_property
    def number(self) -> dict[Worker, int]:
        """The number of each worker."""
        return {worker: w for w, worker in enumerate(self.workers)}

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.problem.grid.stages

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.problem.chunks

    @property
    def actions(self) -> int:
        """Number of F, B and W actions of a plan."""
        return self.chunks * len(self.jobs) * (3 if self.problem.split_backward else 2)

    def lengths(self, route: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Times of F, B and W of every node."""
        if self.spans:
            return self.spans.forward, self.spans.backward, self.spans.weight
        forward, backward, weight = (self._of(kind, route) for kind in KINDS)
        return forward, backward, weight

    def _of(self, kind: str, route: Sequence[int]) -> list[int]:
        """The time of one kind of every node."""
        problem, count, found = self.problem, len(self.jobs), []
        for chunk in range(self.chunks):
            crew = route[chunk * count:(chunk + 1) * count]
            each = {w: problem.duration(kind, self.workers[w], problem.place_of[chunk]) for w in set(crew)}
            found += [each[w] for w in crew]
        return found

    def lags(self, route: Sequence[int]) -> list[int]:
        """Latency of every node's activation, and of its gradient on the way back: none between two chunks of one
        worker."""
        hop, count = self.problem.costs.hop, len(self.jobs)
        return [0] * count + [0 if one == other else hop for one, other in zip(route, route[count:])]

    def held(self, route: Sequence[int]) -> tuple[list[int], list[int]]:
        """Units that every node holds from F's start to B's end, and from there to W's end."""
        if self.spans:
            return self.spans.before, self.spans.keep
        both = [self.problem.held(chunk) for chunk in range(self.chunks)]
        before, keep = ([units for units in row for _ in self.jobs] for row in zip(*both))
        return before, keep

    def needs(self, hold: list[int]) -> list[int]:
        """Units that every node's F must find free: its own (``hold``), and those of one micro-batch in each later
        chunk of its stage. So a micro-batch that returns to the stage finds room, and nothing can deadlock."""
        problem, count = self.problem, len(self.jobs)
        most = [max(hold[chunk * count:(chunk + 1) * count]) for chunk in range(self.chunks)]
        need: list[int] = []
        for chunk in range(self.chunks):
            later = sum(most[other] for other in problem.chunks_of[problem.stage_of(chunk)] if other > chunk)
            need += [units + later for units in hold[chunk * count:(chunk + 1) * count]]
        return need

    def weights(self, route: Sequence[int]) -> tuple[list[int], list[int]]:
        """As `held`, with enough from F's start on that no later action needs more."""
        before, keep = self.held(route)
        return [*map(max, before, keep)], keep


def build(problem: Problem, surplus: Mapping[Worker, int] | None = None) -> Instance:
    """Flatten a problem. Raises PlanError if a stage has no usable worker.

    ``surplus``: receives beyond the usual ones that a worker keeps memory for (default: none).
    """
    problem.require_live()
    grid = problem.grid
    longest = max(grid.microbatches)
    if all(count == longest for count in grid.microbatches):
        jobs = [(d, m) for m in range(longest) for d in range(grid.pipelines)]
    else:
        jobs = sorted(grid.items(), key=lambda x: (x[1] * longest // grid.microbatches[x[0]], x[0]))
    workers = list(problem.live_workers())
    usable = {worker: w for w, worker in enumerate(workers) if problem.fits(worker)}
    home = [[usable.get(Worker(d, s), -1) for d in range(grid.pipelines)] for s in range(grid.stages)]

    def durations(kind: str) -> list[int]:
        return [sum(problem.duration(kind, worker, place) for place in range(len(problem.chunks_of[worker.stage])))
                for worker in workers]

    return Instance(
        problem=problem, jobs=jobs, workers=workers, stage=[worker.stage for worker in workers],
        forward=durations("F"), backward=durations("B"), weight=durations("W"),
        cap=[_room(problem, worker, (surplus or {}).get(worker, 0)) for worker in workers],
        hold=[problem.weight(worker.stage) for worker in workers],
        at=[[w for worker, w in usable.items() if worker.stage == s] for s in range(grid.stages)], home=home,
        # without guests a job keeps the stock engine's order, and with it its bits
        ordered=problem.block > 0 or not (problem.failed or problem.costs.speed
                                          or len(set(grid.microbatches)) > 1))


def spanned(instance: Instance, route: Sequence[int], crossings: Crossings) -> Instance:
    """The instance with these crossings on this route; lent layers weigh on their helpers' caps."""
    plain = replace(instance, spans=None)
    if not any(map(any, crossings)):
        return plain
    problem, count, known = instance.problem, len(instance.jobs), instance.known
    (forward, backward, weight), (before, keep) = plain.lengths(route), plain.held(route)
    gates: dict[int, set[int]] = {}
    held: dict[tuple[int, int, bool], int] = {}
    for chunk in range(problem.chunks):
        ahead = crossings[chunk - 1] if chunk else (0,) * count
        behind = crossings[chunk] if chunk < len(crossings) else (0,) * count
        for j, (first, last) in enumerate(zip(ahead, behind)):
            if not (first or last):
                continue
            node = chunk * count + j
            w = route[node]
            key = chunk, first, last, w
            if key not in known:
                known[key] = _span(problem, instance.workers[w], chunk, first, last)
            forward[node], backward[node], weight[node], before[node], keep[node] = known[key]
            for borrows, other, layers in ((first < 0, chunk - 1, -first), (last > 0, chunk + 1, last)):
                if borrows:
                    gates.setdefault(node, set()).add(problem.group[problem.stage_of(other)])
                    held[w, other, other < chunk] = max(layers, held.get((w, other, other < chunk), 0))
    cap = list(instance.cap)
    for (w, other, _), layers in held.items():
        if cap[w] < NO_CAP:
            cap[w] -= layers * problem.layer_parameters[other]
    return replace(instance, cap=cap, spans=Spans(
        crossings, forward, backward, weight, before, keep, {node: tuple(sorted(of)) for node, of in gates.items()}))


def _span(problem: Problem, worker: Worker, chunk: int, first: int, last: int) -> tuple[int, int, int, int, int]:
    """Times of F, B and W of a span of ``chunk``, and its memory, where a micro-batch crosses the boundary before the
    chunk ``first`` layers later and the one behind it ``last``."""
    crossing = [0] * (problem.chunks - 1)
    if chunk:
        crossing[chunk - 1] = first
    if chunk < len(crossing):
        crossing[chunk] = last
    f, b, w = (problem.duration(kind, worker, problem.place_of[chunk], tuple(crossing)) for kind in KINDS)
    before, after = problem.held(chunk, tuple(crossing))
    return f, b, w, before, after


def roomy(instance: Instance, route: Sequence[int]) -> bool:
    """Whether every worker has memory for each of its nodes, one micro-batch at a time."""
    return all(units <= instance.cap[w] for units, w in zip(instance.needs(instance.weights(route)[0]), route))


def _room(problem: Problem, worker: Worker, surplus: int) -> int:
    """Units that a worker has for micro-batches."""
    if worker not in problem.cap:
        return NO_CAP
    return problem.cap[worker] - problem.message_weight(worker.stage) * surplus


@dataclass(frozen=True)
class Schedule:
    """A legal order: ``route[node]`` is the worker, ``trace`` every action as ``kind * nodes + node`` in an order in
    which each can be timed. A worker's order is that of its actions in the trace. ``crossings``: as for `spanned`."""

    route: list[int]
    trace: list[int]
    period: float
    makespan: int
    crossings: Crossings = ()


def plan_of(instance: Instance, schedule: Schedule, bound: float, source: str,
            stats: dict[str, object] | None = None) -> Plan:
    """The schedule as a plan."""
    return Plan(problem=instance.problem, workers=orders_of(instance, schedule.route, schedule.trace),
                period=schedule.period, makespan=schedule.makespan, lower_bound=bound, source=source,
                stats=stats or {}, crossings=dict(zip(instance.jobs, zip(*schedule.crossings))))


def orders_of(instance: Instance, route: list[int], trace: list[int],
              done: Mapping[Worker, Sequence[Action]] | None = None) -> dict[Worker, tuple[Action, ...]]:
    """Per worker its ``done`` actions (default: none) and those of a trace, in order, with full backwards where they
    may be, and ``S``."""
    count, place_of = len(instance.jobs), instance.problem.place_of
    nodes = count * instance.chunks
    places = [[[Action(kind, d, m, place) for d, m in instance.jobs] for kind in KINDS]
              for place in range(max(place_of) + 1)]
    named = [places[place] for place in place_of]
    done = done or {}
    listed = [[*done.get(worker, ())] for worker in instance.workers]
    for code in trace:
        kind, node = divmod(code, nodes)
        listed[route[node]].append(named[node // count][kind][node % count])
    return {worker: (*merged(instance.problem, worker, listed[w], len(done.get(worker, ()))), STEP)
            for w, worker in enumerate(instance.workers)}


def schedule_of(instance: Instance, plan: Plan) -> tuple[list[int], list[int]]:
    """Route and trace of a legal plan for the same problem."""
    count = len(instance.jobs)
    nodes = count * instance.chunks
    route, trace = [-1] * nodes, []
    for worker, action in in_order_of_ends(plan):
        node = plan.chunk(worker, action) * count + instance.job[action[1:3]]
        route[node] = instance.number[worker]
        trace += [number * nodes + node for number in _NUMBERS[action.kind]]
    return route, trace


def crossings_of(instance: Instance, plan: Plan) -> Crossings:
    """The crossings of a plan; () if all are at home."""
    home = (0,) * (instance.problem.chunks - 1)
    return tuple(zip(*(plan.crossing(d, m) or home for d, m in instance.jobs))) if plan.crossings else ()


def needed(code: int, count: int, nodes: int) -> int:
    """The action whose result action ``code`` needs, negative for none, of ``count`` jobs in so many ``nodes``."""
    kind, node = divmod(code, nodes)
    if kind == 1:
        return code + count if node + count < nodes else node
    return node - count if kind == 0 else code - nodes
