"""Stage restore: a lost stage gets a new process, with its keeper's state (`guarding`). Pure, like `machine`.

The survivors have reported and wait. A process is started for one position of the stage: where the last worker has
died, or, if that host is gone, beside a healthy worker, on its device. It builds its model and waits to come in; then a
generation with it is decided, which goes on from the keeper's copy. Every wait has a limit, after which another process
is started elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership import boundary, commands, failing, guarding, records
from megatron_recycle.membership.decisions import AwaitPlace, Decision, Emit, Step
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Exited, Loss, Lost, PlaceLate, Unreadable
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.resume import RESTART, DeadEnd, Resume, by_stage, noted
from megatron_recycle.membership.shards import told
from megatron_recycle.membership.sole_holders import last_known
from megatron_recycle.membership.state import Event, Member, Phase, Restoring, State

_TRIES = 3
"""Limit of processes, for each part of each lost stage, that fail before an iteration is committed."""


def late(state: State, happened: PlaceLate, now: float) -> Step:
    """The processes that have not come, or are not ready, are given up: others are started in their place."""
    if (happened.generation, happened.move) != _wait(state):
        return state, ()
    started, lost = state.tries.restoring, guarding.empty_stages(state)
    drops = [commands.drop(state.forming.ranks[name], one.number) for name, one in started.items() if one.number]
    by_itself = {name for name, one in started.items() if not one.number}
    state = state.with_(restoring={}, given_up=state.absent.given_up | by_itself)
    there = {**state.absent.stranded, **state.arrivals.joiners}
    slow = tuple(Loss(member.incarnation, FailureKind.STALLED) for name, member in there.items()
                 if Process.parse(name).worker.stage in lost and member.incarnation not in state.arrivals.prepared)
    state, decisions = failing.lost(state, Lost(slow, now), now)
    return state, (*drops, *decisions)


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


def _given_up(state: State, why: str, now: float) -> Step:
    text = (failing.stage_gone(state) or "").removesuffix(RESTART)
    return failing.end_without(state, f"{text}It could not be brought back: {why}. {RESTART}", now)


def _fill(state: State, now: float) -> Step:
    """All survivors have reported: take in the waiting processes if they fill the lost stages, else start what is
    missing."""
    entering, lost = boundary.entering(state), guarding.empty_stages(state)
    if not guarding.empty_stages(state, [*state.members, *entering]):
        since = now if state.since is None else state.since
        reason = f"stage {', '.join(map(str, lost))} comes back"
        return failing.next_generation(state, {}, since, now, joined=entering, reason=reason)
    coming = _coming(state)
    whole = {Process.parse(names[0]).worker.stage for names in _workers(state).values() if coming.issuperset(names)}
    missing = [stage for stage in lost if stage not in whole]
    if not missing:
        return state, ()
    newest, copies = guarding.checkpoint(state), guarding.wanted(state)
    if isinstance(why := guarding.source(state.round.reports, lost, newest, copies), str):
        return _given_up(state, why, now)
    decisions: tuple[Decision, ...] = ()
    again = bool(state.tries.restores)
    for stage in missing:
        if state.tries.restores >= _TRIES * len(lost) * state.job.parts:
            state, ending = _given_up(state, f"{state.tries.restores} processes for it have failed, or were not ready "
                                      "in time", now)
            return state, (*decisions, *ending)
        state, more = _start(state, stage, again, now)
        decisions += more
    return state, decisions


def _start(state: State, stage: int, again: bool, now: float) -> Step:
    """Start a process for each part of one worker of ``stage`` that is not coming, unless a launcher does so by
    itself. ``again``: others have failed."""
    coming, number = _coming(state), state.moving.move + 1
    names = [name for name in _workers(state)[_position(state, stage, again)] if name not in coming]
    started = {name: Restoring(0 if _by_itself(state, name) else number, _beside(state, name, again)) for name in names}
    state = state.with_(restores=state.tries.restores + 1, move=number,
                        restoring={**state.tries.restoring, **started})
    decisions: list[Decision] = [records.moves(state, ())]
    for name, one in started.items():
        if one.number:
            decisions.append(commands.start(state, name, one.beside, one.number))
        decisions.append(Emit({"event": "restoring", "t": now, "generation": state.generation, "worker": name,
                               "rank": state.forming.ranks[name], "host": one.beside.host}))
    return state, tuple(decisions)


def _workers(state: State) -> dict[str, list[str]]:
    """All workers of the grid, and their processes."""
    found: dict[str, list[str]] = {}
    for name in in_order(state.forming.ranks):
        found.setdefault(str(Process.parse(name).worker), []).append(name)
    return found


def _coming(state: State) -> set[str]:
    """The positions whose processes wait to come in, or are being started."""
    started = {name for name, one in state.tries.restoring.items() if one.number or name not in state.absent.given_up}
    return {*state.arrivals.joiners, *state.absent.stranded, *started}


def _position(state: State, stage: int, again: bool) -> str:
    """The worker of the stage to come back: one with most parts coming, if possible the last one whose host is
    there."""
    out = [name for name in state.absent.out if Process.parse(name).worker.stage == stage]
    near = [name for name in out if state.absent.out[name] is not FailureKind.UNREACHABLE and not again]
    parts = Counter(str(Process.parse(name).worker) for name in _coming(state))
    return max((str(Process.parse(name).worker) for name in reversed(near or out)), key=lambda worker: parts[worker])


def _by_itself(state: State, name: str) -> bool:
    """Whether a launcher starts this process without a command."""
    kind = state.absent.out.get(name, FailureKind.EXIT)
    return bool(state.job.max_restarts) and kind.refilled and name not in state.absent.given_up


def _beside(state: State, name: str, again: bool) -> Member:
    """The process whose device the new one gets: its predecessor, if that host is there and nothing has failed there
    since; else a survivor of the stage with most workers, each time on another host."""
    before = next((member for member in reversed([*state.known.values()]) if member.worker == name), None)
    gone = state.absent.out.get(name) is FailureKind.UNREACHABLE or name in state.absent.given_up
    if before is not None and not gone and not again:
        return before
    part, peers = Process.parse(name).part, by_stage(state.stages, state.proven)
    alike = [member for other, member in state.proven.items() if Process.parse(other).part == part]
    places: dict[str, Member] = {}
    for member in sorted(alike, key=lambda one: -len(peers[Process.parse(one.worker).worker.stage])):
        places.setdefault(member.host, member)
    return [*places.values()][state.tries.restores % len(places)]


def _wait(state: State) -> tuple[int, int] | None:
    """The wait for processes of a lost stage, which has a limit: its generation, and the last start. None: there is
    none."""
    waits = state.phase is Phase.RECOVERING and guarding.possible(state) and guarding.empty_stages(state)
    return (state.generation, state.moving.move) if waits else None


class LostStages(Extension):
    """A stage that has lost its last worker, or a shard its last holder, comes back from a copy or a checkpoint."""

    handlers = MappingProxyType({PlaceLate: late, Unreadable: unreadable})

    def not_started(self, state: State, happened: Exited, now: float) -> Step:
        """A process started for a lost stage has ended before it said hello."""
        ended = happened.rank, happened.move
        kept = {name: one for name, one in state.tries.restoring.items()
                if not one.number or (state.forming.ranks[name], one.number) != ended}
        return (state if len(kept) == len(state.tries.restoring) else state.with_(restoring=kept)), ()

    def of_generation(self, state: State, lost: Mapping[str, FailureKind],
                      joined: Mapping[str, Member]) -> Mapping[str, Any]:
        """A process that is being started is lost with its host."""
        hosts = {state.members[name].host for name, kind in lost.items() if kind is FailureKind.UNREACHABLE}
        return {"restoring": {name: one for name, one in state.tries.restoring.items() if one.beside.host not in hosts}}

    def may_return(self, state: State) -> bool:
        return guarding.possible(state)

    def waits(self, state: State) -> bool:
        return _wait(state) is not None

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
        if lost := told(guarding.lost_shards(state), last_known(state)):
            event["shards"] = lost
        by = dict.fromkeys(state.members, resume.target)
        return state.with_(committed=resume.target, back=state.generation, committed_by=by, losses={}, behind=0,
                           restoring={}), (event,)

    def after(self, before: State, state: State, decisions: tuple[Decision, ...], now: float) -> Step:
        """Begin what the wait needs, and its limit: a new one for each generation and for each start."""
        if _wait(state) is not None and len(state.round.reports) == len(state.members) - len(state.arrivals.unproven):
            state, more = _fill(state, now)
            decisions += more
        wait = _wait(state)
        return state, decisions if wait in (None, _wait(before)) else (*decisions, AwaitPlace(*wait))
