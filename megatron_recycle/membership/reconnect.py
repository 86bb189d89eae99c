"""Reconnects without a failure: a message was lost or a connection broke, and all members live. Pure, like `machine`.

The remedy is a new generation with the same members; after two in a row without progress the job stops. Members whose
script has ended while the others need them are removed first, if their stages have other workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_recycle.membership import failing, job_end
from megatron_recycle.membership.decisions import AwaitLoss, Step
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import THE_END, Hinted, NoLoss, Stuck
from megatron_recycle.membership.names import in_order
from megatron_recycle.membership.resume import RESTART
from megatron_recycle.membership.sole_holders import lost_with
from megatron_recycle.membership.state import Phase, State

_TRIES, _BUILDINGS = 2, 3
"""Limit of consecutive generations with the same members. The second one counts where not even their groups could be
built: that may be slow, and gets more time each time."""


def hinted(state: State, happened: Hinted, now: float) -> Step:
    """A hint is remembered; the first one of a generation starts the wait for a failure that explains it."""
    member = state.member(happened.incarnation)
    if member is None or happened.generation != state.generation or not state.in_force:
        return state, ()
    first = not state.round.hints
    state = state.with_(hints={**state.round.hints, member.worker: happened.error})
    return state, (AwaitLoss(state.generation, now),) if first else ()


def no_loss(state: State, happened: NoLoss, now: float) -> Step:
    """The detection time of any failure is over: the communication errors have no failure behind them."""
    if happened.generation != state.generation or not state.in_force:
        return state, ()
    return _again(state, _errors(state.round.hints), happened.since, now)


def stuck(state: State, happened: Stuck, now: float) -> Step:
    """All members wait beyond every time limit."""
    if happened.generation != state.generation or state.phase is not Phase.TRAINING:
        return state, ()
    ended = _ended(happened.waiting)
    if state.tries.mended and ended and _goes_on_without(state, ended):
        leaving = frozenset(state.members[name].incarnation for name in ended)
        return failing.next_generation(
            state.with_(leaving=state.absent.leaving | leaving), dict.fromkeys(ended, FailureKind.LEAVE),
            happened.since, now, reason=f"{_too_soon(ended)}, who go on without: {_waits(happened.waiting)}")
    return _again(state, _waits(happened.waiting), happened.since, now, ended)


def _again(state: State, reason: str, since: float, now: float, ended: Sequence[str] = ()) -> Step:
    """A new generation with the same members, for this reason."""
    if _worn_out(state):
        return job_end.end(state, 1, _given_up(state, reason, ended), now, again=True)
    return failing.next_generation(state.with_(mended=state.tries.mended + 1), {}, since, now, reason=reason)


def _worn_out(state: State) -> bool:
    """Whether the tries with the same members are used up."""
    built = len(state.round.resumed) == len(state.members)
    return state.tries.mended >= (_TRIES if built else _BUILDINGS)


def _errors(hints: Mapping[str, str]) -> str:
    """All hints, as text."""
    return "; ".join(f"{name}: {hints[name]}" for name in in_order(hints))


def _waits(waiting: Mapping[str, str]) -> str:
    return "all workers wait: " + ", ".join(f"{name} for {waiting[name]}" for name in in_order(waiting))


def _ended(waiting: Mapping[str, str]) -> list[str]:
    """The workers whose script has ended."""
    return [name for name in in_order(waiting) if waiting[name] == THE_END]


def _goes_on_without(state: State, names: Sequence[str]) -> bool:
    """Whether each stage keeps a worker without these, and each shard of its optimizer's state a holder."""
    return not lost_with(state, names)


def _too_soon(ended: Sequence[str]) -> str:
    return f"the script has ended on {', '.join(ended)} while the others train on"


def _given_up(state: State, reason: str, ended: Sequence[str]) -> str:
    """Why the job stops, although only these workers' scripts have ended."""
    remedy = ("look at the network between them" if not ended else
              f"{_too_soon(ended)}: let all ranks run the same number of iterations")
    return (f"the workers of generation {state.generation} all live but cannot work together ({reason}), and "
            f"{state.tries.mended} new generations with the same members have not helped: {remedy}. {RESTART}")
