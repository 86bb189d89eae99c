"""The survivors' finished part of an interrupted iteration, so that only the rest of it is run.

A worker keeps its sums of gradients, its activations, and all messages that it has sent in an iteration that is not
committed. So the iteration goes on with a plan that begins, on each worker, with its finished actions. A dead worker's
actions are lost: its peers run them again, with inputs from their neighbours' messages. Pure, like `machine`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership.decisions import MakeRedo
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.protocol import Carry
from megatron_recycle.membership.report import KeptReport, Report
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.state import Redo, State
from megatron_recycle.plan.action import Action


def done(state: State, resume: Resume) -> dict[str, tuple[str, ...]]:
    """The actions of the iteration ``resume.next`` that each worker has kept, in its order. Empty where the iteration
    is to begin anew."""
    plain = state.job.chosen.reroutes and state.tries.fallback is None and state.closing is None
    if not plain or resume.joined or resume.restored or resume.checkpoint is not None or any(
            iteration == resume.next for iteration, _ in state.script.left_out) or _half_undone(state, resume):
        return {}
    kept = _kept(state, resume.next, {*range(state.stages)})
    return kept if len(_lent(state, resume, kept)) < 2 else {}


def begun(state: State, resume: Resume) -> dict[str, tuple[str, ...]]:
    """The same for the iteration after ``resume.next``, which workers of closed stages may have begun. Empty if peers
    are compared before it: a worker healed then would have done these actions with other parameters."""
    if state.job.compared:
        return {}
    kept = _kept(state, resume.next + 1, {*resume.closed})
    if not left_for_good(state):
        kept = {worker: actions for worker, actions in kept.items() if _stays(state, resume, worker, actions)}
    alike = {(each.microbatches, each.block, each.lent) for each in _attempts(state, resume.next + 1, kept)}
    left_out = any(iteration == resume.next + 1 for iteration, _ in state.script.left_out)
    return kept if not left_out and len(alike) == 1 and not any(lent for _, _, lent in alike) else {}


def levelled(parts: Sequence[Sequence[str]], joint: bool = False) -> tuple[str, ...]:
    """The valid actions among those of a worker's parts, which follow one order.

    A forward or a backward counts if all parts have done it, and W if all have done its backward and one has done W:
    the others can do that alone, unless W is ``joint``. A part drops a forward that does not count. Nothing counts at
    all where a part would have to undo another action.
    """
    if len(parts) == 1:
        return tuple(parts[0])
    sets = [frozenset(part) for part in parts]
    counted = [action for action in max(parts, key=len) if all(action in each for each in sets)]
    late = [action for part in parts for action in part if action not in counted and action[0] == "W" and not joint]
    counted += dict.fromkeys(action for action in late if all(f"B{action[1:]}" in each for each in sets))
    for each in sets:
        for action in each.difference(counted):
            if not action.startswith("F") or action[1] == "B" or {f"B{action[1:]}", f"FB{action[1:]}"} & each:
                return ()
    return tuple(counted)


def lent(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> str:
    """The digest of the plan by which ``found`` was done, if that plan lends layers; else empty."""
    return "".join(_lent(state, resume, found))


def asked(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> tuple[Redo, MakeRedo]:
    """The rest of the iteration, and of the begun part of the next one, before their plans are known."""
    assert state.round.plan is not None
    later = begun(state, resume)
    ahead = MakeRedo(state.generation, state.round.plan, later, _size(state, resume.next + 1)) if later else None
    return (replace(_redo(state, resume.next, found), ahead=_redo(state, resume.next + 1, later) if later else None),
            MakeRedo(state.generation, state.round.plan, found, _size(state, resume.next), resume.closed,
                     lent(state, resume, found), ahead))


def carried(state: State, resume: Resume) -> Carry | None:
    """As `policies.carried`, for an iteration with a redo plan. If one script has received the iteration's `loss` and
    `weight`, all receive them."""
    redo = state.round.redo
    if redo is None or redo.plan is None or redo.iteration != resume.next:
        return None
    closing = _closed(state, resume) if resume.closed else []
    closed = next((state.round.reports[name].closed for name in closing), None)
    return Carry(redo.iteration, resume.attempt, redo.plan, redo.plan.done, redo.provisional,
                 None if closed is None else (closed.loss, closed.weight))


def ahead(state: State, resume: Resume) -> Carry | None:
    """As `carried`, for the iteration after that one. Stages that are no longer closed must begin it anew."""
    redo = None if state.round.redo is None else state.round.redo.ahead
    if redo is None or redo.plan is None or not resume.closed or redo.iteration != resume.next + 1:
        return None
    return Carry(redo.iteration, 1, redo.plan, redo.plan.done, redo.provisional)


def repeated(state: State, resume: Resume, now: float) -> tuple[dict[str, Any], ...]:
    """The event of an iteration that some scripts may have left, and that all run again: a message was lost with both
    its maker and the worker that had used it."""
    redo = state.round.redo
    if not resume.closed or state.closing is not None or (redo is not None and redo.plan is not None):
        return ()
    return ({"event": "repeated", "t": now, "generation": state.generation, "iteration": resume.next,
             "workers": _closed(state, resume)},)


def closes(state: State) -> bool:
    """Whether scripts may leave an iteration before it is committed.

    A message survives with its maker, or in its reader's results. A host with two stages may lose both, and scripts
    would have to repeat an iteration that they have left: where that is excluded (`left_for_good`), they wait. They
    also wait where recoveries have failed, since the rest of an iteration is not planned then.
    """
    if state.tries.fallback is not None:
        return False
    stages = defaultdict[str, set[int]](set)
    for name, member in state.members.items():
        stages[member.host].add(Process.parse(name).worker.stage)
    return len(stages) == 1 or not left_for_good(state) or all(len(each) == 1 for each in stages.values())


def left_for_good(state: State) -> bool:
    """Whether iterations that scripts have left are never run again, since results must be equal bit for bit."""
    return state.job.reduction == "exact"


def without_kept(state: State, resume: Resume) -> Resume:
    """``resume`` with only those lost actions counted that no survivor has kept. If the iteration begins anew, no stage
    stays closed."""
    redo, reports = state.round.redo, _by_worker(state)
    if redo is None or redo.plan is None:
        return replace(resume, closed=())
    kept = sum(min(count, _counted(reports[worker][0], resume.next)) for worker, count in redo.done.items())
    if redo.ahead is not None and redo.ahead.plan is not None:
        kept += sum(min(count, reports[worker][0].actions) for worker, count in redo.ahead.done.items()
                    if reports[worker][0].iteration == redo.ahead.iteration)
    return replace(resume, redone=resume.redone - kept)


def _kept(state: State, iteration: int, stages: Collection[int]) -> dict[str, tuple[str, ...]]:
    """The actions of ``iteration`` that each worker of these stages has kept, if any."""
    found = {}
    for worker, reports in _by_worker(state).items():
        if Process.parse(worker).worker.stage in stages:
            parts = [report.kept_of(iteration) for report in reports]
            found[worker] = levelled([() if kept is None else kept.actions for kept in parts],
                                     any(kept is not None and kept.joint for kept in parts))
    return {worker: actions for worker, actions in found.items() if actions}


def _half_undone(state: State, resume: Resume) -> bool:
    """Whether some workers of a closed stage have undone their step: another failure came while all were to begin the
    iteration anew."""
    return any(report.holds < resume.next for name, report in state.round.reports.items()
               if Process.parse(name).worker.stage in resume.closed)


def _stays(state: State, resume: Resume, worker: str, actions: Sequence[str]) -> bool:
    """Whether these forwards got their inputs from closed stages. The only worker that knows a stage is closed may have
    died: the stage then reduces again, in another order, and its parameters would differ by rounding."""
    stage, stages = Process.parse(worker).worker.stage, state.job.placement or tuple(range(state.stages))
    own = [chunk for chunk, other in enumerate(stages) if other == stage]
    last = max(own[Action.parse(action).chunk] for action in actions)
    return {*stages[:last]} <= {*resume.closed}


def _attempts(state: State, iteration: int, found: Mapping[str, tuple[str, ...]]) -> list[KeptReport]:
    """The attempts at ``iteration`` of the parts of these workers."""
    reports = _by_worker(state)
    kept = (report.kept_of(iteration) for worker in found for report in reports[worker])
    return [each for each in kept if each is not None]


def _redo(state: State, iteration: int, found: Mapping[str, tuple[str, ...]]) -> Redo:
    return Redo(iteration, {name: len(actions) for name, actions in found.items()},
                any(each.provisional for each in _attempts(state, iteration, found)))


def _size(state: State, iteration: int) -> tuple[int, int]:
    """Micro-batches of each pipeline of ``iteration``, and micro-batches of a block."""
    kept = next(each for report in state.round.reports.values() if (each := report.kept_of(iteration)) is not None)
    return kept.microbatches, kept.block


def _lent(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {each.lent for each in _attempts(state, resume.next, found)}


def _closed(state: State, resume: Resume) -> list[str]:
    """The members whose stage is closed in the iteration. A member that missed a verdict may still report an earlier
    one."""
    reports = state.round.reports
    return [name for name in in_order(reports) if reports[name].closed_in(resume.next) is not None]


def _counted(report: Report, iteration: int) -> int:
    """The number of actions of ``iteration`` that `resume.decide` has counted. A worker that has just begun another
    attempt has done none in it, though it may have kept some."""
    return report.actions if report.iteration == iteration else report.earlier


def _by_worker(state: State) -> dict[str, list[Report]]:
    """The reports of each worker's parts, in order."""
    found: dict[str, list[Report]] = {}
    for name in in_order(state.round.reports):
        found.setdefault(str(Process.parse(name).worker), []).append(state.round.reports[name])
    return found
