"""Commands to launchers: what each host is to do with its processes. Events only tell what has happened.

A command names a process by rank and pid, so that the launcher which has it obeys and all others do not. Obeying twice
does no harm: a launcher that has lost its connection gets all that still hold, from the state (`in_force`).
"""

from __future__ import annotations

from typing import Any

from megatron_recycle.membership.decisions import Command
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.state import Member, State


def begun(state: State) -> Command:
    """Training has begun: how often a process that has failed is started again, and a host may fail; and the seconds
    that the whole job has to save and end once it is told to go (None: it goes at once)."""
    description = state.description or {}
    saves = description.get("on_leave") == "checkpoint" and description.get("emergency")
    return Command({"type": "begun", "max_restarts": description.get("max_restarts", 0),
                    "max_failures_per_host": description.get("max_failures_per_host", 0),
                    "leave_timeout": description.get("leave_timeout") if saves else None})


def terminate(seconds: float) -> Command:
    """The job is asked to end by SIGTERM, and scripts handle that themselves: all workers get it, and have so long."""
    return Command({"type": "terminate", "seconds": seconds})


def out(member: Member, kind: FailureKind, fault: Fault | None) -> Command:
    """A process was declared out: it is to end, and its launcher may start another one."""
    error = "" if fault is None else f"{fault} {fault.where}"
    return Command({"type": "out", "rank": member.rank, "pid": member.pid, "kind": kind, "error": error})


def joined(member: Member) -> Command:
    """A process that came in takes part in the training: what happened to its rank before is forgotten."""
    return Command({"type": "joined", "rank": member.rank, "pid": member.pid})


def start(state: State, to: str, mover: Member) -> Command:
    """Start a process for the rank of ``to`` on the device of the mover."""
    return Command({"type": "start", "rank": state.ranks[to], "beside": mover.rank, "pid": mover.pid,
                    "move": state.move})


def drop(rank: int, move: int) -> Command:
    """End the process that was started for this move."""
    return Command({"type": "drop", "rank": rank, "move": move})


def progress() -> Command:
    """An iteration was committed: services that have died before may die again."""
    return Command({"type": "progress"})


def in_force(state: State, host: str) -> list[Command]:
    """All commands that a launcher which has just come has to know."""
    if state.description is None:
        return []
    here = [member for member in state.proven.values() if member.host == host]
    under_way = [start(state, to, mover) for to, incarnation in state.moves.items()
                 if to not in state.joiners and to not in state.members
                 and (mover := state.member(incarnation)) is not None]
    return [begun(state), *(Command(message) for message in state.outs.values()), *map(joined, here), *under_way,
            *(drop(int(rank), move) for rank, move in state.dropped.items())]


def remembered(state: State, *told: Command) -> dict[str, Any]:
    """The field of the state with the latest `out` of each rank."""
    return {**state.outs, **{str(one.message["rank"]): one.message for one in told}}
