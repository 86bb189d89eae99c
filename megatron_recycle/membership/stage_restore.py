"""Stage restore: a lost stage gets a new process, with its keeper's state (`guarding`). Pure, like `machine`.

The survivors have reported and wait. A process is started for one position of the stage: where the last worker has
died, or, if that host is gone, beside a healthy worker, on its device. It builds its model and waits to come in; then a
generation with it is decided, which goes on from the keeper's copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership import boundary, commands, failing, guarding, records, shards
from megatron_recycle.membership.decisions import AwaitPlace, Decision, Emit, Step
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Exited, PlaceLate, Unreadable
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.resume import RESTART, DeadEnd, Resume, by_stage, noted
from megatron_recycle.membership.state import Event, Member, Phase, State

_TRIES = 3
"""Limit of processes that end before their stage trains again."""


def late(state: State, happened: PlaceLate, now: float) -> Step:
    """No process has come for the stage."""
    if happened.generation != state.generation or not _waits(state):
        return state, ()
    return _given_up(state, (), "no process came for it in time", now)


def unreadable(state: State, happened: Unreadable, now: float) -> Step:
    """A member cannot read the checkpoint that all go back to (a file is truncated, or gone): the previous one is used.
    The first report counts: the generation is over then."""
    member = state.member(happened.incarnation)
    known = next((one for one in reversed(state.checkpoints) if one.place == happened.place), None)
    if member is None or known is None or happened.generation != state.generation:
        return state, ()
    known = replace(known, unread=f"{happened.why} on {member.worker}")
    event = {"event": "unreadable", "t": now, "generation": state.generation, "worker": member.worker,
             "iteration": known.iteration, "place": happened.place, "error": happened.why}
    state = state.with_(checkpoints=noted(state.checkpoints, known))
    record = records.checkpoint(state, known, event)
    state, decisions = failing.next_generation(
        state, {}, now, now, reason=f"the checkpoint in {happened.place} cannot be read ({known.unread})")
    return state, (record, Emit(event), *decisions)


def _given_up(state: State, decisions: tuple[Decision, ...], why: str, now: float) -> Step:
    text = (failing.stage_gone(state) or "").removesuffix(RESTART)
    state, ending = failing.end_without(state, f"{text}It could not be brought back: {why}. {RESTART}", now)
    return state, (*decisions, *ending)


def _start(state: State, stage: int, now: float) -> Step:
    """Start a process for each part of one worker of ``stage``, unless a launcher does so by itself."""
    worker = _position(state, stage)
    names = [name for name in in_order(state.forming.ranks) if str(Process.parse(name).worker) == worker]
    names = [name for name in names if name not in state.absent.stranded and name not in state.arrivals.joiners]
    state = state.with_(restores=state.tries.restores + 1, move=state.moving.move + 1,
                        restoring={**state.tries.restoring, **dict.fromkeys(names, state.moving.move + 1)})
    decisions: list[Decision] = []
    for name in names:
        kind = state.absent.out.get(name, FailureKind.EXIT)
        by_itself = state.job.max_restarts and kind.refilled and name not in state.absent.given_up
        beside = _beside(state, name, stage)
        if not by_itself:
            decisions.append(commands.start(state, name, beside))
        decisions.append(Emit({"event": "restoring", "t": now, "generation": state.generation, "worker": name,
                               "rank": state.forming.ranks[name], "host": beside.host}))
    return state, tuple(decisions)


def _position(state: State, stage: int) -> str:
    """The worker of the stage to come back: if possible the last one whose host is there."""
    out = [name for name in state.absent.out if Process.parse(name).worker.stage == stage]
    near = [name for name in out if state.absent.out[name] is not FailureKind.UNREACHABLE and not state.tries.restores]
    return str(Process.parse((near or out)[-1]).worker)


def _beside(state: State, name: str, stage: int) -> Member:
    """The process whose device the new one gets: its predecessor, if that host is there and has not failed yet; else a
    survivor of the stage with most workers."""
    before = next((member for member in reversed([*state.known.values()]) if member.worker == name), None)
    if before is not None and state.absent.out.get(name) is not FailureKind.UNREACHABLE and state.tries.restores <= 1:
        return before
    part = Process.parse(name).part
    alike = [member for other, member in state.proven.items() if Process.parse(other).part == part]
    peers = by_stage(state.stages, state.proven)
    return max(alike, key=lambda member: len(peers[Process.parse(member.worker).worker.stage]))


def _waits(state: State) -> bool:
    return state.phase is Phase.RECOVERING and guarding.possible(state) and bool(guarding.empty_stages(state))


class LostStages(Extension):
    """A stage that has lost its last worker, or a shard its last holder, comes back from a copy or a checkpoint."""

    handlers = MappingProxyType({PlaceLate: late, Unreadable: unreadable})

    def not_started(self, state: State, happened: Exited, now: float) -> Step:
        """A process started for a lost stage has ended before it said hello."""
        kept = {name: number for name, number in state.tries.restoring.items()
                if (state.forming.ranks[name], number) != (happened.rank, happened.move)}
        return (state if len(kept) == len(state.tries.restoring) else state.with_(restoring=kept)), ()

    def may_return(self, state: State) -> bool:
        return guarding.possible(state)

    def waits(self, state: State) -> bool:
        return _waits(state)

    def about_loss(self, state: State) -> str:
        return guarding.not_asked_for(state) + guarding.unread(state)

    def resume(self, state: State, closed: Sequence[int] = ()) -> Resume | DeadEnd | None:
        return guarding.resume(state, closed) if closed or guarding.goes_back(state) else None

    def went(self, state: State, resume: Resume, now: float) -> tuple[State, Sequence[Event]]:
        """All go back; the event has the iteration."""
        if not resume.restored:
            return state, ()
        event: dict[str, Any] = {
            "event": "restored", "t": now, "generation": state.generation, "iteration": resume.target,
            "ms": state.ms(now), "stages": [int(stage) for stage in resume.restored], "from": dict(resume.restored),
            "lost": max(0, state.progress.committed - resume.target)}
        if lost := shards.told(guarding.lost_shards(state), () if state.resume is None else state.resume.shards):
            event["shards"] = lost
        by = dict.fromkeys(state.members, resume.target)
        return state.with_(committed=resume.target, back=state.generation, committed_by=by, losses={}, behind=0,
                           restoring={}), (event,)

    def after(self, before: State, state: State, decisions: tuple[Decision, ...], now: float) -> Step:
        """Start the next process, or take in the waiting ones."""
        if not _waits(state) or len(state.round.reports) < len(state.members) - len(state.arrivals.unproven):
            return state, decisions
        entering = boundary.entering(state)
        lost = guarding.empty_stages(state)
        if not guarding.empty_stages(state, [*state.members, *entering]):
            since = now if state.since is None else state.since
            reason = f"stage {', '.join(map(str, lost))} comes back"
            state, more = failing.next_generation(state, {}, since, now, joined=entering, reason=reason)
            return state, (*decisions, *more)
        coming = by_stage(state.stages, {**state.arrivals.joiners, **state.tries.restoring})
        missing = [stage for stage in lost if not coming[stage]]
        if not missing:
            return state, decisions
        newest, copies = guarding.checkpoint(state), guarding.wanted(state)
        if isinstance(why := guarding.source(state.round.reports, lost, newest, copies), str):
            return _given_up(state, decisions, why, now)
        for stage in missing:
            if state.tries.restores >= _TRIES * max(1, len(lost)):
                return _given_up(state, decisions, f"{state.tries.restores} processes for it have failed", now)
            state, more = _start(state, stage, now)
            decisions += more
        return state, (*decisions, AwaitPlace(state.generation))
