"""Coming in and going out while the job runs. Pure, like `machine`.

A process that wants to come in builds its model alone and waits. Once it is ready, or a member has asked to leave,
and no recovery is under way, the members are offered a switch: like a better plan it is agreed upon with a commit,
and they then stand still between two iterations, with nothing in flight. When all of them have said so, a new
generation is decided, as after a failure: with the joiners in it, and without the leavers. A failure meanwhile
cancels all of it; it is offered again after the recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from megatron_recycle.membership import forming, moving, notices
from megatron_recycle.membership.decisions import Decision, Emit, Step, Store, Tell
from megatron_recycle.membership.inputs import Boundary, Holds, Leave, Ready
from megatron_recycle.membership.names import Process, in_order, workers_of
from megatron_recycle.membership.persistent_map import put
from megatron_recycle.membership.resume import RESTART, by_stage
from megatron_recycle.membership.state import Member, Phase, State


def hello(state: State, member: Member) -> Step:
    """A process of no earlier life wants to come in: it waits, also for its position to become empty."""
    text = _no_place(state, member)
    if text is not None:
        return state, (notices.refuse(member, text),)
    joiners = {**state.joiners, member.worker: member}
    state = state.with_(joiners=joiners, known={**state.known, member.incarnation: member})
    # It may believe that it is in: taken in by a coordinator that died before it could tell the end of that.
    return state, (Tell((member.incarnation,), notices.stop_message(state)),)


def _no_place(state: State, member: Member) -> str | None:
    waiting = state.joiners.get(member.worker) or state.spares.get(member.worker)
    if waiting is not None and waiting.incarnation != member.incarnation:
        return f"worker {member.worker} cannot join: another process (pid {waiting.pid} on {waiting.host}) waits for it"
    if state.ranks and state.ranks.get(member.worker) != member.rank:
        known = state.ranks.get(member.worker, "no part of the job")
        return f"worker {member.worker} cannot join as rank {member.rank}: in this job it is {known}"
    return None


def waiting(state: State, incarnation: str) -> Member | None:
    """The joiner of this incarnation, if it is one."""
    return _of(state.joiners, incarnation)


def spare(state: State, incarnation: str) -> Member | None:
    """The spare of this incarnation, if it is one."""
    return _of(state.spares, incarnation)


def _of(members: Mapping[str, Member], incarnation: str) -> Member | None:
    return next((member for member in members.values() if member.incarnation == incarnation), None)


def ready(state: State, happened: Ready, now: float) -> Step:
    """A joiner's model is built, or it stands still (again, after an attempt to take it in that failed)."""
    member = waiting(state, happened.incarnation) or spare(state, happened.incarnation)
    if member is None:
        return state, ()
    difference = forming.difference(_description(state, member), happened.description)
    if difference is None and member.incarnation in state.prepared:
        return state, ()
    if difference is None:
        event = {"event": "waiting", "t": now, "generation": state.generation, "worker": member.worker}
        told = () if member in state.spares.values() else (Emit({**event, "rank": member.rank, "pid": member.pid}),)
        return state.with_(prepared=state.prepared | {member.incarnation}), told
    key, ours, theirs = difference
    text = (
        f"worker {member.worker} cannot join: the job has {key} = {ours}, it has {theirs}; start it with the job's own "
        "configuration and model"
    )
    return _without(state, member), (notices.refuse(member, text), Emit(_failed(state, member, text, now)))


def _description(state: State, member: Member) -> dict[str, Any]:
    """What the joiner must say of the job."""
    return {**(state.description or {}), **state.models.get(forming.model_key(member.worker), {})}


def lost(state: State, incarnation: str, kind: str, now: float) -> Step:
    """A joiner is gone; nobody has counted on it."""
    member = waiting(state, incarnation)
    if member is None:
        return state, ()
    text = f"worker {member.worker} ({kind}) is gone before it had joined"
    return _without(state, member), (notices.refuse(member, text), Emit(_failed(state, member, kind, now)))


def _without(state: State, member: Member) -> State:
    joiners = {name: other for name, other in state.joiners.items() if other != member}
    return state.with_(joiners=joiners, prepared=state.prepared - {member.incarnation})


def _failed(state: State, member: Member, reason: str, now: float) -> dict[str, Any]:
    event = {"event": "join_failed", "t": now, "generation": state.generation, "worker": member.worker}
    return {**event, "reason": reason, "rank": member.rank, "pid": member.pid}


def leave(state: State, happened: Leave, now: float) -> Step:
    member = state.member(happened.incarnation)
    if member is None or member.incarnation in state.leaving:
        return state, ()
    event = {"event": "leaving", "t": now, "generation": state.generation, "worker": member.worker}
    return state.with_(leaving=state.leaving | {member.incarnation}), (Emit(event),)


# The switch


def entering(state: State) -> dict[str, Member]:
    """Who can be taken in: joiners, and with them the spares of their worker. All parts of a worker or none."""
    found = {
        name: member
        for name, member in {**state.spares, **state.joiners}.items()
        if member.incarnation in state.prepared and name not in state.members
    }
    parts = Counter(Process.parse(name).worker for name in found)
    wanted = int((state.description or {}).get("parts", 1))
    return {name: member for name, member in found.items() if parts[Process.parse(name).worker] == wanted}


def going(state: State) -> dict[str, str]:
    """The members that leave at the boundary, as `lost` with kind "leave" or "move". One that is to give its state to
    a joiner stays until that is done."""
    wanted = [name for name, member in state.members.items() if member.incarnation in state.leaving]
    moved = dict.fromkeys((name for name in moving.moved(state) if name not in wanted), "move")
    staying = by_stage(state.stages, set(state.proven) - set(wanted))
    joining = by_stage(state.stages, entering(state))
    kept = {names[0] for stage, names in enumerate(by_stage(state.stages, wanted))
            if names and joining[stage] and not staying[stage]}
    return {**dict.fromkeys((name for name in in_order(wanted) if name not in kept), "leave"), **moved}


