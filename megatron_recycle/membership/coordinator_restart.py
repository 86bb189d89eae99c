"""Reconnects: of a member that has lost its connection, or after a coordinator restart. Pure, like `machine`."""

from __future__ import annotations

from megatron_recycle.membership import boundary, failing, job_end, messages, training
from megatron_recycle.membership.decisions import Decision, Emit, Step, Tell
from megatron_recycle.membership.extension import IN_FORCE
from megatron_recycle.membership.inputs import Hello, Restarted
from megatron_recycle.membership.state import Phase, State


def member(state: State, happened: Hello, now: float) -> Step:
    """A member has a new connection. All messages that it may have missed are repeated; they are idempotent."""
    if happened.generation > state.generation:
        # The journal has lost its end: start above the announced generation.
        return failing.next_generation(state.with_(generation=happened.generation), {}, now, now)
    if state.phase is Phase.RETURNING:
        return _returned(state, happened, now)
    decisions: list[Decision] = []
    to = (happened.member.incarnation,)
    if state.generation > 1:
        decisions.append(Tell(to, messages.stop(state)))
    if state.phase is Phase.TRAINING and state.go is not None:
        decisions.append(Tell(to, state.go))
    if state.round.switch:
        decisions.append(Tell(to, messages.switch(state)))
    elif state.round.offered is not None:
        decisions.append(Tell(to, state.round.offered))
    return state, tuple(decisions)


def coordinator(state: State, happened: Restarted, now: float) -> Step:
    """A restarted coordinator decides nothing before the members have reported, or have been silent for too long."""
    if state.phase is not Phase.RETURNING:
        return state, ()
    restarted = Emit({"event": "restarted", "t": now, "generation": state.generation})
    may_return = state.closing is not None or any(each.may_return(state) for each in IN_FORCE)
    if not may_return and (text := failing.stage_gone(state)) is not None:  # decided, but the end was not recorded
        state, ending = failing.end_without(state, text, now)
        return state, (restarted, *ending)
    return state, (restarted, *job_end.limit(state, now))


def _returned(state: State, happened: Hello, now: float) -> Step:
    """If all members have received the last generation's go, training has never stopped. If one has not, its recovery
    was incomplete and is begun again."""
    if happened.generation < state.generation:
        return failing.next_generation(state, {}, now, now)
    state = state.with_(returned=state.round.returned | {happened.member.worker})
    if len(state.round.returned) < len(state.members):
        return state, ()
    state, resumed = training.all_resumed(state.with_(phase=Phase.TRAINING), now)
    state, decisions = boundary.switch(state, now)
    return state, (*resumed, *decisions, *(one for each in IN_FORCE for one in each.seek(state)))
