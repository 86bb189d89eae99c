"""Who is in and what happens next: a pure function from state and input to state and decisions.

Nothing here reads a clock, a socket or a file, so that every interleaving can be tested without processes.
What comes in and goes out is defined in `inputs` and `decisions`. Inputs of processes that are not members (fenced,
unknown) and inputs of generations that are over change nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_recycle.membership import (
    closing,
    forming,
    joining,
    notices,
    poison,
)
from megatron_recycle.membership import (
    moving as moves,
)
from megatron_recycle.membership import (
    reconnect as mend,
)
from megatron_recycle.membership import (
    training as progress,
)
from megatron_recycle.membership.decisions import Await, AwaitSaved, Decision, Emit, MakePlan, Step, Store, Tell
from megatron_recycle.membership.inputs import (
    Adopted,
    Boundary,
    Committed,
    Exited,
    Finished,
    Hello,
    Hinted,
    Holds,
    Improved,
    Input,
    Interrupted,
    Leave,
    Loss,
    Lost,
    MovesFound,
    NoLoss,
    PlanFailed,
    Planned,
    Raised,
    Ready,
    Reported,
    ReportsLate,
    Restarted,
    Resumed,
    Saved,
    SavedLate,
    StaysOut,
    Stuck,
)
from megatron_recycle.membership.names import in_order, siblings
from megatron_recycle.membership.persistent_map import put
from megatron_recycle.membership.resume import RESTART, Stop, by_stage, decide
from megatron_recycle.membership.state import Closing, Member, Phase, State

_LAST = "the job ends after a last checkpoint"
_TOLD_TO_LEAVE = 128 + signal.SIGTERM


def step(state: State, happened: Input, now: float, offers: bool = True) -> Step:
    """The state after `happened`, and what is to be done, in order. `now` is Unix seconds.

    Without `offers` nothing is begun that the job can do without: no better plan, no move, no joiner.
    """
    if state.phase is Phase.ENDED and not isinstance(happened, Hello):
        return state, ()
    if not offers:
        if isinstance(happened, (Improved, MovesFound)):
            return state, ()
        state = state.with_(better=None)
    after, decisions = _HANDLERS[type(happened)](state, happened, now)
    if after.moves:
        after, decisions = moves.follow(state, after, decisions, now)
    return joining.propose(after, decisions) if offers else (after, decisions)


# Coming in


def _hello(state: State, happened: Hello, now: float) -> Step:
    member = happened.member
    if state.phase is Phase.ENDED:
        return state, (notices.ended(state, member.incarnation),)
    if member.incarnation in state.fenced:
        return state, (notices.fence(state, member),)
    if state.member(member.incarnation) is not None:
        return _came_back(state, happened, now)
    if member in state.spares.values():
        return state, (Tell((member.incarnation,), notices.stop_message(state)),)
    if state.phase is not Phase.FORMING:
        return joining.hello(state, member)
    return forming.hello(state, member, now)


def _came_back(state: State, happened: Hello, now: float) -> Step:
    """A member has a new connection. What it may have missed is told again; hearing it twice does no harm."""
    if happened.generation > state.generation:
        # The journal has lost its end: start above what was announced.
        return _regenerate(state.with_(generation=happened.generation), {}, now, now)
    if state.phase is Phase.RETURNING:
        return _returned(state, happened, now)
    told: list[Decision] = []
    to = (happened.member.incarnation,)
    if state.generation > 1:
        told.append(Tell(to, notices.stop_message(state)))
    if state.phase is Phase.TRAINING and state.go is not None:
        told.append(Tell(to, state.go))
    if state.switch:
        told.append(Tell(to, joining.switch_message(state)))
    elif state.offered is not None:
        told.append(Tell(to, state.offered))
    return state, tuple(told)


def _ready(state: State, happened: Ready, now: float) -> Step:
    return (forming if state.phase is Phase.FORMING else joining).ready(state, happened, now)


# A coordinator that comes back


def _restarted(state: State, happened: Restarted, now: float) -> Step:
    """Nothing is decided before the members have said where they stand, or have been silent for too long."""
    if state.phase is not Phase.RETURNING:
        return state, ()
    restarted = Emit({"event": "restarted", "t": now, "generation": state.generation})
    if (empty := _empty_stage(state)) is not None:  # decided, but the end was not written down any more
        state, ending = notices.end(state, 1, _stage_gone(state, empty), now)
        return state, (restarted, *ending)
    return state, (restarted,) if state.closing is None else (restarted, AwaitSaved(state.generation))


def _returned(state: State, happened: Hello, now: float) -> Step:
    """If all members were told to go in the last generation, training has never stopped. If one was not, its
    recovery was half done and is begun again."""
    if happened.generation < state.generation:
        return _regenerate(state, {}, now, now)
    state = state.with_(returned=state.returned | {happened.member.worker})
    if len(state.returned) < len(state.members):
        return state, ()
    state, decisions = _switch_if_all_stand(state.with_(phase=Phase.TRAINING), now)
    return state, (*decisions, *moves.seek(state))


# A boundary, where joiners come in and others leave


def _boundary(state: State, happened: Boundary, now: float) -> Step:
    return _switch_if_all_stand(joining.stands(state, happened), now)


def _switch_if_all_stand(state: State, now: float) -> Step:
    if not joining.all_stand(state):
        return state, ()
    leavers = joining.going(state)
    if (text := joining.stage_left(state, leavers)) and closing.wanted(state):
        return _leave(state, Closing(text), now)
    if text:
        return notices.end(state, 1, text, now)
    return _regenerate(state, leavers, now, now, joining.entering(state))


# Losing workers


def _lost(state: State, happened: Lost, now: float) -> Step:
    lost = {}
    for loss in happened.losses:
        if (member := state.member(loss.incarnation)) is not None:
            lost[member.worker] = loss.kind
    decisions: tuple[Decision, ...] = ()
    for loss in happened.losses:
        state, told = joining.lost(state, loss.incarnation, loss.kind, now)
        decisions += told
        if (idle := joining.spare(state, loss.incarnation)) is not None:
            decisions += (notices.fence(state, idle),)
            state, told = _lost_spare(state, idle, loss.kind, happened.since, now)
            decisions += told
    state, lost, spared = mend.spare(state, lost, happened.since, now)
    state, more = _regenerate(state, lost, happened.since, now) if lost else (state, ())
    return state, (*decisions, *spared, *more)


def _exited(state: State, happened: Exited, now: float) -> Step:
    member = next((m for m in state.known.values() if (m.rank, m.pid) == (happened.rank, happened.pid)), None)
    if state.phase is Phase.FORMING:
        return forming.exited_early(state, member, happened, now)
    if member is not None and member in state.spares.values():
        return _lost_spare(state, member, "exit", happened.since, now)
    if member is None:
        return moves.not_started(state, happened, now)
    left = not happened.status and member.worker in state.finished
    return _lost(state, Lost((Loss(member.incarnation, "leave" if left else "exit"),), happened.since), now)


def _raised(state: State, happened: Raised, now: float) -> Step:
    """A process that is no member counts as one that ends, since nobody has counted on it."""
    who, fault = state.known.get(happened.incarnation), happened.fault
    if who is None or who.incarnation in state.fenced:
        return state, ()
    said = f"{fault} {fault.where}"
    if state.phase is Phase.FORMING and not fault.refused:
        return _exited(state, Exited(who.rank, who.pid, None, happened.since, said=said), now)
    if state.phase is Phase.FORMING:
        return notices.end(state, 1, fault.text, now)
    if joining.waiting(state, who.incarnation) is not None:
        return joining.lost(state, who.incarnation, said, now)
    member = state.member(who.incarnation)
    if member is not None and poison.repeated(state, member, happened.number):
        return state, (closing.answer(member, happened.number),)
    state = poison.remembered(state, who, fault, happened.number)
    if member is not None and fault.whole and (state.closing is not None or poison.left_out(state, fault)):
        return state, (closing.answer(member, happened.number),)
    if member is None or state.closing is not None or (text := poison.fatal(state, member, fault)) is None:
        return _lost(state, Lost((Loss(who.incarnation, "exit"),), happened.since), now)
    if (without := poison.without(state, fault)) is not None:
        event = notices.skipped(state, member, fault, now)
        reason = f"micro-batch {fault.microbatch} of iteration {fault.iteration} is left out"
        state, decisions = _regenerate(without, {}, happened.since, now, reason=reason, more=(event,))
        return state, (*decisions, closing.answer(member, happened.number))
    return _end_with(state, member, happened, poison.too_many(state, fault, text), now)


def _end_with(state: State, member: Member, happened: Raised, text: str, now: float) -> Step:
    """The job ends for this error, after a last checkpoint if there can be one. Peers that differ, or that read
    different data, have nothing to save: who finds that does not hold a state that counts."""
    fault = happened.fault
    lost = {} if fault.whole else {member.worker: "exit"}
    stays = notices.suspected(state, member, "exit", happened.since, now, removed=False)
    told = () if fault.refused else (Emit(stays),)
    why_not = "" if fault.refused and not fault.whole else closing.why_not(state, lost)
    if why_not is not None:
        if why_not or not fault.refused:
            none = f" No checkpoint was written: {why_not}." if why_not else ""
            text = f"{notices.sentence(text)}{none} {notices.last(state)}"
        state, ending = notices.end(state, 1, text, now)
        return state, (*told, *ending)
    state, decisions = _regenerate(state, lost, happened.since, now, reason=_LAST, to_close=Closing(text))
    return state, (*decisions, *((closing.answer(member, happened.number), *told) if fault.whole else ()))


def _lost_spare(state: State, spare: Member, kind: str, since: float, now: float) -> Step:
    """Training does not notice, but the launcher has to know that this end was a failure."""
    kept = {name: other for name, other in state.spares.items() if other != spare}
    event = {**notices.suspected(state, spare, kind, since, now), "spare": True}
    return state.with_(spares=kept, fenced=state.fenced | {spare.incarnation}), (Emit(event),)


def _reports_late(state: State, happened: ReportsLate, now: float) -> Step:
    if state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    missing = [name for name in in_order(state.proven) if name not in state.reports]
    return _regenerate(state, dict.fromkeys(missing, "stalled"), now, now) if missing else (state, ())


def _no_loss(state: State, happened: NoLoss, now: float) -> Step:
    """A communication error, and nobody has failed."""
    if happened.generation != state.generation or not mend.in_force(state):
        return state, ()
    return _mend(state, mend.errors(state.hints), happened.since, now)


def _stuck(state: State, happened: Stuck, now: float) -> Step:
    if happened.generation != state.generation or state.phase is not Phase.TRAINING:
        return state, ()
    return _mend(state, mend.waits(happened.waiting), happened.since, now, mend.ended(happened.waiting))


def _mend(state: State, reason: str, since: float, now: float, ended: str = "") -> Step:
    """A new generation with the same members, for this reason."""
    if mend.worn_out(state):
        return notices.end(state, 1, mend.given_up(state, reason, ended), now)
    return _regenerate(state.with_(mended=state.mended + 1), {}, since, now, reason=reason)


def _regenerate(
    state: State, lost: Mapping[str, str], since: float, now: float, joined: Mapping[str, Member] | None = None,
    reason: str | None = None, to_close: Closing | None = None, more: tuple[Mapping[str, Any], ...] = (),
) -> Step:
    """Generation g+1 without `lost` and with `joined`: decided, stored, announced; everything of g is void.

    The other parts of a lost worker are spares: told of it, and without work until that one is replaced.
    """
    removed = [state.members[name] for name in in_order(lost)]
    if state.closing is not None and closing.goes_on(state, lost):
        to_close = Closing(state.closing.message, state.closing.status)
    elif state.closing is not None:
        told = tuple(Emit(notices.suspected(state, member, lost[member.worker], since, now)) for member in removed)
        why = poison.how(state, list(lost), lost) if lost else reason or "the coordinator was lost meanwhile"
        state, ending = notices.end(state, 1, why, now)
        return state, (*told, *ending)
    leavers = [member for member in removed if joining.planned(state, member, lost[member.worker])]
    suspected = [
        notices.left(state, member, lost[member.worker], now) if member in leavers
        else notices.suspected(state, member, lost[member.worker], since, now)
        for member in removed
    ]
    first = since if state.since is None else min(state.since, since)
    idle = siblings(state.members, lost)
    changed = joining.changes(state, {**lost, **dict.fromkeys(idle, "spare")}, joined or {})
    changed["spares"] |= {name: state.members[name] for name in idle}
    before, state = state, state.with_(
        phase=Phase.RECOVERING,
        generation=state.generation + 1,
        **changed,
        standing={},
        stood_since=min(state.standing.values(), default=now) if joined else None,
        fenced=state.fenced | {member.incarnation for member in removed},
        reports={},
        plan=None,
        since=first,
        resumed={},
        finished=frozenset(),
        adopted={},
        offered=None,
        better=None,
        returned=frozenset(),
        hints={},
        spared=frozenset(),
        mended=0 if lost else state.mended,
        closing=to_close,
    )
    decided = {
        "event": "decided",
        "t": now,
        "generation": state.generation,
        "ms": state.ms(now),
        "members": state.incarnations(),
        "out": dict(state.out),
        "reason": reason,
    }
    events = (*suspected, *more, decided)
    store = Store(notices.decided_record(state, events))
    # Survivors learn of it before anything else happens: they hang until their transports are aborted.
    announce: list[Decision] = [
        Tell((*state.reachable(), *joining.sent_back(before, state)), notices.stop_message(state)),
        MakePlan(state.generation, state.failed),
        Await(state.generation),
    ]
    tell: list[Decision] = [Emit(event) for event in events]
    tell += [notices.farewell(member, lost[member.worker], state.generation) if member in leavers
             else notices.fence(state, member) for member in removed]
    state, commits = progress.committed_by_all(state, now)
    if (empty := _empty_stage(state)) is not None:
        state, ending = notices.end(state, 1, _stage_gone(state, empty), now)
        return state, (store, *tell, *commits, *ending)
    return state, (store, *announce, *tell, *commits)


def _empty_stage(state: State) -> int | None:
    """The first stage that no member holds."""
    return next((stage for stage, names in enumerate(by_stage(state.stages, state.proven)) if not names), None)


def _stage_gone(state: State, stage: int) -> str:
    lost = by_stage(state.stages, state.out)[stage]
    how = poison.how(state, lost)
    last = str(state.committed) if state.committed >= 0 else "none"
    return (
        f"stage {stage} has lost its last worker ({how}), so nobody holds its parameters any more; last "
        f"committed iteration: {last}. {RESTART}"
    )


# Going on


def _reported(state: State, happened: Reported, now: float) -> Step:
    member = state.member(happened.incarnation)
    if member is None or state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    if member.worker in state.unproven:
        return state, ()  # it holds nothing
    state = state.with_(reports=put(state.reports, member.worker, happened.report))
    if len(state.reports) < len(state.members) - len(state.unproven):
        return state, ()
    stopped = Emit(
        {
            "event": "stopped",
            "t": now,
            "generation": state.generation,
            "ms": state.ms(now),
            "reports": dict(state.reports),
        }
    )
    state, decisions = _go(state, now)
    return state, (stopped, *decisions)


def _planned(state: State, happened: Planned, now: float) -> Step:
    if state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    state = state.with_(plan=happened.plan)
    event = progress.planned_event(state, happened.plan, happened.plan_ms, now)
    state, decisions = _go(state, now)
    return state, (Emit(event), *decisions)


def _plan_failed(state: State, happened: PlanFailed, now: float) -> Step:
    if state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    out = ", ".join(in_order(state.out)) or "nobody"
    return notices.end(state, 1, f"no plan for the grid with {out} out: {happened.error}. {RESTART}", now)


def _go(state: State, now: float) -> Step:
    """If reports and plan are there: where to resume, stored and announced."""
    if state.plan is None or len(state.reports) < len(state.members) - len(state.unproven):
        return state, ()
    last = state.resume
    announced = None if last is None else (last.next, last.attempt)
    incarnations = state.incarnations()
    holding = {name: incarnation for name, incarnation in incarnations.items() if name not in state.unproven}
    resume = decide(state.stages, holding, state.reports, announced=announced)
    if isinstance(resume, Stop):
        return notices.end(state, 1, resume.message, now)
    resume = replace(resume, joined=tuple(in_order(state.unproven)))
    go = {
        "type": "go",
        "generation": state.generation,
        "attempt": resume.attempt,
        "members": incarnations,
        "plan": state.plan,
        "resume": resume.to_json(),
        "prefix": notices.group_prefix(state.generation, incarnations),
        "tries": state.mended,
        "closing": None if state.closing is None else state.closing.message,
        "left_out": [list(each) for each in state.left_out],
    }
    events = [progress.reconciled_event(state, resume, now)] if state.generation > 1 else []
    record = {
        "kind": "go",
        "generation": state.generation,
        "resume": go["resume"],
        "digest": state.plan.get("digest"),
        "events": events,
    }
    state = progress.begin(state.with_(phase=Phase.TRAINING, go=go, resume=resume))
    limit = () if state.closing is None else (AwaitSaved(state.generation),)
    return state, (Store(record), Tell(tuple(incarnations.values()), go), *map(Emit, events), *limit)


# Ending


def _finished(state: State, happened: Finished, now: float) -> Step:
    """A worker that has nothing more to do stands by until all have: its peers may still need it."""
    member = state.member(happened.incarnation)
    if state.phase is Phase.FORMING:
        member = state.known.get(happened.incarnation)
    if member is None or state.phase is Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    state = state.with_(finished=state.finished | {member.worker})
    event = {"event": "left", "t": now, "generation": state.generation, "worker": member.worker}
    left = Emit({**event, "kind": "leave"})
    if len(state.finished) < (len(state.members) or state.size):
        return state, (left,)
    state, ending = notices.end(state, 0, "the job has finished", now)
    return state, (left, *ending)


def _interrupted(state: State, happened: Interrupted, now: float) -> Step:
    """Launchers tell of it again after a reconnect, and there may be several."""
    leaves = happened.status == _TOLD_TO_LEAVE
    if leaves and state.closing is not None:
        return state, ()
    if not leaves or not closing.wanted(state):
        return notices.end(state, happened.status, happened.message, now)
    return _leave(state, Closing(happened.message, happened.status), now)


def _leave(state: State, to_close: Closing, now: float) -> Step:
    """The whole job goes, and saves before."""
    state, decisions = _regenerate(state, {}, now, now, reason=_LAST, to_close=to_close)
    return state, (*decisions, AwaitSaved(state.generation, (state.description or {}).get("leave_timeout")))


_HANDLERS: Mapping[type, Callable[[State, Any, float], Step]] = {
    Hello: _hello,
    Ready: _ready,
    Restarted: _restarted,
    Lost: _lost,
    Exited: _exited,
    Raised: _raised,
    Saved: closing.saved,
    SavedLate: closing.late,
    Reported: _reported,
    ReportsLate: _reports_late,
    Planned: _planned,
    PlanFailed: _plan_failed,
    Hinted: mend.hinted,
    NoLoss: _no_loss,
    Stuck: _stuck,
    Improved: progress.improved,
    MovesFound: moves.begin,
    StaysOut: moves.stays_out,
    Holds: joining.acknowledged,
    Resumed: progress.resumed,
    Committed: progress.committed,
    Adopted: progress.adopted,
    Leave: joining.leave,
    Boundary: _boundary,
    Finished: _finished,
    Interrupted: _interrupted,
}
