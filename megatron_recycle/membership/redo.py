"""What survivors have done of the iteration that a failure interrupts, so that only the rest of it is run.

A worker keeps its sums of gradients, its activations, and all messages that it has sent in an iteration that is not
committed. So the iteration goes on with a plan that begins, on each worker, with the actions that it has done. What a
dead worker has done is lost: its peers run it again, with inputs from their neighbours' messages. Pure, like `machine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership.names import in_order
from megatron_recycle.membership.policies import policy
from megatron_recycle.membership.protocol import Carry
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.state import Redo, State


def done(state: State, resume: Resume) -> dict[str, tuple[str, ...]]:
    """The actions of the iteration ``resume.next`` that each member has kept, in its order. Empty where the iteration
    is to begin anew."""
    plain = policy(state).reroutes and state.fallback is None and state.closing is None
    if not plain or resume.joined or resume.restored or resume.checkpoint is not None or any(
            iteration == resume.next for iteration, _ in state.left_out):
        return {}
    found = {name: report.kept_of(resume.next) for name, report in state.reports.items()}
    kept = {name: kept.actions for name, kept in found.items() if kept is not None and kept.actions}
    return kept if len(_lent(state, resume, kept)) < 2 else {}


def lent(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> str:
    """The digest of the plan by which ``found`` was done, where that lends layers; else nothing."""
    return "".join(_lent(state, resume, found))


def asked(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> Redo:
    """The rest of the iteration, before its plan is known."""
    kept = [state.reports[name].kept_of(resume.next) for name in found]
    return Redo(resume.next, {name: len(actions) for name, actions in found.items()},
                any(each is not None and each.provisional for each in kept))


def carried(state: State, resume: Resume) -> Carry | None:
    """As `policies.carried`, of an iteration whose rest is planned. Where a script has been given the iteration's
    `loss` and `weight`, all are."""
    redo = state.redo
    if redo is None or redo.plan is None or redo.iteration != resume.next:
        return None
    closed = next((state.reports[name].closed for name in _closed(state, resume)), None) if resume.closed else None
    return Carry(redo.iteration, resume.attempt, redo.plan, redo.plan.done, redo.provisional,
                 None if closed is None else (closed.loss, closed.weight))


def repeated(state: State, resume: Resume, now: float) -> tuple[dict[str, Any], ...]:
    """The event of an iteration that some scripts may have left, and that all run again: a message is lost with the
    worker that made it and the one that had used it."""
    if not resume.closed or state.closing is not None or (state.redo is not None and state.redo.plan is not None):
        return ()
    return ({"event": "repeated", "t": now, "generation": state.generation, "iteration": resume.next,
             "workers": _closed(state, resume)},)


def without_kept(state: State, resume: Resume) -> Resume:
    """``resume`` with the number of actions that are lost although somebody who did them lives. Where the iteration
    begins anew no stage stays behind it."""
    redo = state.redo
    if redo is None or redo.plan is None:
        return replace(resume, closed=())
    return replace(resume, redone=resume.redone - sum(
        min(count, _counted(state.reports[name], resume.next)) for name, count in redo.done.items()))


def _lent(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {kept.lent for name in found if (kept := state.reports[name].kept_of(resume.next)) is not None}


def _closed(state: State, resume: Resume) -> list[str]:
    """The members that have found their stage closed for the iteration. One that has not heard a verdict may still
    report an earlier one."""
    return [name for name in in_order(state.reports) if state.reports[name].closed_in(resume.next) is not None]


def _counted(report: Report, iteration: int) -> int:
    """How many actions of ``iteration`` `resume.decide` has counted. One that has just begun another attempt has done
    none in that, though it has kept some."""
    return report.actions if report.iteration == iteration else report.earlier
