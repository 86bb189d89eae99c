"""Processes that come in while the job runs, and members that ask to leave. Pure, like `machine`.

A joiner builds its model alone and waits; a leaving member trains on. Both wait for a boundary (see `boundary`), at
which a new generation begins with the joiner and without the leaver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.membership import commands, forming, messages, records
from megatron_recycle.membership.decisions import Emit, Step, Tell
from megatron_recycle.membership.description import Description, Model, difference
from megatron_recycle.membership.extension import IN_FORCE, merged
from megatron_recycle.membership.inputs import Holds, Leave, Ready, Received, StaysOut
from megatron_recycle.membership.names import incomplete
from megatron_recycle.membership.state import Member, State


def hello(state: State, member: Member) -> Step:
    """A process of no earlier life asks to come in: it waits, if need be until its position is empty."""
    text = _no_place(state, member)
    if text is not None:
        return state, (messages.refuse(member, text),)
    joiners = {**state.arrivals.joiners, member.worker: member}
    restoring = {name: one for name, one in state.tries.restoring.items() if name != member.worker}
    state = state.with_(joiners=joiners, restoring=restoring, known={**state.known, member.incarnation: member})
    # It may believe that it is in: the coordinator that took it in died before it could announce the end of that.
    return state, (Tell((member.incarnation,), messages.stop(state)),)


def _no_place(state: State, member: Member) -> str | None:
    waiting = state.arrivals.joiners.get(member.worker) or state.absent.stranded.get(member.worker)
    if waiting is not None and waiting.incarnation != member.incarnation:
        return f"worker {member.worker} cannot join: another process (pid {waiting.pid} on {waiting.host}) waits for it"
    if state.forming.ranks and state.forming.ranks.get(member.worker) != member.rank:
        known = state.forming.ranks.get(member.worker, "no part of the job")
        return f"worker {member.worker} cannot join as rank {member.rank}: in this job it is {known}"
    return None


def stays_out(state: State, happened: StaysOut, now: float) -> Step:
    """A launcher will not start this rank again. This comes right after the end of its process: often before that
    recovery, after which moves are sought anyway."""
    name = next((name for name in state.absent.out if state.forming.ranks.get(name) == happened.rank), None)
    if name is None or name in state.absent.given_up:
        return state, ()
    state = state.with_(given_up=state.absent.given_up | {name}, moves_due=True)
    return state, (records.moves(state, ()), *(one for each in IN_FORCE for one in each.seek(state)))


def waiting(state: State, incarnation: str) -> Member | None:
    """The joiner of this incarnation, if there is one."""
    return _of(state.arrivals.joiners, incarnation)


def stranded(state: State, incarnation: str) -> Member | None:
    """The stranded process of this incarnation, if there is one."""
    return _of(state.absent.stranded, incarnation)


def _of(members: Mapping[str, Member], incarnation: str) -> Member | None:
    return next((member for member in members.values() if member.incarnation == incarnation), None)


def ready(state: State, happened: Ready, now: float) -> Step:
    """A joiner's model is built, or it stands still (again, after a failed attempt to take it in)."""
    member = waiting(state, happened.incarnation) or stranded(state, happened.incarnation)
    if member is None:
        return state, ()
    differs = difference(_description(state, member), happened.description)
    if differs is None and member.incarnation in state.arrivals.prepared:
        return state, ()
    if differs is None:
        event = {"event": "waiting", "t": now, "generation": state.generation, "worker": member.worker}
        known = member in state.absent.stranded.values()
        decisions = () if known else (Emit({**event, "rank": member.rank, "pid": member.pid}),)
        return state.with_(prepared=state.arrivals.prepared | {member.incarnation}), decisions
    key, ours, theirs = differs
    text = (
        f"worker {member.worker} cannot join: the job has {key} = {ours}, it has {theirs}; start it with the job's own "
        "configuration and model"
    )
    return _without(state, member), (messages.refuse(member, text), Emit(_failed(state, member, text, now)))


def _description(state: State, member: Member) -> Description:
    """The description required of the joiner."""
    return state.job.told(state.forming.models.get(forming.model_key(member.worker), Model()))


def lost(state: State, incarnation: str, why: str, now: float) -> Step:
    """A joiner is lost that was part of no generation."""
    member = waiting(state, incarnation)
    if member is None:
        return state, ()
    text = f"worker {member.worker} ({why}) is gone before it had joined"
    return _without(state, member), (messages.refuse(member, text), Emit(_failed(state, member, why, now)))


def _without(state: State, member: Member) -> State:
    joiners = {name: other for name, other in state.arrivals.joiners.items() if other != member}
    return state.with_(joiners=joiners, prepared=state.arrivals.prepared - {member.incarnation})


def _failed(state: State, member: Member, reason: str, now: float) -> dict[str, Any]:
    event = {"event": "join_failed", "t": now, "generation": state.generation, "worker": member.worker}
    return {**event, "reason": reason, "rank": member.rank, "pid": member.pid}


def leave(state: State, happened: Leave, now: float) -> Step:
    member = state.member(happened.incarnation)
    if member is None or member.incarnation in state.absent.leaving:
        return state, ()
    event = {"event": "leaving", "t": now, "generation": state.generation, "worker": member.worker}
    return state.with_(leaving=state.absent.leaving | {member.incarnation}), (Emit(event),)


def acknowledged(state: State, happened: Holds, now: float) -> Step:
    """A joiner holds its peers' state from now on, recorded for the next leader."""
    member = state.member(happened.incarnation)
    open_ = state.arrivals.unproven.keys() - state.round.acknowledged
    if member is None or member.worker not in open_ or happened.generation != state.generation:
        return state, ()
    event = {
        "event": "joined",
        "t": now,
        "generation": state.generation,
        "iteration": state.progress.committed + 1,
        "worker": member.worker,
        "ms": round((now - (state.stood_since or now)) * 1000, 3),
        "rank": member.rank,
        "pid": member.pid,
        **_rate(happened.received),
        **merged(each.of_joined(state, member.worker) for each in IN_FORCE),
    }
    record = records.proven(state, member.worker, event)
    confirmed = state.round.acknowledged | {member.worker}
    unproven = incomplete(state.arrivals.unproven, confirmed)  # a part of a stage alone does not count
    state = state.with_(unproven=unproven, acknowledged=confirmed & unproven.keys())
    return state, (record, commands.joined(member), Emit(event))


def _rate(received: Received) -> dict[str, Any]:
    """Bytes and milliseconds of the copy, and megabytes per second."""
    size, ms = received.bytes, received.ms
    return {} if ms <= 0 else {"bytes": size, "copy_ms": ms, "mb_per_s": round(size / 1000 / ms, 1)}
