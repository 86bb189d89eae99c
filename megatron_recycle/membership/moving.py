"""Moves: a healthy worker takes an empty position of another stage that was hit too hard. Pure, like `machine`.

The planner decides which moves pay off. A move is a join followed by a planned leave: a second process is started
beside the mover's, on the same device, builds the other stage's model and comes in at a boundary. The mover keeps its
old stage until an iteration has committed with the new process in place, and leaves at the next boundary. An earlier
failure ends the move: the mover stays where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_recycle.membership import commands, messages, records
from megatron_recycle.membership.decisions import Decision, Emit, FindMoves, Step
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.failure_kinds import FailureKind, describe_status
from megatron_recycle.membership.inputs import Exited, MovesFound
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.resume import by_stage, single
from megatron_recycle.membership.state import Member, Phase, State

_FRUITLESS = 3
"""After so many consecutive moves with a failed process, the next would fail too."""
_PROCESS = "its process"
_FEWEST = 2
"""Workers that a stage keeps when it gives one away."""


def seek(state: State) -> tuple[FindMoves, ...]:
    """Ask the planner, if the job wants moves and no process is coming in or leaving, or will come back by itself."""
    changing = state.arrivals.joiners or state.absent.leaving or state.moving.moves
    quiet = state.phase is Phase.TRAINING and state.since is None and not changing
    wanted = state.job.moves and state.moving.fruitless < _FRUITLESS
    if not quiet or not wanted or not state.moving.moves_due or not state.absent.out:
        return ()
    if state.job.max_restarts and any(
            kind.refilled and name not in state.absent.given_up for name, kind in state.absent.out.items()):
        return ()  # a launcher starts it again
    return (FindMoves(state.generation, state.failed, _relief(state)),)


def _relief(state: State) -> tuple[tuple[str, str], ...]:
    """A move for each stage with one worker that leaves no other stage with one: (mover, the empty position)."""
    workers = {Process.parse(name).worker for name in state.proven}
    counts = Counter(worker.stage for worker in workers)
    empty = [Process.parse(name).worker for name in in_order(state.absent.out) if name in state.forming.ranks]
    found: list[tuple[str, str]] = []
    for stage in sorted(single([*state.proven])):
        to = next((worker for worker in empty if worker.stage == stage), None)
        donor = max(counts, key=lambda one: counts[one], default=stage)
        if to is not None and counts[donor] > _FEWEST:
            mover = max(worker for worker in workers if worker.stage == donor)
            found.append((str(mover), str(to)))
            workers.discard(mover)
            counts[donor] -= 1
    return tuple(found)


def begin(state: State, happened: MovesFound, now: float) -> Step:
    """Begin the planner's moves; a membership change meanwhile voids them."""
    if happened.generation != state.generation or not seek(state):
        return state, ()
    found = {to: state.members[mover] for mover, to in happened.moves.items()
             if mover in state.members and to in state.absent.out and to not in state.members}
    if not found:
        return state, ()
    moves = {to: mover.incarnation for to, mover in found.items()}
    again = {str(state.forming.ranks[to]) for to in found}
    dropped = {rank: move for rank, move in state.moving.dropped.items() if rank not in again}
    state = state.with_(moves=moves, move=state.moving.move + 1, moves_due=False, dropped=dropped)
    begun = [_moving(state, to, mover, now) for to, mover in found.items()]
    starts = [commands.start(state, to, mover, state.moving.move) for to, mover in found.items()]
    return state, (records.moves(state, begun, needed=True), *starts, *map(Emit, begun))


def _moving(state: State, to: str, mover: Member, now: float) -> dict[str, Any]:
    event = {"event": "moving", "t": now, "generation": state.generation, "worker": mover.worker, "to": to}
    return {**event, "rank": mover.rank, "pid": mover.pid, "to_rank": state.forming.ranks[to],
            "number": state.moving.move}


def _void(before: State, state: State, to: str, mover: Member) -> str | None:
    """Why the mover stays where it is; None: the move goes on."""
    arrival = state.members.get(to) or state.arrivals.joiners.get(to)
    if arrival is not None and arrival.host != mover.host:
        return "a process of another host came for the position"
    if arrival is None and (to in before.arrivals.joiners or to in before.members):
        return f"{_PROCESS} has failed"
    if to in state.members:
        return None
    if mover.incarnation in state.absent.leaving:
        return "the worker was asked to leave"
    lost = {name: kind for name, kind in state.absent.out.items() if name not in before.absent.out}
    joined = [name for name in state.members if name in before.absent.out]
    if state.generation != before.generation and _changed(before, lost, joined):
        return "the membership has changed"
    return None


