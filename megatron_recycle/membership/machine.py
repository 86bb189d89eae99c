"""Who is in and what happens next: a pure function from state and input to state and decisions.

Nothing here reads a clock, a socket or a file, so that every interleaving can be tested without processes.
The protocol is design section 6. Inputs of processes that are not members (fenced, unknown) and inputs of
generations that are over change nothing.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

from megatron_recycle.membership import progress
from megatron_recycle.membership.resume import RESTART, Stop, by_stage, decide
from megatron_recycle.membership.state import (
    Adopted,
    Await,
    Committed,
    Decision,
    Emit,
    End,
    Exited,
    Finished,
    Hello,
    Improved,
    Input,
    Interrupted,
    Loss,
    Lost,
    MakePlan,
    Member,
    Phase,
    PlanFailed,
    Planned,
    Ready,
    Reported,
    ReportsLate,
    Resumed,
    State,
    Step,
    Store,
    Tell,
    in_order,
)
from megatron_recycle.plan.grid import Grid

FENCED_STATUS = 3
"""Exit status of a worker that was declared out and notices."""


def step(state: State, happened: Input, now: float) -> Step:
    """The state after `happened`, and what is to be done, in order. `now` is Unix seconds."""
    if state.phase is Phase.ENDED and not isinstance(happened, Hello):
        return state, ()
    return _HANDLERS[type(happened)](state, happened, now)


def group_prefix(generation: int, members: Mapping[str, str]) -> str:
    """The store prefix of a generation's groups: workers that disagree on the members never meet."""
    text = json.dumps(dict(members), sort_keys=True, separators=(",", ":"))
    return f"g{generation}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def describe_status(status: int | None) -> str:
    """An exit status in words; None where nobody could see it."""
    if status is None:
        return "an unknown status"
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


# Coming in


def _hello(state: State, happened: Hello, now: float) -> Step:
    member = happened.member
    if state.phase is Phase.ENDED:
        return state, (_end_message((member.incarnation,), 1, "the job has ended"),)
    if member.incarnation in state.fenced:
        return state, (_fence(state, member),)
    if state.member(member.incarnation) is not None:
        return state, _remind(state, member.incarnation)
    if state.phase is not Phase.FORMING:
        text = f"worker {member.worker} cannot join: the job runs in generation {state.generation} already"
        return state, (_refuse(member, text),)
    if member.incarnation in state.known:
        return state, ()
    for other in state.known.values():
        if member.worker == other.worker or member.rank == other.rank:
            text = f"rank {member.rank} as {member.worker}: rank {other.rank} is {other.worker} already"
            return state, (_refuse(member, text),)
    if not 0 <= member.rank < state.size:
        return state, (_refuse(member, f"rank {member.rank} is not of this job of {state.size} workers"),)
    state = state.with_(known={**state.known, member.incarnation: member})
    if state.gone:
        return _end(state, 1, _left_early(min(state.gone), 0, ""), now)
    return state, ()


def _remind(state: State, incarnation: str) -> tuple[Decision, ...]:
    """What a member must know that may have missed it; what it has heard before does it no harm."""
    told: list[Decision] = []
    if state.generation > 1:
        told.append(Tell((incarnation,), _stop_message(state)))
    if state.phase is Phase.TRAINING and state.go is not None:
        told.append(Tell((incarnation,), state.go))
    return tuple(told)


