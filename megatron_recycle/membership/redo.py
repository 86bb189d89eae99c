"""What survivors have done of the iteration that a failure interrupts, so that only the rest of it is run.

A worker keeps its sums of gradients, its activations, and all messages that it has sent in an iteration that is not
committed. So the iteration goes on with a plan that begins, on each worker, with the actions that it has done. What a
dead worker has done is lost: its peers run it again, with inputs from their neighbours' messages. Pure, like `machine`.
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
    """The same of the iteration after ``resume.next``: workers of closed stages may have begun that. Nothing where they
    are compared before it: one that is healed then has done this with other parameters."""
    if state.job.compared:
        return {}
    kept = _kept(state, resume.next + 1, {*resume.closed})
    if not left_for_good(state):
        kept = {worker: actions for worker, actions in kept.items() if _stays(state, resume, worker, actions)}
    alike = {(each.microbatches, each.block, each.lent) for each in _attempts(state, resume.next + 1, kept)}
    left_out = any(iteration == resume.next + 1 for iteration, _ in state.script.left_out)
    return kept if not left_out and len(alike) == 1 and not any(lent for _, _, lent in alike) else {}


def levelled(parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """What counts of what the parts of a worker have done, who follow one order.

    A forward or a backward counts if all have done it, and W if all have done its backward and one has done W: the
    others need nobody for that. A part drops a forward that does not count. Nothing counts at all where a part would
    have to undo something else.
    """
    if len(parts) == 1:
        return tuple(parts[0])
    sets = [frozenset(part) for part in parts]
    counted = [action for action in max(parts, key=len) if all(action in each for each in sets)]
    late = [action for part in parts for action in part if action not in counted and action[0] == "W"]
    counted += dict.fromkeys(action for action in late if all(f"B{action[1:]}" in each for each in sets))
    for each in sets:
        for action in each.difference(counted):
            if not action.startswith("F") or action[1] == "B" or {f"B{action[1:]}", f"FB{action[1:]}"} & each:
                return ()
    return tuple(counted)


def lent(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> str:
    """The digest of the plan by which ``found`` was done, where that lends layers; else nothing."""
    return "".join(_lent(state, resume, found))


def asked(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> tuple[Redo, MakeRedo]:
    """The rest of the iteration, and of what is begun of the one after it, before their plans are known."""
    assert state.round.plan is not None
    later = begun(state, resume)
    ahead = MakeRedo(state.generation, state.round.plan, later, _size(state, resume.next + 1)) if later else None
    return (replace(_redo(state, resume.next, found), ahead=_redo(state, resume.next + 1, later) if later else None),
            MakeRedo(state.generation, state.round.plan, found, _size(state, resume.next), resume.closed,
                     lent(state, resume, found), ahead))


def carried(state: State, resume: Resume) -> Carry | None:
    """As `policies.carried`, of an iteration whose rest is planned. Where a script has been given the iteration's
    `loss` and `weight`, all are."""
    redo = state.round.redo
    if redo is None or redo.plan is None or redo.iteration != resume.next:
        return None
    closing = _closed(state, resume) if resume.closed else []
    closed = next((state.round.reports[name].closed for name in closing), None)
    return Carry(redo.iteration, resume.attempt, redo.plan, redo.plan.done, redo.provisional,
                 None if closed is None else (closed.loss, closed.weight))


def ahead(state: State, resume: Resume) -> Carry | None:
    """As `carried`, of the iteration after that one. Stages that are not closed any more have to begin it anew."""
    redo = None if state.round.redo is None else state.round.redo.ahead
    if redo is None or redo.plan is None or not resume.closed or redo.iteration != resume.next + 1:
        return None
    return Carry(redo.iteration, 1, redo.plan, redo.plan.done, redo.provisional)


def repeated(state: State, resume: Resume, now: float) -> tuple[dict[str, Any], ...]:
    """The event of an iteration that some scripts may have left, and that all run again: a message is lost with the
    worker that made it and the one that had used it."""
    redo = state.round.redo
    if not resume.closed or state.closing is not None or (redo is not None and redo.plan is not None):
        return ()
    return ({"event": "repeated", "t": now, "generation": state.generation, "iteration": resume.next,
             "workers": _closed(state, resume)},)


def closes(state: State) -> bool:
    """Whether scripts may leave an iteration before it is committed.

    A message is kept by its maker, and by its reader as what became of it. A host that has two stages may take both,
    and scripts would have to run again what they have left: where that never happens (`left_for_good`), they wait. So
    they do where recoveries have failed: the rest of an iteration is not planned then.
    """
    if state.tries.fallback is not None:
        return False
    stages = defaultdict[str, set[int]](set)
    for name, member in state.members.items():
        stages[member.host].add(Process.parse(name).worker.stage)
    return len(stages) == 1 or not left_for_good(state) or all(len(each) == 1 for each in stages.values())


def left_for_good(state: State) -> bool:
    """Whether no iteration that scripts have left is run again, since bits have to be the same whatever fails."""
    return state.job.reduction == "exact"


def without_kept(state: State, resume: Resume) -> Resume:
    """``resume`` with the number of actions that are lost although somebody who did them lives. Where the iteration
    begins anew no stage stays behind it."""
    redo, reports = state.round.redo, _by_worker(state)
    if redo is None or redo.plan is None:
        return replace(resume, closed=())
    kept = sum(min(count, _counted(reports[worker][0], resume.next)) for worker, count in redo.done.items())
    if redo.ahead is not None and redo.ahead.plan is not None:
        kept += sum(min(count, reports[worker][0].actions) for worker, count in redo.ahead.done.items()
                    if reports[worker][0].iteration == redo.ahead.iteration)
    return replace(resume, redone=resume.redone - kept)


def _kept(state: State, iteration: int, stages: Collection[int]) -> dict[str, tuple[str, ...]]:
    """The actions of ``iteration`` that each worker of these stages has kept, if it has kept some."""
    found = {worker: levelled([() if kept is None else kept.actions
                               for kept in (report.kept_of(iteration) for report in reports)])
             for worker, reports in _by_worker(state).items() if Process.parse(worker).worker.stage in stages}
    return {worker: actions for worker, actions in found.items() if actions}


def _half_undone(state: State, resume: Resume) -> bool:
    """Whether some workers of a closed stage have undone their step: all were to begin the iteration anew when another
    failure came."""
    return any(report.holds < resume.next for name, report in state.round.reports.items()
               if Process.parse(name).worker.stage in resume.closed)


def _stays(state: State, resume: Resume, worker: str, actions: Sequence[str]) -> bool:
    """Whether these forwards got their inputs from closed stages. The only worker to know that a stage is closed may
    have died: it reduces again, in another order, and its parameters would differ from those by rounding."""
    stage, stages = Process.parse(worker).worker.stage, state.job.placement or tuple(range(state.stages))
    own = [chunk for chunk, other in enumerate(stages) if other == stage]
    last = max(own[Action.parse(action).chunk] for action in actions)
    return {*stages[:last]} <= {*resume.closed}


def _attempts(state: State, iteration: int, found: Mapping[str, tuple[str, ...]]) -> list[KeptReport]:
    """Those at ``iteration`` of the parts of these workers."""
    reports = _by_worker(state)
    kept = (report.kept_of(iteration) for worker in found for report in reports[worker])
    return [each for each in kept if each is not None]


def _redo(state: State, iteration: int, found: Mapping[str, tuple[str, ...]]) -> Redo:
    return Redo(iteration, {name: len(actions) for name, actions in found.items()},
                any(each.provisional for each in _attempts(state, iteration, found)))


def _size(state: State, iteration: int) -> tuple[int, int]:
    """Micro-batches of each pipeline of ``iteration``, and those of a block."""
    kept = next(each for report in state.round.reports.values() if (each := report.kept_of(iteration)) is not None)
    return kept.microbatches, kept.block


def _lent(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {each.lent for each in _attempts(state, resume.next, found)}


def _closed(state: State, resume: Resume) -> list[str]:
    """The members that have found their stage closed for the iteration. One that has not heard a verdict may still
    report an earlier one."""
    reports = state.round.reports
    return [name for name in in_order(reports) if reports[name].closed_in(resume.next) is not None]


def _counted(report: Report, iteration: int) -> int:
    """How many actions of ``iteration`` `resume.decide` has counted. One that has just begun another attempt has done
    none in that, though it has kept some."""
    return report.actions if report.iteration == iteration else report.earlier


def _by_worker(state: State) -> dict[str, list[Report]]:
    """The reports of each worker's parts, in order."""
    found: dict[str, list[Report]] = {}
    for name in in_order(state.round.reports):
        found.setdefault(str(Process.parse(name).worker), []).append(state.round.reports[name])
    return found
