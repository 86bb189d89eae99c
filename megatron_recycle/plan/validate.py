"""Every rule of the plan file, checked one by one without anything of the planner; violations are named."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_recycle.plan.messages import surplus

from .action import Action
from .bounds import lower_bound
from .errors import DeadlockError, PlanError
from .grid import Worker
from .plan import Plan
from .replay import replay

#: the most violations of one rule that are spelled out
SHOWN = 20
_HALVES = {"FB": ("B", "W")}


def violations(plan: Plan) -> list[str]:
    """Everything that makes the plan illegal, each as ``rule: what is wrong``; an empty list is a legal plan.

    Also checks what the file states about itself: period, makespan, bound and digest.
    """
    found: list[str] = []
    for rule in (_membership, _once, _full, _steps, _local_order, _memory, _blocks):
        count = 0
        for count, text in enumerate(rule(plan), 1):
            if count <= SHOWN:
                found.append(text)
        if count > SHOWN:
            found.append(f"{found[-1].split(':')[0]}: {count - SHOWN} more")
    if found:
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
    if plan.lower_bound < lower_bound(plan.problem):
        found.append(f"bound: the plan says {plan.lower_bound}, {lower_bound(plan.problem)} can be shown")
    if plan.stated and plan.stated != plan.digest:
        found.append(f"digest: the plan says {plan.stated}, its content is {plan.digest}")
    return found


def check(plan: Plan) -> Plan:
    """Return the plan if it is legal. Raises PlanError with the first violation (and how many there are)."""
    found = violations(plan)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PlanError(f"illegal plan: {found[0]}{more}")
    return plan


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
        stage = worker.stage
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
                    where.setdefault((kind, action.pipeline, action.microbatch, stage), []).append(worker)
    for d, m in grid.items():
        for stage in range(grid.stages):
            homes = set()
            for kind in kinds:
                on = where.get((kind, d, m, stage), [])
                homes.update(on)
                if not on:
                    yield f"once: {kind}{d}.{m} is missing at stage {stage}"
                elif len(on) > 1:
                    yield (f"once: {kind}{d}.{m} is listed {len(on)} times at stage {stage},"
                           f" on {' and '.join(str(w) for w in on)}")
            if len(homes) > 1:
                yield (f"route: micro-batch {m} of pipeline {d} is spread over workers"
                       f" {' and '.join(str(w) for w in sorted(homes))} at stage {stage}")


def _full(plan: Plan) -> Iterator[str]:
    for worker, actions in sorted(plan.workers.items()):
        split = False  # some micro-batch of this worker: its sums are there then, and B and W are measured apart
        for action in actions:
            split = split or action.kind == "W"
            if action.kind == "FB" and worker.stage not in plan.problem.full_backward:
                yield f"full: {action} of worker {worker}, but workers of stage {worker.stage} run B and W apart"
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
    for worker, actions in sorted(plan.workers.items()):
        cap = problem.cap.get(worker)
        if cap is None or worker not in problem.grid:
            continue
        stage = worker.stage
        before, after = problem.before_b[stage], problem.after_b[stage]
        held: dict[tuple[int, int], int] = {}
        total = messages = more.get(worker, 0) * problem.message[stage]
        for action in actions:
            item = (action.pipeline, action.microbatch)
            if action.kind == "F":
                weight = before
            elif action.kind == "B" and problem.split_backward:
                weight = after
            elif action.kind in ("B", "W", "FB"):
                weight = 0
            else:
                continue
            total += weight - held.get(item, 0)
            held[item] = weight
            if total > cap:
                beside = f", {messages} of it for messages that are sent early" if messages else ""
                yield f"memory: worker {worker} holds {total} at {action}{beside}, its cap is {cap}"
                break


def _blocks(plan: Plan) -> Iterator[str]:
    problem = plan.problem
    block = problem.block
    if block == 0:
        return
    home: dict[tuple[int, int, int], Worker] = {}
    for worker, actions in sorted(plan.workers.items()):
        stage = worker.stage
        latest: dict[tuple[str, int], int] = {}
        halves = ((action, kind) for action in actions for kind in _HALVES.get(action.kind, (action.kind,)))
        for action, kind in halves:
            _, d, m = action
            if kind not in ("B", "W"):
                continue
            if latest.get((kind, d), -1) > m:
                yield (f"block: {action} of worker {worker} comes after {kind}{d}.{latest[kind, d]};"
                       " micro-batch order is needed")
            latest[kind, d] = max(m, latest.get((kind, d), -1))
            if kind == "B" and home.setdefault((d, m // block, stage), worker) != worker:
                yield (f"block: block {m // block} of pipeline {d} is on workers {home[d, m // block, stage]}"
                       f" and {worker} at stage {stage}")