def _ready(state: State, happened: Ready, now: float) -> Step:
    member = state.known.get(happened.incarnation)
    if member is None or state.phase is not Phase.FORMING:
        return state, ()
    for other, description in state.descriptions.items():
        if difference := _difference(description, happened.description):
            key, ours, theirs = difference
            text = (
                f"worker {other} has {key} = {ours} but worker {member.worker} has {theirs}: give all "
                f"workers the same configuration and the same model"
            )
            return _end(state, 1, text, now)
    state = state.with_(
        descriptions={**state.descriptions, member.worker: happened.description},
        reports={**state.reports, member.worker: happened.report},
    )
    return _form(state, now) if len(state.descriptions) == state.size else (state, ())


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first key, with both values, in which two descriptions differ."""
    for key in sorted({*one, *other}):
        ours, theirs = (json.dumps(item.get(key), sort_keys=True) for item in (one, other))
        if ours != theirs:
            return key, ours, theirs
    return None


def _form(state: State, now: float) -> Step:
    """All workers are ready: generation 1."""
    description = next(iter(state.descriptions.values()))
    grid = Grid(description["grid"]["stages"], tuple(description["grid"]["microbatches"]))
    wanted = {str(worker) for worker in grid.workers()}
    if wanted != set(state.descriptions):
        text = (
            f"the grid has {grid.pipelines} pipelines x {grid.stages} stages, but the workers are "
            f"{', '.join(in_order(state.descriptions))}: start {len(wanted)} processes"
        )
        return _end(state, 1, text, now)
    state = state.with_(
        phase=Phase.RECOVERING,
        generation=1,
        members={member.worker: member for member in state.known.values()},
        description=description,
        descriptions={},
    )
    started = {
        "event": "started",
        "t": now,
        "generation": 1,
        "members": state.incarnations(),
        "ranks": {name: state.members[name].rank for name in in_order(state.members)},
        "grid": dict(description["grid"]),
    }
    return state, (Store(_decided_record(state)), Emit(started), MakePlan(1, frozenset()))


# Losing workers


def _lost(state: State, happened: Lost, now: float) -> Step:
    lost = {}
    for loss in happened.losses:
        if (member := state.member(loss.incarnation)) is not None:
            lost[member.worker] = loss.kind
    return _regenerate(state, lost, happened.since, now) if lost else (state, ())


def _exited(state: State, happened: Exited, now: float) -> Step:
    member = next((m for m in state.known.values() if (m.rank, m.pid) == (happened.rank, happened.pid)), None)
    if state.phase is Phase.FORMING:
        return _exited_early(state, member, happened, now)
    if member is None or state.member(member.incarnation) is None:
        return state, ()
    left = not happened.status and member.worker in state.finished
    return _lost(state, Lost((Loss(member.incarnation, "leave" if left else "exit"),), happened.since), now)


def _exited_early(state: State, member: Member | None, happened: Exited, now: float) -> Step:
    """An exit before generation 1 ends the job, unless nobody uses the plugin and all end well."""
    well = not happened.status and (member is None or member.worker in state.finished)
    if not well or (member is None and state.known):
        return _end(state, 1, _left_early(happened.rank, happened.status, happened.log), now)
    state = state.with_(gone=state.gone | {happened.rank})
    if len(state.gone) < state.size:
        return state, ()
    return _end(state, 0, "all workers ended well; none of them trained with the plugin", now)


def _left_early(rank: int, status: int | None, log: str) -> str:
    where = f": see {log}" if log else ""
    return f"rank {rank} ended with {describe_status(status)} before training began{where}"


def _reports_late(state: State, happened: ReportsLate, now: float) -> Step:
    if state.phase is not Phase.RECOVERING or happened.generation != state.generation:
        return state, ()
    missing = [name for name in in_order(state.members) if name not in state.reports]
    return _regenerate(state, dict.fromkeys(missing, "stalled"), now, now) if missing else (state, ())


def _regenerate(state: State, lost: Mapping[str, str], since: float, now: float) -> Step:
    """Generation g+1 without `lost`: decided, stored, announced; everything of g is void."""
    removed = [state.members[name] for name in in_order(lost)]
    suspected = [
        {
            "event": "suspected",
            "t": now,
            "generation": state.generation,
            "iteration": state.committed + 1,
            "worker": member.worker,
            "kind": lost[member.worker],
            "ms": round((now - since) * 1000, 3),
            "rank": member.rank,
            "pid": member.pid,
        }
        for member in removed
    ]
    first = since if state.since is None else min(state.since, since)
    members = {name: member for name, member in state.members.items() if name not in lost}
    state = state.with_(
        phase=Phase.RECOVERING,
        generation=state.generation + 1,
        members=members,
        out={**state.out, **lost},
        fenced=state.fenced | {member.incarnation for member in removed},
        reports={},
        plan=None,
        since=first,
        resumed={},
        finished=frozenset(),
        adopted={},
    )
    decided = {
        "event": "decided",
        "t": now,
        "generation": state.generation,
        "ms": state.ms(now),
        "members": state.incarnations(),
        "out": dict(state.out),
    }
    store = Store(_decided_record(state))
    # Survivors learn of it before anything else happens: they hang until their transports are aborted.
    announce: list[Decision] = [
        Tell(tuple(state.incarnations().values()), _stop_message(state)),
        MakePlan(state.generation, state.failed),
        Await(state.generation),
    ]
    tell: list[Decision] = [Emit(event) for event in (*suspected, decided)]
    tell += [_fence(state, member) for member in removed]
    empty = next((s for s, names in enumerate(by_stage(state.stages, members)) if not names), None)
    state, commits = progress.committed_by_all(state, now)
    if empty is not None:
        state, ending = _end(state, 1, _stage_gone(state, empty), now)
        return state, (store, *tell, *commits, *ending)
    return state, (store, *announce, *tell, *commits)


def _stage_gone(state: State, stage: int) -> str:
    lost = by_stage(state.stages, state.out)[stage]
    how = ", ".join(f"{name} {state.out[name]}" for name in lost)
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
    state = state.with_(reports={**state.reports, member.worker: happened.report})
    if len(state.reports) < len(state.members):
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
    return _end(state, 1, f"no plan for the grid with {out} out: {happened.error}. {RESTART}", now)


def _go(state: State, now: float) -> Step:
    """If reports and plan are there: where to resume, stored and announced."""
    if state.plan is None or len(state.reports) < len(state.members):
        return state, ()
    last = state.resume
    announced = None if last is None else (last.next, last.attempt)
    incarnations = state.incarnations()
    resume = decide(state.stages, incarnations, state.reports, announced=announced)
    if isinstance(resume, Stop):
        return _end(state, 1, resume.message, now)
    go = {
        "type": "go",
        "generation": state.generation,
        "attempt": resume.attempt,
        "members": incarnations,
        "plan": state.plan,
        "resume": resume.to_json(),
        "prefix": group_prefix(state.generation, incarnations),
    }
    record = {
        "kind": "go",
        "generation": state.generation,
        "resume": go["resume"],
        "digest": state.plan.get("digest"),
    }
    state = progress.begin(state.with_(phase=Phase.TRAINING, go=go, resume=resume))
    decisions: list[Decision] = [Store(record)]
    if state.generation > 1:
        decisions.append(Emit(progress.reconciled_event(state, resume, now)))
    decisions.append(Tell(tuple(incarnations.values()), go))
    return state, tuple(decisions)


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
    state, ending = _end(state, 0, "the job has finished", now)
    return state, (left, *ending)


def _interrupted(state: State, happened: Interrupted, now: float) -> Step:
    return _end(state, happened.status, happened.message, now)


def _end(state: State, status: int, message: str, now: float) -> Step:
    told = tuple(incarnation for incarnation in state.known if incarnation not in state.fenced)
    event = {
        "event": "finished",
        "t": now,
        "generation": state.generation,
        "iteration": state.committed if state.committed >= 0 else None,
        "status": status,
        "message": message,
        "out": dict(state.out),
    }
    decisions = (
        Store({"kind": "end", "generation": state.generation, "status": status, "message": message}),
        Emit(event),
        _end_message(told, status, message),
        End(status, message),
    )
    return state.with_(phase=Phase.ENDED), decisions


# Messages and records


def _stop_message(state: State) -> dict[str, Any]:
    return {
        "type": "stop",
        "generation": state.generation,
        "members": state.incarnations(),
        "out": dict(state.out),
    }


def _end_message(to: tuple[str, ...], status: int, message: str) -> Tell:
    return Tell(to, {"type": "end", "status": status, "message": message})


def _refuse(member: Member, text: str) -> Tell:
    return _end_message((member.incarnation,), 1, text)


def _fence(state: State, member: Member) -> Tell:
    kind = state.out.get(member.worker, "exit")
    text = (
        f"worker {member.worker} was declared out ({kind}); the job goes on without it in generation "
        f"{state.generation}, and nothing this process does counts any more"
    )
    return _end_message((member.incarnation,), FENCED_STATUS, text)


def _decided_record(state: State) -> dict[str, Any]:
    """What a restarted coordinator needs to know of a generation."""
    return {
        "kind": "decided",
        "generation": state.generation,
        "members": {name: vars(member) for name, member in state.members.items()},
        "out": dict(state.out),
        "fenced": sorted(state.fenced),
        "committed": state.committed,
        "description": dict(state.description or {}),
    }


_HANDLERS: Mapping[type, Callable[[State, Any, float], Step]] = {
    Hello: _hello,
    Ready: _ready,
    Lost: _lost,
    Exited: _exited,
    Reported: _reported,
    ReportsLate: _reports_late,
    Planned: _planned,
    PlanFailed: _plan_failed,
    Improved: progress.improved,
    Resumed: progress.resumed,
    Committed: progress.committed,
    Adopted: progress.adopted,
    Finished: _finished,
    Interrupted: _interrupted,
}
