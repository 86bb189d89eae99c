"""Commands to launchers: what each host is to do with its processes. Events only tell what has happened.

A command names a process by rank and pid, so that the launcher which has it obeys and all others do not. Obeying twice
does no harm: a launcher that has lost its connection gets all that still hold, from the state (`in_force`).
"""

from __future__ import annotations

from megatron_recycle.membership.decisions import Command
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.protocol import Begun, Drop, Joined, Out, Progress, Start, Terminate
from megatron_recycle.membership.state import Member, State


def begun(state: State) -> Command:
    """Training has begun: how often a process that has failed is started again, and the seconds that the whole job has
    to save and end once it is told to go (None: it goes at once)."""
    job = state.job
    saves = job.on_leave == "checkpoint" and job.emergency
    return Command(Begun(job.max_restarts, job.leave_timeout if saves else None, job.max_failures_per_host))


def terminate(seconds: float) -> Command:
    """The job is asked to end by SIGTERM, and scripts handle that themselves: all workers get it, and have so long."""
    return Command(Terminate(seconds))


def out(member: Member, kind: FailureKind, fault: Fault | None) -> Out:
    """A process was declared out: it is to end, and its launcher may start another one."""
    error = "" if fault is None else f"{fault} {fault.where}"
    return Out(member.rank, member.pid, kind, error)


def joined(member: Member) -> Command:
    """A process that came in takes part in the training: what happened to its rank before is forgotten."""
    return Command(Joined(member.rank, member.pid))


def start(state: State, to: str, mover: Member) -> Command:
    """Start a process for the rank of ``to`` on the device of the mover."""
    return Command(Start(state.forming.ranks[to], mover.rank, mover.pid, state.moving.move))


def drop(rank: int, move: int) -> Command:
    """End the process that was started for this move."""
    return Command(Drop(rank, move))


def progress() -> Command:
    """An iteration was committed: services that have died before may die again."""
    return Command(Progress())


def in_force(state: State, host: str) -> list[Command]:
    """All commands that a launcher which has just come has to know."""
    if state.description is None:
        return []
    here = [member for member in state.proven.values() if member.host == host]
    under_way = [start(state, to, mover) for to, incarnation in state.moving.moves.items()
                 if to not in state.arrivals.joiners and to not in state.members
                 and (mover := state.member(incarnation)) is not None]
    return [begun(state), *map(Command, state.absent.outs.values()), *map(joined, here), *under_way,
            *(drop(int(rank), move) for rank, move in state.moving.dropped.items())]


def remembered(state: State, *told: Out) -> dict[str, Out]:
    """The field of the state with the latest `out` of each rank."""
    return {**state.absent.outs, **{str(one.rank): one for one in told}}