def planned(state: State, member: Member, kind: str) -> bool:
    """Whether this loss is one that `going` has named."""
    return kind == "move" or (kind == "leave" and member.incarnation in state.leaving)


def propose(state: State, decisions: tuple[Decision, ...]) -> Step:
    """Offer a switch after `decisions` if there is a reason for one and none is on offer."""
    quiet = state.phase is Phase.TRAINING and state.since is None and not state.switch
    asked = state.joiners or state.leaving or moving.moved(state)
    if not quiet or not asked or not (entering(state) or going(state)):
        return state, decisions
    number = state.offers + 1
    state = state.with_(switch=number, offers=number)
    record = {"kind": "offer", "generation": state.generation, "number": number, "events": []}
    return state, (*decisions, Store(record), Tell(tuple(state.incarnations().values()), switch_message(state)))


def switch_message(state: State) -> dict[str, Any]:
    return {"type": "offer", "generation": state.generation, "number": state.switch, "plan": None}


def stands(state: State, happened: Boundary) -> State:
    """A member waits at the boundary. A coordinator that has come back meanwhile hears it again."""
    member = state.member(happened.incarnation)
    current = state.phase in (Phase.TRAINING, Phase.RETURNING) and happened.generation == state.generation
    if member is None or not current:
        return state
    return state.with_(standing=put(state.standing, member.worker, happened.t))


def all_stand(state: State) -> bool:
    return state.phase is Phase.TRAINING and bool(state.standing) and state.standing.keys() >= state.members.keys()


def stage_left(state: State, leavers: Mapping[str, str]) -> str | None:
    """Why the job cannot go on without `leavers`; None if it can."""
    left = by_stage(state.stages, set(state.proven) - set(leavers))
    stage = next((stage for stage, names in enumerate(left) if not names), None)
    if stage is None:
        return None
    names = ", ".join(name for name in leavers if Process.parse(name).worker.stage == stage)
    return (f"stage {stage} would have no worker any more: the last of it leave as they were asked to ({names}); last "
            f"committed iteration: {state.committed}. {RESTART}")


# What a new generation makes of it


def changes(state: State, out: Mapping[str, str], joined: Mapping[str, Member]) -> dict[str, Any]:
    """Fields of the state in a generation that `joined` come in with and that is without `out`.

    Who came in with the last generation and has not acknowledged its state goes back to waiting: that state may be
    half a copy, or older than what was decided without it.
    """
    back = {name: state.members[name] for name in state.unproven if name not in out}
    waiting = {name: member for name, member in state.joiners.items() if joined.get(name) != member}
    return {
        "members": {name: member for name, member in {**state.members, **joined}.items()
                    if name not in out and name not in back},
        "out": {name: kind for name, kind in {**state.out, **state.unproven, **out}.items() if name not in joined},
        "joiners": {**waiting, **back},
        "prepared": state.prepared - {member.incarnation for member in (*joined.values(), *back.values())},
        "spares": {name: member for name, member in state.spares.items() if joined.get(name) != member},
        "unproven": {name: state.out.get(name, "exit") for name in joined},
        "acknowledged": frozenset(),
        "leaving": state.leaving - {state.members[name].incarnation for name in out},
        "given_up": state.given_up - joined.keys(),
        "faults": tuple(said for said in state.faults if said.worker not in joined),
        "moves_due": state.moves_due or moving.changed(state, out, joined),
        "switch": 0,
    }


def sent_back(before: State, after: State) -> tuple[str, ...]:
    """Incarnations of members of `before` that wait to come in again."""
    return tuple(member.incarnation for name, member in before.members.items() if after.joiners.get(name) == member)


def acknowledged(state: State, happened: Holds, now: float) -> Step:
    """A process that came in holds its peers' state from now on, and whoever leads next has to know that."""
    member = state.member(happened.incarnation)
    open_ = state.unproven.keys() - state.acknowledged
    if member is None or member.worker not in open_ or happened.generation != state.generation:
        return state, ()
    event = {
        "event": "joined",
        "t": now,
        "generation": state.generation,
        "iteration": state.committed + 1,
        "worker": member.worker,
        "ms": round((now - (state.stood_since or now)) * 1000, 3),
        "rank": member.rank,
        "pid": member.pid,
        **_rate(happened.received),
    }
    if (left := moving.from_where(state, member.worker)) is not None:
        event["moved_from"] = left
    record = {"kind": "proven", "generation": state.generation, "worker": member.worker, "events": [event]}
    told = state.acknowledged | {member.worker}
    unproven = still_unproven(state.unproven, told)
    state = state.with_(unproven=unproven, acknowledged=told & unproven.keys())
    return state, (Store(record, needed=False), Emit(event))


def still_unproven(unproven: Mapping[str, str], acknowledged: Collection[str]) -> dict[str, str]:
    """Without the workers all of whose parts have acknowledged: to hold a part of a stage is to hold nothing."""
    without = set(workers_of(unproven.keys() - set(acknowledged)))
    return {name: kind for name, kind in unproven.items() if Process.parse(name).worker in without}


def _rate(received: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes and milliseconds of the copy, and megabytes per second."""
    size, ms = received.get("bytes"), received.get("ms")
    if not isinstance(size, int) or not isinstance(ms, (int, float)) or ms <= 0:
        return {}
    return {"bytes": size, "copy_ms": ms, "mb_per_s": round(size / 1000 / ms, 1)}
