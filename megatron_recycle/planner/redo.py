"""The rest of an iteration after a failure: survivors keep their done actions, and the dead workers' share is dealt to
their peers.

A micro-batch that a live worker has begun in a chunk stays with it there. All else is dealt to the live workers of each
stage so that their remaining work is level. Then it is scheduled as a first plan is (`greedy`), from every worker's
current progress.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan import Action, Plan, Problem, Worker, figured, overfull, surplus
from .alignment import Unit, aligned, units
from .greedy import Begun, Rules, leading, schedule
from .instance import KINDS, Instance, build, crossings_of, orders_of, roomy, spanned
from .portfolio import filled, templates
from .timing import clock

#: templates are tried until they have scheduled so many actions, and two schedules are made in any case
MOST = 10_000
#: schedules, each with more memory kept for messages that the previous one sent early
ROUNDS = 3


def redo(base: Plan, done: Mapping[Worker, Sequence[Action]], closed: Collection[int] = (),
         lent: Plan | None = None) -> Plan | None:
    """A legal plan for the rest of an iteration: live workers have ``done`` these actions, in this order, and other
    workers none. ``base`` is a legal plan for the membership from now on; if its lists begin with the done actions, it
    is used as it is. None where there is no such plan, and the iteration has to begin again.

    Stages that are ``closed`` hold the iteration's gradient: none of their actions is run again. The plan lists their
    dead workers' actions as done by a peer. None if a message that only a dead worker had made is still to be read.

    ``lent``: the plan by which they were done, where that lends layers. All micro-batches keep its crossings, as sums
    of gradients cannot be parted again. Otherwise no ``done`` action may have run a lent layer, and the rest lends
    none, even if ``base`` does. Nothing here is random.
    """
    begin = time.perf_counter()
    lends = bool(base.crossings) or lent is not None
    if lent is not None:
        if closed or not _goes_on(base.problem, lent.problem):
            return None
        base = replace(base, problem=_without(lent.problem, base.problem))
    if lends:
        base = replace(base, crossings={} if lent is None else lent.crossings, stated="")
    if closed:
        listed = _completed(base, done, closed)
        if listed is None:
            return None
        done = listed
    begun = {worker: tuple(actions) for worker, actions in done.items() if actions}
    counts = {worker: len(actions) for worker, actions in begun.items()}
    if not lends and (
            all(base.workers.get(worker, ())[:len(actions)] == actions for worker, actions in begun.items())
            and all(counts.get(worker, 0) >= count for worker, count in base.done.items())):
        return base if counts == base.done else _timed(replace(base, done=counts), begin)
    kept: dict[Worker, int] = {}
    for _ in range(ROUNDS):
        plans = _listed(base, begun, kept)
        if fit := next((plan for plan in plans if not overfull(plan)), None):
            return _timed(fit, begin)
        if not plans:
            return None
        more = min(map(surplus, plans), key=lambda counts: sum(counts.values()))
        kept = {worker: max(count, kept.get(worker, 0)) for worker, count in {**kept, **more}.items()}
    return None


def _goes_on(now: Problem, then: Problem) -> bool:
    """Whether a plan of the problem ``then`` can go on in ``now``: some of its workers may be dead, and all else is the
    same."""
    return (now.grid == then.grid and now.placement == then.placement and now.block == then.block
            and now.split_backward == then.split_backward and set(then.failed) <= set(now.failed))


def _without(then: Problem, now: Problem) -> Problem:
    """The problem ``then`` for the workers of ``now``."""
    return replace(then, failed=now.failed, cap={
        worker: cap for worker, cap in then.cap.items() if worker not in now.failed})


def _completed(base: Plan, done: Mapping[Worker, Sequence[Action]],
               closed: Collection[int]) -> dict[Worker, tuple[Action, ...]] | None:
    """``done`` with all actions of the ``closed`` stages. None: a message of a stage that is not run again is still to
    be read, or a live worker of a closed stage has an action left."""
    problem = base.problem
    kinds = "FBW" if problem.split_backward else "FB"
    ended: dict[tuple[int, int, int], str] = {}
    """Kinds of done actions by pipeline, micro-batch and chunk."""
    for worker, actions in done.items():
        for kind, d, m, place in actions:
            node = d, m, problem.chunks_of[worker.stage][place]
            ended[node] = ended.get(node, "") + ("BW" if kind == "FB" else kind)
    found = {worker: tuple(actions) for worker, actions in done.items()}
    lost: list[tuple[int, int, int]] = []
    for stage in closed:
        heir = problem.live(stage)[0]
        for chunk in problem.chunks_of[stage]:
            for d, m in problem.grid.items():
                if (d, m, chunk) not in ended:
                    lost.append((d, m, chunk))
                    found[heir] = (*found.get(heir, ()), *(
                        Action(kind, d, m, problem.place_of[chunk]) for kind in kinds))
                elif set(ended[d, m, chunk]) < set(kinds):
                    return None
        if problem.block and heir in found:
            found[heir] = tuple(sorted(found[heir], key=lambda action: (kinds.index(action.kind), *action[1:])))
    ended.update(dict.fromkeys(lost, kinds))
    for d, m, chunk in lost:
        if chunk + 1 < problem.chunks and "F" not in ended.get((d, m, chunk + 1), ""):
            return None
        if chunk and "B" not in ended.get((d, m, chunk - 1), ""):
            return None
    return found


def _listed(base: Plan, done: Mapping[Worker, tuple[Action, ...]], kept: Mapping[Worker, int]) -> list[Plan]:
    """A few greedy schedules, the best first, without their figures and with memory ``kept`` for messages that are sent
    early. Empty: no worker may take some block, or memories are full."""
    # Without guests a first plan keeps the order of micro-batches, though only blocks need it.
    instance = replace(build(base.problem, kept), ordered=base.problem.block > 0)
    standing = _standing(instance, done)
    route = None if standing is None else _routed(instance, base, standing)
    if standing is None or route is None:
        return []
    if base.crossings:
        instance = spanned(instance, route, crossings_of(instance, base))
        if _to_itself(instance, route) or not roomy(instance, route):
            return []
    traces = [trace for rules, keys in _ways(instance, route, standing)
              if len(trace := schedule(instance, route, rules, keys, begun=standing.begun)) == standing.left]
    traces.sort(key=lambda trace: clock(instance, route, trace).makespan())
    count = len(traces) if any(base.problem.message) else 1  # without early messages they differ in time alone
    return [Plan(problem=base.problem, workers=orders_of(instance, route, trace, done), period=0, makespan=0,
                 lower_bound=0, source="greedy", crossings=base.crossings,
                 done={worker: len(actions) for worker, actions in done.items()})
            for trace in traces[:count]]


def _to_itself(instance: Instance, route: Sequence[int]) -> bool:
    """Whether some worker would lend layers to itself."""
    count, spans = len(instance.jobs), instance.spans
    return spans is not None and any(
        by and route[chunk * count + j] == route[(chunk + 1) * count + j]
        for chunk, row in enumerate(spans.crossings) for j, by in enumerate(row))


def _timed(plan: Plan, begin: float) -> Plan:
    return replace(figured(plan), stats={"first_seconds": round(time.perf_counter() - begin, 6)})


@dataclass(frozen=True)
class _Standing:
    """Progress of every worker. ``begun``: its done actions. ``at``: the worker that has begun each node (-1: none).
    ``latest``: the last micro-batch done, by kind, worker, chunk and pipeline. ``left``: number of actions left."""

    begun: Begun
    at: list[int]
    latest: dict[tuple[str, int, int, int], int]
    left: int


def _standing(instance: Instance, done: Mapping[Worker, Sequence[Action]]) -> _Standing | None:
    """The workers' progress. None where no worker of a legal plan can have ``done`` this."""
    problem, count, number, job = instance.problem, len(instance.jobs), instance.number, instance.job
    split = problem.split_backward
    steps = {"F": (0, 1), "B": (1, 2), "W": (2, 3), "FB": (1, 3)} if split else {"F": (0, 1), "B": (1, 3)}
    progress, at, actions = bytearray(count * instance.chunks), [-1] * (count * instance.chunks), 0
    late: list[dict[int, None]] = [{} for _ in instance.workers]
    latest: dict[tuple[str, int, int, int], int] = {}
    inside: dict[tuple[str, int, int, int, int], int] = {}
    """The last micro-batch done, also by block."""
    for worker, listed in done.items():
        if worker not in number:
            return None
        w, chunks = number[worker], problem.chunks_of[worker.stage]
        for kind, d, m, place in listed:
            if (d, m) not in job or kind not in steps or not 0 <= place < len(chunks):
                return None
            node, (before, after) = chunks[place] * count + job[d, m], steps[kind]
            if progress[node] != before or (before and at[node] != w):
                return None
            if kind == "FB" and chunks[place] not in problem.full_backward:
                return None
            for half in ("B", "W") if kind == "FB" else (kind,):
                key = half, w, chunks[place], d
                latest[key] = max(m, latest.get(key, -1))
                if instance.ordered and half != "F":
                    of_block = (*key, m // problem.block)
                    if inside.get(of_block, -1) > m:
                        return None
                    inside[of_block] = m
            progress[node], at[node] = after, w
            actions += after - before if split else 1
            if after == 2:
                late[w][node] = None
            elif after == 3:
                late[w].pop(node, None)
    begun = Begun(progress, [tuple(due) for due in late], actions)
    return _Standing(begun, at, latest, instance.actions - actions)


def _routed(instance: Instance, base: Plan, standing: _Standing) -> list[int] | None:
    """The worker of every node. None: no worker may take some block."""
    count = len(instance.jobs)
    table = [-1] * (count * instance.chunks)
    for (d, m, chunk), worker in base.route().items():
        table[chunk * count + instance.job[d, m]] = instance.number[worker]
    whole = [unit for crew in units(instance) for unit in crew]
    for stage in range(instance.stages):
        if not _dealt(instance, stage, whole, standing, table):
            return None
    return table


def _dealt(instance: Instance, stage: int, whole: Sequence[Unit], standing: _Standing, table: list[int]) -> bool:
    """Deal a stage's micro-batches, or blocks; ``table`` holds each one's preferred worker. Begun ones stay with their
    worker. The others keep theirs, the first ones first, as far as the remaining work stays level; the rest goes to the
    worker with least work. False: no worker may take some block."""
    problem, count = instance.problem, len(instance.jobs)
    lengths = {chunk: {w: _left(instance, w, chunk) for w, other in enumerate(instance.stage) if other == stage}
               for chunk in problem.chunks_of[stage]}
    load = {w: 0 for w, other in enumerate(instance.stage) if other == stage}
    free: list[tuple[int, int, Unit]] = []
    for chunk in problem.chunks_of[stage]:
        for unit in whole:
            homes = {standing.at[chunk * count + j] for j in unit.jobs} - {-1}
            if not homes:
                free.append((unit.jobs[0], chunk, unit))
            elif len(homes) > 1:
                return False
            for w in homes:
                for node in (chunk * count + j for j in unit.jobs):
                    table[node] = w
                    load[w] += lengths[chunk][w][standing.begun.progress[node]]

    def after(w: int, chunk: int, unit: Unit) -> int:
        """Work that ``w`` would have left with this unit."""
        return load[w] + lengths[chunk][w][0] * len(unit.jobs)

    def later(kind: str, w: int, chunk: int, unit: Unit) -> bool:
        """Whether a worker has done a later micro-batch of an ordered pipeline already."""
        return instance.ordered and (
            standing.latest.get((kind, w, chunk, unit.pipeline), -1) > instance.jobs[unit.jobs[0]][1])

    free.sort(key=lambda each: each[:2])
    level = _level([load[w] for w in instance.at[stage]], sum(
        lengths[chunk][table[chunk * count + first]][0] * len(unit.jobs) for first, chunk, unit in free))
    for keep in (True, False):
        rest: list[tuple[int, int, Unit]] = []
        for first, chunk, unit in free:
            best = table[chunk * count + first]
            if keep:
                if after(best, chunk, unit) > level or later("F", best, chunk, unit):
                    rest.append((first, chunk, unit))
                    continue
            else:  # a block that comes after a later one is summed apart (`plan.pieces`)
                best = min(instance.at[stage], key=lambda w: (
                    later("B", w, chunk, unit), later("F", w, chunk, unit), after(w, chunk, unit), w != best, w))
            for j in unit.jobs:
                table[chunk * count + j] = best
            load[best] = after(best, chunk, unit)
        free = rest
    return True


def _left(instance: Instance, w: int, chunk: int) -> tuple[int, int, int, int]:
    """Time that a worker has left for a micro-batch in a chunk, by progress."""
    worker, place = instance.workers[w], instance.problem.place_of[chunk]
    f, b, later = (instance.problem.duration(kind, worker, place) for kind in KINDS)
    later = later if instance.problem.split_backward else 0
    return f + b + later, b + later, later, 0


def _level(loads: Sequence[int], work: int) -> int:
    """The level to which so much work fills these loads."""
    loads, below = sorted(loads), 0
    for count, load in enumerate(loads, 1):
        below += load
        level = -(-(below + work) // count)
        if count == len(loads) or level <= loads[count]:
            break
    return level


def _ways(instance: Instance, route: list[int],
          standing: _Standing) -> Iterator[tuple[tuple[Rules, ...], tuple[list[int], list[int]]]]:
    """Rules and keys of a few schedules (`greedy.schedule`): first with actions last that no worker waits for, then all
    in their usual order, since with full memories late micro-batches leave workers idle."""
    alignment, plain, late = aligned(instance), leading(instance, set(), 0), _late(instance, standing)
    tries = max(2, MOST // max(1, standing.left))
    for template in templates(instance.problem)[:min(3, tries // 2)]:
        rules = filled(instance, alignment, route, template)
        if late is not None:
            yield rules, late
        yield rules, (plain, plain)


def _late(instance: Instance, standing: _Standing) -> tuple[list[int], list[int]] | None:
    """Keys of F and B that put last each micro-batch that had come back from a dead worker: the chunk before has its
    gradient, and the chunk behind its activation. None: no such micro-batch."""
    progress, count = standing.begun.progress, len(instance.jobs)
    nodes = len(progress)
    plain, last = leading(instance, set(), 0), 1 << 2 * nodes.bit_length()
    back = [node < count or progress[node - count] >= 2 for node in range(nodes)]
    idle = [node for node in range(nodes - count) if back[node] and progress[node + count] and not progress[node]]
    if not idle:
        return None
    first, then = [*plain], [*plain]
    for node in idle:
        first[node] += last
    for node in range(nodes):
        then[node] += last * back[node]
    return first, then