def _changed(before: State, lost: Mapping[str, FailureKind], joined: Iterable[str]) -> bool:
    """Whether more than moves has happened, so that other moves may pay off now. After moves alone the membership is as
    wanted, and new measurements are no reason to move back and forth."""
    failed = any(kind is not FailureKind.MOVE for kind in lost.values())
    return failed or any(name not in before.moving.moves for name in joined)


def _drop(state: State, to: str, reason: str, now: float) -> Step:
    mover = state.known[state.moving.moves[to]]
    fails = reason.startswith(_PROCESS)
    event = {"event": "move_failed", "t": now, "generation": state.generation, "worker": mover.worker, "to": to,
             "reason": reason, "to_rank": state.forming.ranks[to], "number": state.moving.move}
    left = {other: incarnation for other, incarnation in state.moving.moves.items() if other != to}
    rank = state.forming.ranks[to]
    state = state.with_(moves=left, fruitless=state.moving.fruitless + fails, moves_due=True,
                        dropped={**state.moving.dropped, str(rank): state.moving.move})
    decisions: tuple[Decision, ...] = (
        records.moves(state, (event,)), commands.drop(rank, state.moving.move), Emit(event))
    waiting = state.arrivals.joiners.get(to)
    if waiting is not None and waiting.host == mover.host:
        joiners = {name: other for name, other in state.arrivals.joiners.items() if name != to}
        state = state.with_(joiners=joiners, prepared=state.arrivals.prepared - {waiting.incarnation})
        text = f"worker {mover.worker} does not move to {to}: {reason}"
        decisions = (*decisions, messages.refuse(waiting, text))
    return state, decisions


def _moved(state: State) -> dict[str, FailureKind]:
    """Movers whose new process has been in place for a committed iteration, and that can go without leaving their old
    stage empty."""
    if state.phase is not Phase.TRAINING or state.resume is None or state.progress.committed < state.resume.next:
        return {}
    done = {state.known[incarnation].worker for to, incarnation in state.moving.moves.items()
            if to in state.members and to not in state.arrivals.unproven and state.member(incarnation)}
    if not done:
        return {}
    gone = {*done, *(name for name, member in state.members.items() if member.incarnation in state.absent.leaving)}
    left = by_stage(state.stages, set(state.proven) - gone)
    return {name: FailureKind.MOVE for name in in_order(done) if left[Process.parse(name).worker.stage]}


class Moves(Extension):
    """Moves to stages that were hit too hard, where the planner finds that they pay off."""

    handlers = MappingProxyType({MovesFound: begin})

    def not_started(self, state: State, happened: Exited, now: float) -> Step:
        """Drop a move whose process has ended early; it may be an older process, since reconnects repeat ends."""
        own = happened.move == state.moving.move
        to = next((to for to in state.moving.moves if own and state.forming.ranks[to] == happened.rank), None)
        if to is None or to in state.arrivals.joiners or to in state.members:
            return state, ()
        return _drop(state, to, f"{_PROCESS} ended with {describe_status(happened.status)}; see {happened.log}", now)

    def of_generation(self, state: State, lost: Mapping[str, FailureKind],
                      joined: Mapping[str, Member]) -> Mapping[str, Any]:
        return {"moves_due": state.moving.moves_due or _changed(state, lost, joined)}

    def leaving(self, state: State) -> Sequence[str]:
        """Movers whose stage keeps another worker."""
        leaving = [name for name, member in state.members.items() if member.incarnation in state.absent.leaving]
        movers = [name for name, member in state.members.items() if member.incarnation in state.moving.moves.values()]
        left = by_stage(state.stages, state.members.keys() - {*leaving, *movers})
        return [name for name in movers if left[Process.parse(name).worker.stage] and name not in leaving]

    def seek(self, state: State) -> Sequence[Decision]:
        return seek(state)

    def going(self, state: State) -> Mapping[str, FailureKind]:
        return _moved(state)

    def of_joined(self, state: State, name: str) -> Mapping[str, Any]:
        """The position from which this worker moves, during its move."""
        incarnation = state.moving.moves.get(name)
        return {} if incarnation is None else {"moved_from": state.known[incarnation].worker}

    def after(self, before: State, state: State, decisions: tuple[Decision, ...], now: float) -> Step:
        """End the moves that are over, or no longer possible."""
        for to, incarnation in state.moving.moves.items():
            mover = state.member(incarnation)
            if mover is None:  # gone: as planned, or failed, and its device is the new process's alone
                left = {other: moved for other, moved in state.moving.moves.items() if other != to}
                state = state.with_(moves=left, fruitless=0)
                decisions = (*decisions, records.moves(state, ()))
            elif reason := _void(before, state, to, mover):
                state, more = _drop(state, to, reason, now)
                decisions = (*decisions, *more)
        return state, decisions
