"""Errors that a script has not handled, and their consequences. Pure, like `machine`.

`faults` decides whether others would meet the same error. If not, the process is out, as if it had died. If they would,
the job ends: after a last checkpoint, if possible.
"""

from __future__ import annotations

from megatron_recycle.membership import failing, faults, job_end, joining, recovery_retry
from megatron_recycle.membership.decisions import Emit, Step
from megatron_recycle.membership.extension import IN_FORCE, first
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Exited, Loss, Lost, Raised
from megatron_recycle.membership.state import Closing, Member, Phase, State


def raised(state: State, happened: Raised, now: float) -> Step:
    """A process has raised an error. If it is no member, it counts as ended, since no generation has counted on it."""
    process, fault = state.known.get(happened.incarnation), happened.fault
    if process is None or process.incarnation in state.absent.fenced:
        return state, ()
    error = f"{fault} {fault.where}"
    if state.phase is Phase.FORMING and not fault.refused:
        return failing.exited(state, Exited(process.rank, process.pid, None, happened.since, said=error), now)
    if state.phase is Phase.FORMING:
        return job_end.end(state, 1, fault.text, now)
    if joining.waiting(state, process.incarnation) is not None:
        return joining.lost(state, process.incarnation, error, now)
    member = state.member(process.incarnation)
    if member is not None and faults.repeated(state, member, happened.number):
        return state, (job_end.answer(member, happened.number),)
    state = faults.remembered(state, process, fault, happened.number)
    if member is not None and fault.whole and state.closing is not None:
        return state, (job_end.answer(member, happened.number),)
    if member is not None and (answer := first(
            each.raised(state, member, happened, now) for each in IN_FORCE)) is not None:
        return answer
    if member is not None and state.closing is None and fault.recovery and not fault.refused:
        return recovery_retry.raised(state, member, happened, now)
    if member is None or state.closing is not None or (text := faults.fatal(state, member, fault)) is None:
        return failing.lost(state, Lost((Loss(process.incarnation, FailureKind.EXIT),), happened.since), now)
    return end_with(state, member, happened, text, now)


def end_with(state: State, member: Member, happened: Raised, text: str, now: float) -> Step:
    """The job ends with this error, after a last checkpoint if possible. Peers that differ, or that read different
    data, save nothing: the state of the worker that finds it does not count."""
    fault = happened.fault
    lost = {} if fault.whole else {member.worker: FailureKind.EXIT}
    stays = failing.suspected(state, member, FailureKind.EXIT, happened.since, now, removed=False)
    notices = () if fault.refused else (Emit(stays),)
    again = faults.may_go_well(state, member, fault)
    why_not = "" if fault.refused and not fault.whole else job_end.why_not(state, lost)
    if why_not is not None:
        if why_not or not fault.refused:
            none = f" No checkpoint was written: {why_not}." if why_not else ""
            text = f"{job_end.sentence(text)}{none} {job_end.last(state)}"
        state, ending = job_end.end(state, 1, text, now, again)
        return state, (*notices, *ending)
    state, decisions = failing.next_generation(
        state, lost, happened.since, now, reason=job_end.LAST, to_close=Closing(text, again=again))
    return state, (*decisions, *((job_end.answer(member, happened.number), *notices) if fault.whole else ()))
