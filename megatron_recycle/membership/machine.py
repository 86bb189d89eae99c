"""The membership machine: a pure function from state and input to state and decisions.

Nothing here reads a clock, a socket or a file, so that every interleaving can be tested without processes. `inputs` and
`decisions` define its arguments and results; the path of a failure is `failing`, top to bottom. Inputs of processes
that are not members (fenced, unknown) and inputs of generations that are over change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_recycle.membership import (
    boundary,
    checkpoints,
    coordinator_restart,
    failing,
    finish,
    forming,
    inputs,
    job_end,
    joining,
    messages,
    reconnect,
    recovery_retry,
    script_errors,
    training,
)
from megatron_recycle.membership.decisions import Step, Tell
from megatron_recycle.membership.extension import IN_FORCE, Handler
from megatron_recycle.membership.extensions import EXTENSIONS
from megatron_recycle.membership.inputs import Hello, Improvement, Input, Ready
from megatron_recycle.membership.state import Phase, State

IN_FORCE[:] = EXTENSIONS


def step(state: State, happened: Input, now: float, offers: bool = True) -> Step:
    """The state after `happened`, and its decisions, in order. `now` is Unix seconds.

    After the input's own handler the extensions postprocess the step, and a boundary is offered if a process waits for
    one. Without `offers` nothing optional is begun: no better plan, no move, no joiner.
    """
    if state.phase is Phase.ENDED and not isinstance(happened, Hello):
        return state, ()
    if not offers:
        if isinstance(happened, Improvement):
            return state, ()
        state = state.with_(better=None)
    after, decisions = _handler(type(happened))(state, happened, now)
    for each in IN_FORCE:
        after, decisions = each.after(state, after, decisions, now)
    return boundary.propose(after, decisions) if offers else (after, decisions)


def _handler(kind: type) -> Handler:
    """The handler for inputs of this kind."""
    of_extensions = (each.handlers[kind] for each in IN_FORCE if kind in each.handlers)
    return next(of_extensions, _HANDLERS.get(kind, _nothing))


def _nothing(state: State, happened: Input, now: float) -> Step:
    """The handler of an absent extension's inputs."""
    return state, ()


def _hello(state: State, happened: Hello, now: float) -> Step:
    """A process presents itself: too late, fenced, a member again, stranded, one of the start, or a joiner."""
    member = happened.member
    if state.phase is Phase.ENDED:
        return state, (messages.ended(state, member.incarnation),)
    if member.incarnation in state.absent.fenced:
        return state, (messages.fence(state, member),)
    if state.member(member.incarnation) is not None:
        return coordinator_restart.member(state, happened, now)
    if member in state.absent.stranded.values():
        return state, (Tell((member.incarnation,), messages.stop(state)),)
    if state.phase is Phase.FORMING:
        return forming.hello(state, member, now)
    return joining.hello(state, member)


def _ready(state: State, happened: Ready, now: float) -> Step:
    return (forming if state.phase is Phase.FORMING else joining).ready(state, happened, now)


_HANDLERS: Mapping[type, Handler] = {
    inputs.Hello: _hello,
    inputs.Ready: _ready,
    inputs.Restarted: coordinator_restart.coordinator,
    inputs.Lost: failing.lost,
    inputs.Exited: failing.exited,
    inputs.Raised: script_errors.raised,
    inputs.Reported: failing.reported,
    inputs.ReportsLate: failing.reports_late,
    inputs.Planned: failing.planned,
    inputs.PlanFailed: recovery_retry.no_plan,
    inputs.Redone: failing.redone,
    inputs.Hinted: reconnect.hinted,
    inputs.NoLoss: reconnect.no_loss,
    inputs.Stuck: reconnect.stuck,
    inputs.Resumed: training.resumed,
    inputs.Committed: training.committed,
    inputs.Improved: training.improved,
    inputs.Adopted: training.adopted,
    inputs.Holds: joining.acknowledged,
    inputs.Leave: joining.leave,
    inputs.StaysOut: joining.stays_out,
    inputs.Boundary: boundary.stands,
    inputs.Saved: job_end.saved,
    inputs.SavedLate: job_end.late,
    inputs.Written: checkpoints.written,
    inputs.Unwritten: checkpoints.unwritten,
    inputs.Finished: finish.finished,
    inputs.Interrupted: finish.interrupted,
    inputs.EndLate: finish.late,
}
