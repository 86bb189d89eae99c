"""The coordinator's half of a failure, top to bottom: lost workers, spared workers, the next generation, the members'
reports, the plan, and the go. Pure, like `machine`.

The other half is `runtime.recovery`, which a worker runs from the stop that `next_generation` announces to the first
action after the go. The path begins with a verdict of the detectors (`lost`), the end of a process (`exited`), an error
in a script (`script_errors`), a broken connection between live members (`reconnect`), or a boundary at which processes
come in or leave (`boundary`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership import (
    commands,
    faults,
    forming,
    job_end,
    joining,
    messages,
    records,
    redo,
    training,
)
from megatron_recycle.membership.decisions import (
    Await,
    Command,
    Decision,
    Emit,
    MakePlan,
    Step,
    Tell,
)
from megatron_recycle.membership.extension import IN_FORCE, first, merged
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.inputs import Exited, Loss, Lost, PlanFailed, Planned, Redone, Reported, ReportsLate
from megatron_recycle.membership.names import in_order, siblings
from megatron_recycle.membership.persistent_map import put
from megatron_recycle.membership.protocol import Go, Out
from megatron_recycle.membership.resume import RESTART, DeadEnd, Resume, by_stage, decide
from megatron_recycle.membership.sole_holders import lost_with
from megatron_recycle.membership.state import Closing, Event, Member, Phase, State

# Lost workers


def exited(state: State, happened: Exited, now: float) -> Step:
    """A process has ended. Without a member's process a new generation begins, also if its script
    ended well."""
    member = next((m for m in state.known.values() if (m.rank, m.pid) == (happened.rank, happened.pid)), None)
    if state.phase is Phase.FORMING:
        return forming.exited_early(state, member, happened, now)
    if member is not None and member in state.absent.stranded.values():
        return _lost_stranded(state, member, FailureKind.EXIT, happened.since, now)
    if member is None:
        return _not_started(state, happened, now)
    if happened.said and faults.said_by(state, member) is None:
        state = faults.remembered(state, member, Fault(happened.said, "", state.progress.committed, recovery=True), 0)
    left = not happened.status and member.worker in state.round.finished
    kind = FailureKind.LEAVE if left else FailureKind.EXIT
    return lost(state, Lost((Loss(member.incarnation, kind),), happened.since), now)


def _not_started(state: State, happened: Exited, now: float) -> Step:
    """The end of a process that never said hello."""
    decisions: tuple[Decision, ...] = ()
    for each in IN_FORCE:
        state, more = each.not_started(state, happened, now)
        decisions += more
    return state, decisions


def reports_late(state: State, happened: ReportsLate, now: float) -> Step:
    """The time for reports is over: members without a report are stuck."""
    if state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    missing = [name for name in in_order(state.proven) if name not in state.round.reports]
    if not missing:
        return state, ()
    return next_generation(state, dict.fromkeys(missing, FailureKind.STALLED), now, now)


def lost(state: State, happened: Lost, now: float) -> Step:
    """These processes are lost together: members, joiners, or stranded parts."""
    decisions: tuple[Decision, ...] = ()
    out: dict[str, FailureKind] = {}
    for loss in happened.losses:
        if (member := state.member(loss.incarnation)) is not None:
            out[member.worker] = loss.kind
    for loss in happened.losses:
        state, added = joining.lost(state, loss.incarnation, loss.kind, now)
        decisions += added
        if (idle := joining.stranded(state, loss.incarnation)) is not None:
            decisions += (messages.fence(state, idle),)
            state, added = _lost_stranded(state, idle, loss.kind, happened.since, now)
            decisions += added
    state, out, spared = _spare(state, out, happened.since, now)
    state, more = next_generation(state, out, happened.since, now) if out else (state, ())
    return state, (*decisions, *spared, *more)


def _lost_stranded(state: State, member: Member, kind: FailureKind, since: float, now: float) -> Step:
    """Loss of a stranded process: no new generation, but the launcher must know that this exit was a failure."""
    kept = {name: other for name, other in state.absent.stranded.items() if other != member}
    event = {**suspected(state, member, kind, since, now), "stranded": True}
    command = commands.out(member, kind, faults.said_by(state, member))
    state = state.with_(stranded=kept, fenced=state.absent.fenced | {member.incarnation},
                        outs=commands.remembered(state, command))
    return state, (Command(command), Emit(event))


# Spared workers


def _spare(
    state: State, lost: Mapping[str, FailureKind], since: float, now: float
) -> tuple[State, dict[str, FailureKind], tuple[Emit, ...]]:
    """`lost` without the spared members: alive but slow, and the last of their stage or of an optimizer shard. Removing
    them would end the job; waiting may not. They are reported, once per generation."""
    kept = [name for alone in lost_with(state, lost, sure=True) for name in alone.by
            if name in lost and lost[name].lives]
    events = tuple(
        Emit(suspected(state, state.members[name], lost[name], since, now, removed=False))
        for name in in_order(set(kept) - state.round.spared)
    )
    left = {name: kind for name, kind in lost.items() if name not in kept}
    return state.with_(spared=state.round.spared.union(kept)), left, events


# The next generation


def next_generation(
    state: State,
    lost: Mapping[str, FailureKind],
    since: float,
    now: float,
    *,
    joined: Mapping[str, Member] | None = None,
    reason: str | None = None,
    to_close: Closing | None = None,
    more: Sequence[Event] = (),
) -> Step:
    """Generation g+1 without `lost` and with `joined`: decided, recorded, announced; everything of g is void.

    The other parts of a lost worker are stranded: informed, and without work until the lost part is replaced.

    Args:
        since: when the first of `lost` failed.
        reason: the reason for a new generation where no worker is lost.
        to_close: the generation is for a last checkpoint.
        more: events to emit with the decision.
    """
    joined = joined or {}
    if state.closing is not None:
        if not job_end.goes_on(state, lost, reason):
            return _closed_without(state, lost, since, reason, now)
        to_close = replace(state.closing, saved={})
    removed = [state.members[name] for name in in_order(lost)]
    planned = {member for member in removed if _as_asked(state, member, lost[member.worker])}
    of_each = [
        _left(state, member, lost[member.worker], now) if member in planned
        else suspected(state, member, lost[member.worker], since, now)
        for member in removed
    ]
    outs = _out_commands(state, [member for member in removed if member not in planned], lost)
    if (why := first(each.ends(state, lost) for each in IN_FORCE)) is not None:
        state, ending = job_end.end(state, 1, f"{why}. {job_end.last(state)} {RESTART}", now, again=True)
        return state, (*map(Command, outs), *map(Emit, of_each), *ending)
    before, state = state, state.next_generation(
        phase=Phase.RECOVERING,
        **_membership(state, lost, joined),
        fenced=state.absent.fenced | {member.incarnation for member in removed},
        outs=commands.remembered(state, *outs),
        faults=tuple(report for report in state.script.faults if report.worker not in joined),
        since=since if state.since is None else min(state.since, since),
        stood_since=min(state.round.standing.values(), default=now) if joined else None,
        mended=0 if lost else state.tries.mended,
        closing=to_close,
    )
    events = (*of_each, *more, _decided(state, reason, now))
    # Announced first: survivors hang until their transports are aborted.
    announce: list[Decision] = [Tell((*state.reachable(), *_sent_back(before, state)), messages.stop(state))]
    if not any(each.waits(state) for each in IN_FORCE):
        announce.append(_make_plan(state))
    announce += (Await(state.generation), *job_end.limit(state, now))
    notices: list[Decision] = [*map(Command, outs), *map(Emit, events)]
    notices += [messages.farewell(member, lost[member.worker], state.generation) if member in planned
                else messages.fence(state, member) for member in removed]
    record = records.decided(state, events)
    state, commits = training.committed_by_all(state, now)
    if (text := stage_gone(state)) is not None and not any(each.may_return(state) for each in IN_FORCE):
        state, ending = end_without(state, text, now)
        return state, (record, *(announce[:1] if state.closing is not None else ()), *notices, *commits, *ending)
    return state, (record, *announce, *notices, *commits)


def _closed_without(state: State, lost: Mapping[str, FailureKind], since: float, reason: str | None,
                    now: float) -> Step:
    """A final-checkpoint generation that cannot be begun again: the job ends without one."""
    removed = [state.members[name] for name in in_order(lost)]
    notices: tuple[Decision, ...] = tuple(map(Command, _out_commands(state, removed, lost)))
    notices += tuple(Emit(suspected(state, member, lost[member.worker], since, now)) for member in removed)
    why = faults.how(state, list(lost), lost) if lost else reason or "the coordinator was lost meanwhile"
    state, ending = job_end.end(state, 1, why, now)
    return state, (*notices, *ending)


def _out_commands(state: State, members: Sequence[Member], lost: Mapping[str, FailureKind]) -> tuple[Out, ...]:
    """The commands to their launchers."""
    return tuple(commands.out(member, lost[member.worker], faults.said_by(state, member)) for member in members)


def _membership(state: State, lost: Mapping[str, FailureKind], joined: Mapping[str, Member]) -> dict[str, Any]:
    """Membership fields of the state, without `lost` and with `joined`.

    A process that came in with the last generation and has not acknowledged its state goes back to waiting: its state
    may be an incomplete copy, or older than later decisions.
    """
    idle = siblings(state.members, lost)
    out = {**lost, **dict.fromkeys(idle, FailureKind.STRANDED)}
    back = {name: state.members[name] for name in state.arrivals.unproven if name not in out}
    waiting = {name: member for name, member in state.arrivals.joiners.items() if joined.get(name) != member}
    stranded = {name: member for name, member in state.absent.stranded.items() if joined.get(name) != member}
    return {
        "members": {name: member for name, member in {**state.members, **joined}.items()
                    if name not in out and name not in back},
        "out": {name: kind for name, kind in {**state.absent.out, **state.arrivals.unproven, **out}.items()
                if name not in joined},
        "joiners": {**waiting, **back},
        "prepared": state.arrivals.prepared - {member.incarnation for member in (*joined.values(), *back.values())},
        "stranded": {**stranded, **{name: state.members[name] for name in idle}},
        "unproven": {name: state.absent.out.get(name, FailureKind.EXIT) for name in joined},
        "leaving": state.absent.leaving - {state.members[name].incarnation for name in out},
        "given_up": state.absent.given_up - joined.keys(),
        **merged(each.of_generation(state, out, joined) for each in IN_FORCE),
    }


def _as_asked(state: State, member: Member, kind: FailureKind) -> bool:
    """Whether this is the end of a move, or a requested leave."""
    return kind is FailureKind.MOVE or (kind.asked_for and member.incarnation in state.absent.leaving)


def _sent_back(before: State, after: State) -> tuple[str, ...]:
    """Incarnations of members of `before` that wait to come in again."""
    waiting = after.arrivals.joiners
    return tuple(member.incarnation for name, member in before.members.items() if waiting.get(name) == member)


def stage_gone(state: State) -> str | None:
    """Why the job cannot go on: the first stage without a member that holds it. None: there is no such stage."""
    stage = next((stage for stage, names in enumerate(by_stage(state.stages, state.proven)) if not names), None)
    if stage is None:
        return None
    how = faults.how(state, by_stage(state.stages, state.absent.out)[stage])
    about = "".join(each.about_loss(state) for each in IN_FORCE)
    last = str(state.progress.committed) if state.progress.committed >= 0 else "none"
    return (
        f"stage {stage} has lost its last worker ({how}), so nobody holds its parameters any more; last "
        f"committed iteration: {last}.{about} {RESTART}"
    )


def end_without(state: State, text: str, now: float) -> Step:
    """The end of this life for lack of a stage; the script may be started again."""
    answer = first(each.instead_of_end(state, text, now) for each in IN_FORCE)
    return job_end.end(state, 1, text, now, again=True) if answer is None else answer


# Reports, the plan, and the go


def reported(state: State, happened: Reported, now: float) -> Step:
    """A member stands still and reports what it holds, once per generation. A process that came in holds nothing and is
    not awaited."""
    member = state.member(happened.incarnation)
    if member is None or state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    if member.worker in state.arrivals.unproven or member.worker in state.round.reports:
        return state, ()
    state = state.with_(reports=put(state.round.reports, member.worker, happened.report))
    if not _all_reported(state):
        return state, ()
    event = {"event": "stopped", "t": now, "generation": state.generation, "ms": state.ms(now)}
    stopped = Emit({**event, "reports": {name: report.to_json() for name, report in state.round.reports.items()}})
    state, decisions = _go(state, now)
    return state, (stopped, *decisions)


def planned(state: State, happened: Planned, now: float) -> Step:
    """The plan for the remaining members."""
    if state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    state = state.with_(plan=happened.plan)
    event = training.planned_event(state, happened.plan, happened.plan_ms, now)
    state, decisions = _go(state, now)
    return state, (Emit(event), *decisions)


def redone(state: State, happened: Redone, now: float) -> Step:
    """The redo plan, or the answer that the iteration begins anew."""
    if state.phase is not Phase.RECOVERING or happened.generation != state.generation or state.round.redo is None:
        return state, ()
    later = state.round.redo.ahead
    known = None if later is None else replace(later, known=True, plan=happened.ahead)
    return _go(state.with_(redo=replace(state.round.redo, known=True, plan=happened.plan, ahead=known)), now)


def plan_failed(state: State, happened: PlanFailed, now: float) -> Step:
    """Training is impossible without a plan."""
    if state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    out = ", ".join(in_order(state.absent.out)) or "nobody"
    return job_end.end(state, 1, f"no plan for the grid with {out} out: {happened.error}. {RESTART}", now,
                       again=True)


def _all_reported(state: State) -> bool:
    return len(state.round.reports) >= len(state.members) - len(state.arrivals.unproven)


def _go(state: State, now: float) -> Step:
    """The go, once reports and plan are there: the resume point (an extension's, or `resume.decide`'s), recorded and
    announced. Without one where the job has lost a stage for good, and its survivors only save their state."""
    lost_for_good = state.closing is not None and state.closing.missing
    if state.round.plan is None or not _all_reported(state) or lost_for_good:
        return state, ()
    incarnations = state.incarnations()
    holding = {name: incarnation for name, incarnation in incarnations.items() if name not in state.arrivals.unproven}
    last = state.resume
    announced = None if last is None else (last.next, last.attempt)
    resume: Resume | DeadEnd = first(each.resume(state) for each in IN_FORCE) or decide(
        state.stages, holding, state.round.reports, announced=announced, joined=in_order(state.arrivals.unproven),
        hosts={name: member.host for name, member in state.members.items()}, leaving=_leaving(state))
    if isinstance(resume, DeadEnd):
        return end_without(state, resume.message, now) if stage_gone(state) is not None else job_end.end(
            state, 1, resume.message, now, again=True)
    resume = replace(resume, joined=tuple(in_order(state.arrivals.unproven)))
    fallback = state.tries.fallback is not None and state.round.redo is None
    if fallback and resume.closed and redo.left_for_good(state):
        # A plan by the fallback begins the iteration anew; a stage has closed it since that plan was asked for.
        own = state.with_(fallback=None, plan=None)
        return own, (_make_plan(own),)
    if state.round.redo is None and (done := redo.done(state, resume)):
        rest, order = redo.asked(state, resume, done)
        return state.with_(redo=rest), (order,)
    if state.round.redo is not None and not state.round.redo.known:
        return state, ()
    events: Sequence[Event] = redo.repeated(state, resume, now)
    if events and (bad := faults.of_left_out(state, resume.next)) is not None:
        text, again = bad
        return _end(state, f"{text} It is not left out, since scripts have left that iteration.", again, now)
    if events and redo.left_for_good(state):
        nowhere = DeadEnd("there is no checkpoint of this run to go back to.")
        back: Resume | DeadEnd = first(each.resume(state, resume.closed) for each in IN_FORCE) or nowhere
        if isinstance(back, DeadEnd):
            return _left_for_good(state, resume.next, back.message, now)
        resume, events = back, ()
    resume, carry = first(each.carried(state, resume) for each in IN_FORCE) or (resume, None)
    resume = redo.without_kept(state, resume)
    plan = state.round.plan
    for each in IN_FORCE:
        state, more = each.went(state, resume, now)
        events = (*events, *more)
    go = Go(
        generation=state.generation,
        attempt=resume.attempt,
        members=incarnations,
        plan=plan,
        resume=resume,
        prefix=messages.group_prefix(state.generation, incarnations),
        tries=state.tries.mended,
        closing=None if state.closing is None else state.closing.message,
        closes=redo.closes(state),
        carried=carry or redo.carried(state, resume),
        ahead=redo.ahead(state, resume),
        **merged(each.of_go(state) for each in IN_FORCE),
    )
    events = (*events, training.reconciled_event(state, resume, now)) if state.generation > 1 else ()
    record = records.went(state, resume, plan.digest, events)
    state = training.begin(state.with_(phase=Phase.TRAINING, go=go, resume=resume))
    return state, (record, Tell(tuple(incarnations.values()), go), *map(Emit, events))


def _make_plan(state: State) -> MakePlan:
    return MakePlan(state.generation, state.failed, first(each.plan_by(state) for each in IN_FORCE))


def _leaving(state: State) -> list[str]:
    """Members that will leave, on request or by an extension."""
    asked = [name for name, member in state.members.items() if member.incarnation in state.absent.leaving]
    return [*asked, *(name for each in IN_FORCE for name in each.leaving(state))]


def _left_for_good(state: State, iteration: int, why: str, now: float) -> Step:
    """An iteration that scripts have left can neither be finished nor undone by going back to a checkpoint."""
    text = (f"iteration {iteration} cannot be made to its end: its rest has no plan, or a failure has lost what that "
            f"needs, and scripts have left it, for which reduction exact does not run it again; {why} {RESTART}")
    return _end(state, text, True, now)


def _end(state: State, text: str, again: bool, now: float) -> Step:
    """The job ends, after a last checkpoint of the iteration before if possible."""
    if not job_end.possible(state, ()):
        return job_end.end(state, 1, f"{job_end.sentence(text)} {job_end.last(state)}", now, again=again)
    return next_generation(state, {}, now, now, reason=job_end.LAST, to_close=Closing(text, again=again))


# Events


def suspected(
    state: State, member: Member, kind: FailureKind, since: float, now: float, removed: bool = True
) -> dict[str, Any]:
    """The event of a failure. A member that is not `removed` stays: without it, its stage would be empty."""
    event = {
        "event": "suspected",
        "t": now,
        "generation": state.generation,
        "iteration": state.progress.committed + 1,
        "worker": member.worker,
        "kind": kind,
        "ms": round((now - since) * 1000, 3),
        "rank": member.rank,
        "pid": member.pid,
    }
    if (fault := faults.said_by(state, member)) is not None:
        event |= {"error": str(fault), "where": fault.where}
    return event if removed else {**event, "removed": False}

def _left(state: State, member: Member, kind: FailureKind, now: float) -> dict[str, Any]:
    """The event of a planned leave, or of the end of a move."""
    event = {"event": "left", "t": now, "generation": state.generation, "iteration": state.progress.committed + 1}
    return {**event, "worker": member.worker, "kind": kind, "rank": member.rank, "pid": member.pid}


def _decided(state: State, reason: str | None, now: float) -> dict[str, Any]:
    return {
        "event": "decided",
        "t": now,
        "generation": state.generation,
        "ms": state.ms(now),
        "members": state.incarnations(),
        "out": dict(state.absent.out),
        "reason": reason,
    }
