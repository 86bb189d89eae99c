"""The end of a job that has not failed: all scripts have ended, or it is ended from outside. Pure, like `machine`."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from megatron_recycle.membership import commands, failing, faults, job_end
from megatron_recycle.membership.decisions import AwaitEnd, Emit, Step
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import EndLate, Finished, Interrupted
from megatron_recycle.membership.state import Closing, Phase, State

_LEAVES = (128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Statuses of jobs that are asked to leave, and not to end at once."""
BY_ITSELF = 30.0
"""Seconds that a script with its own SIGTERM handler has to end, as under torchrun."""


def finished(state: State, happened: Finished, now: float) -> Step:
    """A worker whose script has ended stands by until all have: its peers may still need it."""
    member = state.member(happened.incarnation)
    if state.phase is Phase.FORMING:
        member = state.known.get(happened.incarnation)
    if member is None or state.phase is Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    if member.worker in state.round.finished:
        return state, ()
    state = state.with_(finished=state.round.finished | {member.worker})
    event = {"event": "left", "t": now, "generation": state.generation, "worker": member.worker}
    left = Emit({**event, "kind": FailureKind.LEAVE})
    if len(state.round.finished) < (len(state.members) or state.size):
        return state, (left,)
    failed = faults.behind_training(state)
    state, ending = job_end.end(state, int(bool(failed)), failed or "the job has finished", now)
    return state, (left, *ending)


def interrupted(state: State, happened: Interrupted, now: float) -> Step:
    """The job is ended from outside. Launchers repeat this after a reconnect, and there may be several."""
    leaves = happened.status in _LEAVES
    if (leaves or happened.saves) and (state.closing is not None or state.script.asked is not None):
        return state, ()
    if (leaves and job_end.wanted(state)) or (happened.saves and job_end.possible(state, ())):
        return leave(state, Closing(happened.message, happened.status), now)
    if leaves and happened.handled:
        return state.with_(asked=(happened.status, happened.message)), (commands.terminate(BY_ITSELF),
                                                                      AwaitEnd(BY_ITSELF))
    return job_end.end(state, happened.status, happened.message, now, happened.again)


def late(state: State, happened: EndLate, now: float) -> Step:
    """The time that scripts have to end by themselves is over."""
    return job_end.end(state, 1, f"it has not ended within {BY_ITSELF:.0f} s. {job_end.last(state)}", now)


def leave(state: State, to_close: Closing, now: float) -> Step:
    """The whole job leaves, and saves first."""
    limit = state.job.leave_timeout
    to_close = replace(to_close, until=None if limit is None else now + limit)
    return failing.next_generation(state, {}, now, now, reason=job_end.LAST, to_close=to_close)
