"""Commands to launchers: what each host must do with its processes. Events, in contrast, only inform.

A command names a process by rank and pid; only the launcher that has it obeys. Obeying is idempotent: a launcher that
has lost its connection gets all commands that still hold, from the state (`in_force`).
"""

from __future__ import annotations

from megatron_recycle.membership.decisions import Command
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.protocol import Begun, Drop, Joined, Out, Progress, Start, Terminate
from megatron_recycle.membership.state import Member, State


def begun(state: State) -> Command:
    """Training has begun: limits on restarts of a failed process and on failures of a host, and the seconds that the
    whole job has to save and end once asked to leave (None: it ends at once)."""
    job = state.job
    saves = job.on_leave == "checkpoint" and job.emergency
    return Command(Begun(job.max_restarts, job.leave_timeout if saves else None, job.max_failures_per_host))


def terminate(seconds: float) -> Command:
    """SIGTERM for all workers, which have ``seconds`` to end: their scripts handle the signal themselves."""
    return Command(Terminate(seconds))


def out(member: Member, kind: FailureKind, fault: Fault | None) -> Out:
    """A process was declared out: it must end, and its launcher may start another one."""
    error = "" if fault is None else f"{fault} {fault.where}"
    return Out(member.rank, member.pid, kind, error)


def joined(member: Member) -> Command:
    """A joiner takes part in training: earlier failures of its rank are forgotten."""
    return Command(Joined(member.rank, member.pid))


def start(state: State, to: str, beside: Member, number: int) -> Command:
    """Start a process for the rank of ``to`` on the device of this one; ``number`` is that of the move."""
    return Command(Start(state.forming.ranks[to], beside.rank, beside.pid, number))


def drop(rank: int, move: int) -> Command:
    """End the process that was started for this move."""
    return Command(Drop(rank, move))


def progress() -> Command:
    """An iteration was committed: services regain their restarts."""
    return Command(Progress())


def in_force(state: State, host: str) -> list[Command]:
    """All commands that a newly connected launcher needs."""
    if state.description is None:
        return []
    members = [member for member in state.proven.values() if member.host == host]
    moving = [start(state, to, mover, state.moving.move) for to, incarnation in state.moving.moves.items()
              if to not in state.arrivals.joiners and to not in state.members
              and (mover := state.member(incarnation)) is not None]
    restoring = [start(state, to, one.beside, one.number) for to, one in state.tries.restoring.items() if one.number]
    return [begun(state), *map(Command, state.absent.outs.values()), *map(joined, members), *moving, *restoring,
            *(drop(int(rank), move) for rank, move in state.moving.dropped.items())]


def remembered(state: State, *outs: Out) -> dict[str, Out]:
    """The field of the state with the latest `out` of each rank."""
    return {**state.absent.outs, **{str(one.rank): one for one in outs}}
