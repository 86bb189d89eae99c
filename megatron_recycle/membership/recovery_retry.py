"""Retry of a recovery that fails by itself: a bug, or no memory for a guest's micro-batch. Pure, like `machine`.

It is tried once more in a new generation; then with a plan that leaves hit pipelines out (`policy: drop`), unless the
members report that scripts have left an iteration that would begin anew with it (`failing`). Then the worker on which
it fails is out, as if it had died. If that would cost a stage its last worker, the job ends, and its script may be
started again (`--job-restarts`). A worker whose state may be torn is out at once.
"""

from __future__ import annotations

from megatron_recycle.membership import failing, faults, job_end
from megatron_recycle.membership.decisions import MakePlan, Step
from megatron_recycle.membership.extension import IN_FORCE, first
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Loss, Lost, PlanFailed, Raised
from megatron_recycle.membership.redo import left_for_good
from megatron_recycle.membership.resume import RESTART
from megatron_recycle.membership.state import Member, Phase, Redo, State

_TRIES = 2
"""Limit of new generations with the same members, until an iteration is committed."""
_OF_ONE = 3
"""Limit of errors of one process, likewise, as it may fail before it can report."""


def raised(state: State, member: Member, happened: Raised, now: float) -> Step:
    """A member's recovery has failed; the error is among `State.faults` already."""
    fault = happened.fault
    again = sum(report.incarnation == member.incarnation and report.fault.recovery
                and (report.fault.iteration or 0) >= state.progress.committed for report in state.script.faults)
    if not fault.whole or state.tries.retries >= _TRIES or again > _OF_ONE:
        return _out(state, member, happened, now)
    if state.phase is Phase.RECOVERING and member.worker not in state.round.reports:  # that recovery is over already
        return state, (job_end.answer(member, happened.number),)
    fallback = state.tries.fallback
    if state.tries.retries and fallback is None:
        fallback = first(each.fallback(state) for each in IN_FORCE)
    state = state.with_(retries=state.tries.retries + 1, fallback=fallback)
    event = {"event": "retried", "t": now, "generation": state.generation, "worker": member.worker,
             "error": str(fault), "where": fault.where, "try": state.tries.retries, "policy": fallback}
    reason = f"the recovery has failed on {member.worker} ({fault}): once more"
    reason += ", with a plan that leaves hit pipelines out" * (fallback is not None)
    state, decisions = failing.next_generation(state, {}, happened.since, now, reason=reason, more=(event,))
    return state, (*decisions, job_end.answer(member, happened.number))


def no_plan(state: State, happened: PlanFailed, now: float) -> Step:
    """The planner has failed: another policy's plan is simpler. It begins the iteration anew; where scripts have left
    that for good, all go back with it."""
    current = state.phase is Phase.RECOVERING and happened.generation == state.generation
    fallback = first(each.fallback(state) for each in IN_FORCE)
    if not current or state.tries.fallback is not None or not state.absent.out or fallback is None:
        return failing.plan_failed(state, happened, now)
    closed = [one.iteration for report in state.round.reports.values() if (one := report.closed) is not None]
    if closed and left_for_good(state):
        state = state.with_(redo=Redo(max(closed), {}, provisional=False, known=True))
    return state.with_(fallback=fallback), (MakePlan(state.generation, state.failed, fallback),)


def _out(state: State, member: Member, happened: Raised, now: float) -> Step:
    if (last := faults.the_last(state, member)) is not None:
        text = (f"the recovery has failed on {member.worker}, {last}, {happened.fault.where}: {happened.fault}"
                f"{faults.out_before(state, member)}. {job_end.last(state)} {RESTART}")
        return job_end.end(state, 1, text, now, again=True)
    return failing.lost(state, Lost((Loss(member.incarnation, FailureKind.EXIT),), happened.since), now)
