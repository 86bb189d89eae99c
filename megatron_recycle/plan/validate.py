"""Every rule of the plan file, checked one by one, independently of the planner; violations are named."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_recycle.plan.messages import surplus

from .action import Action
from .bounds import bound_of
from .errors import DeadlockError, PlanError
from .grid import Worker
from .plan import Plan
from .problem import Problem
from .replay import borrowed_units, memory, replay

#: most violations of one rule that are spelled out
SHOWN = 20
_HALVES = {"FB": ("B", "W")}


def violations(plan: Plan) -> list[str]:
    """All rule violations of the plan, each as ``rule: what is wrong``; an empty list is a legal plan.

    Also checks the figures that the file states: period, makespan, bound and digest.
    """
    # Actions of unknown chunks and workers cannot be checked, nor the memory of messages that nobody sends.
    for rules in ((_chunks,), (_membership,), (_once, _full, _steps, _local_order, _crossings, _blocks), (_memory,)):
        if found := [text for rule in rules for text in _shown([*rule(plan)])]:
            return found
    try:
        timeline = replay(plan)
    except DeadlockError as error:
        return [str(error)]
    for name, stated, true in (("period", plan.period, timeline.period),
                               ("makespan", plan.makespan, timeline.makespan)):
        if abs(stated - true) > 1e-6 * max(1.0, true):
            found.append(f"{name}: the plan says {stated}, its orders take {true}")
    if plan.lower_bound > plan.objective_value + 1e-6:
        found.append(f"bound: {plan.lower_bound} is above the plan's own {plan.objective_value}")
    if plan.lower_bound < bound_of(plan):
        found.append(f"bound: the plan says {plan.lower_bound}, {bound_of(plan)} can be shown")
    if plan.stated and plan.stated != plan.digest:
        found.append(f"digest: the plan says {plan.stated}, its content is {plan.digest}")
    return found


def _shown(found: list[str]) -> list[str]:
    """The violations of one rule, if there are too many then only the first ones and how many more there are."""
    more = len(found) - SHOWN
    return [*found[:SHOWN], f"{found[0].split(':')[0]}: {more} more"] if more > 0 else found


def check(plan: Plan) -> Plan:
    """Return the plan if it is legal. Raises PlanError with the first violation (and how many there are)."""
    found = violations(plan)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PlanError(f"illegal plan: {found[0]}{more}")
    return plan


def _chunks(plan: Plan) -> Iterator[str]:
    for worker, actions in sorted(plan.workers.items()):
        held = len(plan.problem.chunks_of[worker.stage]) if worker in plan.problem.grid else 1
        if beyond := next((action for action in actions if not 0 <= action.chunk < held), None):
            yield f"chunk: {beyond} of worker {worker}, whose stage has {held} chunk{'s' if held > 1 else ''}"


def _membership(plan: Plan) -> Iterator[str]:
    live = set(plan.problem.live_workers())
    for worker in sorted(live - set(plan.workers)):
        yield f"listed: live worker {worker} has no orders (an idle one has S alone)"
    for worker in sorted(set(plan.workers) - live):
        why = "is failed" if worker in plan.problem.grid else "is outside the grid"
        yield f"listed: worker {worker} {why} but has orders"


def _once(plan: Plan) -> Iterator[str]:
    problem, grid = plan.problem, plan.problem.grid
    kinds = "FBW" if problem.split_backward else "FB"
    where: dict[tuple[str, int, int, int], list[Worker]] = {}
    for worker, actions in sorted(plan.workers.items()):
        if worker not in grid:
            continue
        for action in actions:
            if action.kind == "S":
                continue
            halves = _HALVES.get(action.kind, (action.kind,))
            if halves[-1] not in kinds:
                yield f"once: {action} of worker {worker}, but this plan does not split the backward"
            elif not (0 <= action.pipeline < grid.pipelines
                      and 0 <= action.microbatch < grid.microbatches[action.pipeline]):
                yield f"once: {action} of worker {worker} is outside the grid"
            else:
                for kind in halves:
                    where.setdefault((kind, action.pipeline, action.microbatch, plan.chunk(worker, action)),
                                     []).append(worker)
    for d, m in grid.items():
        for chunk in range(problem.chunks):
            homes, at = set(), _at(problem, chunk)
            for kind in kinds:
                on = where.get((kind, d, m, chunk), [])
                homes.update(on)
                if not on:
                    yield f"once: {kind}{d}.{m} is missing at {at}"
                elif len(on) > 1:
                    yield (f"once: {kind}{d}.{m} is listed {len(on)} times at {at},"
                           f" on {' and '.join(str(w) for w in on)}")
            if len(homes) > 1:
                yield (f"route: micro-batch {m} of pipeline {d} is spread over workers"
                       f" {' and '.join(str(w) for w in sorted(homes))} at {at}")


def _at(problem: Problem, chunk: int) -> str:
    return f"chunk {chunk}" if problem.placement else f"stage {chunk}"


def _crossings(plan: Plan) -> Iterator[str]:
    """Rules of crossings: within the lending limits, one layer at least left to each chunk, and the same for all
    micro-batches of a block."""
    problem, grid = plan.problem, plan.problem.grid
    for (d, m), crossing in plan.crossings.items():
        if not (0 <= d < grid.pipelines and 0 <= m < grid.microbatches[d]):
            yield f"crossing: micro-batch {m} of pipeline {d} is outside the grid"
            continue
        if not problem.lends:
            yield f"crossing: micro-batch {m} of pipeline {d} crosses a boundary elsewhere, but nothing may be lent"
            continue
        if len(crossing) != len(problem.lend):
            yield (f"crossing: micro-batch {m} of pipeline {d} lists {len(crossing)} boundaries, there are"
                   f" {len(problem.lend)} between chunks")
            continue
        for boundary, by in enumerate(crossing):
            earlier, later = problem.lend[boundary]
            if not -earlier <= by <= later:
                way, most = ("later", later) if by > 0 else ("earlier", earlier)
                yield (f"crossing: micro-batch {m} of pipeline {d} crosses boundary {boundary} {abs(by)} layers {way}"
                       f" than at home, {most} are allowed")
        for chunk in range(problem.chunks):
            given = -problem.more(chunk, crossing).get(chunk, 0)
            if given and given >= problem.layers[chunk]:
                yield (f"crossing: micro-batch {m} of pipeline {d} leaves chunk {chunk} none of its"
                       f" {problem.layers[chunk]} layers; one at least stays at home")
        if problem.block:
            first = m // problem.block * problem.block
            if (plan.crossing(d, first) or (0,) * len(crossing)) != crossing:
                yield (f"block: block {m // problem.block} of pipeline {d} crosses in several places: micro-batch"
                       f" {first} at {list(plan.crossing(d, first))}, {m} at {list(crossing)}")
    if problem.block:
        size = problem.block
        for d, m in plan.crossings:
            if m % size == 0:
                for other in range(m + 1, min(m + size, grid.microbatches[d])):
                    if not plan.crossing(d, other):
                        yield (f"block: block {m // size} of pipeline {d} crosses in several places: micro-batch {m} at"
                               f" {list(plan.crossing(d, m))}, {other} at home")


def _full(plan: Plan) -> Iterator[str]:
    for worker, actions in sorted(plan.workers.items()):
        split = False  # any micro-batch of it: then its sums exist, and B and W are measured apart
        for action in actions:
            split = split or action.kind == "W"
            if action.kind == "FB" and plan.chunk(worker, action) not in plan.problem.full_backward:
                where = _at(plan.problem, plan.chunk(worker, action))
                yield f"full: {action} of worker {worker}, but workers of {where} run B and W apart"
            elif action.kind == "FB" and not split:
                yield f"full: {action} of worker {worker} comes before any W; a worker's first backward is split"


def _steps(plan: Plan) -> Iterator[str]:
    for worker, actions in sorted(plan.workers.items()):
        count = sum(1 for action in actions if action.kind == "S")
        if count != 1:
            yield f"step: worker {worker} lists S {count} times, once is needed"
        elif actions[-1].kind != "S":
            yield f"step: S is not the last action of worker {worker}"


def _local_order(plan: Plan) -> Iterator[str]:
    needs = {"B": "F", "W": "B", "FB": "F"}
    for worker, actions in sorted(plan.workers.items()):
        seen: set[Action] = set()
        for action in actions:
            if action.kind in needs and action._replace(kind=needs[action.kind]) not in seen:
                yield (f"order: {action} of worker {worker} comes before its"
                       f" {action._replace(kind=needs[action.kind])}")
            seen.add(action)


def overfull(plan: Plan) -> bool:
    """Whether a worker holds more than its cap."""
    return any(True for _ in _memory(plan))


def _memory(plan: Plan) -> Iterator[str]:
    problem = plan.problem
    more = surplus(plan) if any(problem.message) else {}
    for worker, cap in sorted(problem.cap.items()):
        if worker not in plan.workers:
            continue
        messages = more.get(worker, 0) * problem.message_weight(worker.stage)
        for place, (action, held) in enumerate(zip(plan.actions(worker), memory(plan, worker))):
            if messages + held > cap and place >= plan.done.get(worker, 0) and action.kind != "S":
                lent = borrowed_units(plan, worker)
                beside = f", {messages} of it for messages that are sent early" if messages else ""
                beside += f", {lent} of it for parameters of lent layers" if lent else ""
                yield f"memory: worker {worker} holds {messages + held} at {action}{beside}, its cap is {cap}"
                break


def _blocks(plan: Plan) -> Iterator[str]:
    problem = plan.problem
    block = problem.block
    if block == 0:
        return
    home: dict[tuple[int, int, int], Worker] = {}
    for worker, actions in sorted(plan.workers.items()):
        latest: dict[tuple[str, int, int, int], int] = {}
        halves = ((action, kind) for action in actions for kind in _HALVES.get(action.kind, (action.kind,)))
        for action, kind in halves:
            if kind not in ("B", "W"):
                continue
            d, m, chunk = action.pipeline, action.microbatch, plan.chunk(worker, action)
            if (before := latest.get((kind, d, chunk, m // block), -1)) > m:
                earlier = action._replace(kind=kind, microbatch=before)
                yield (f"block: {action} of worker {worker} comes after {earlier};"
                       " micro-batch order is needed")
            latest[kind, d, chunk, m // block] = max(m, before)
            if kind == "B" and home.setdefault((d, m // block, chunk), worker) != worker:
                yield (f"block: block {m // block} of pipeline {d} is on workers {home[d, m // block, chunk]}"
                       f" and {worker} at {_at(problem, chunk)}")
