"""What the machine tells, stores and emits: messages, records, and the end of a job. Pure, like `machine`."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_recycle.membership.decisions import Emit, End, Step, Store, Tell
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.poison import said_by
from megatron_recycle.membership.resume import RESTART
from megatron_recycle.membership.state import Member, Phase, State

MEMBER, OUTSIDE = "member", "outside"
"""Part of a process in a new generation."""
FENCED_STATUS = 3
"""Exit status of a worker that was declared out and notices."""


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


def wire_forms(tell: Tell) -> list[Tell]:
    """What really travels. A stop is the most urgent message of all: each one hears of its own part in the new
    generation only, since everybody's, for thousands of workers, would take longer to send than to decide on."""
    message = tell.message
    if message["type"] != "stop":
        return [tell]
    members = set(message["members"].values())
    short = {"type": "stop", "generation": message["generation"], "missing": len(message["out"])}
    return [Tell(tuple(one for one in tell.to if (one in members) is inside), {**short, "role": role})
            for inside, role in ((True, MEMBER), (False, OUTSIDE))]


def stop_message(state: State) -> dict[str, Any]:
    return {
        "type": "stop",
        "generation": state.generation,
        "members": state.incarnations(),
        "out": dict(state.out),
    }


def end_message(to: tuple[str, ...], status: int, message: str) -> Tell:
    return Tell(to, {"type": "end", "status": status, "message": message})


def ended(state: State, incarnation: str) -> Tell:
    """How the job ended, for one that comes too late."""
    status, message = state.ended or (1, "the job has ended")
    return end_message((incarnation,), status, message)


def refuse(member: Member, text: str) -> Tell:
    return end_message((member.incarnation,), 1, text)


def fence(state: State, member: Member) -> Tell:
    kind = state.out.get(member.worker, "exit")
    text = (
        f"worker {member.worker} was declared out ({kind}); the job goes on without it in generation "
        f"{state.generation}, and nothing this process does counts any more"
    )
    return end_message((member.incarnation,), FENCED_STATUS, text)


def farewell(member: Member, kind: str, generation: int) -> Tell:
    """The end of the job for one that has asked to leave, or that another process of its device stands for now."""
    why = "moved to another stage, where another process stands for it" if kind == "move" else "left as it was asked to"
    text = f"worker {member.worker} has {why}; the job goes on in generation {generation}"
    return end_message((member.incarnation,), 0, text)


def left(state: State, member: Member, kind: str, now: float) -> dict[str, Any]:
    """The event of a planned leave, or of the end of a move."""
    event = {"event": "left", "t": now, "generation": state.generation, "iteration": state.committed + 1}
    return {**event, "worker": member.worker, "kind": kind, "rank": member.rank, "pid": member.pid}


def suspected(
    state: State, member: Member, kind: str, since: float, now: float, removed: bool = True
) -> dict[str, Any]:
    """The line of events.jsonl about a worker that fails, with what it has said; one that is not `removed` stays a
    member."""
    event = {
        "event": "suspected",
        "t": now,
        "generation": state.generation,
        "iteration": state.committed + 1,
        "worker": member.worker,
        "kind": kind,
        "ms": round((now - since) * 1000, 3),
        "rank": member.rank,
        "pid": member.pid,
    }
    if (fault := said_by(state, member)) is not None:
        event |= {"error": str(fault), "where": fault.where}
    return event if removed else {**event, "removed": False}


def decided_record(state: State, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a restarted coordinator needs to know of a generation; it may still have to tell the `events`."""
    return {
        "kind": "decided",
        "generation": state.generation,
        "members": {name: vars(member) for name, member in state.members.items()},
        "out": dict(state.out),
        "fenced": sorted(state.fenced),
        "spares": {name: vars(member) for name, member in state.spares.items()},
        "unproven": dict(state.unproven),
        "models": dict(state.models),
        "ranks": dict(state.ranks),
        "committed": state.committed,
        "since": state.since,
        "description": dict(state.description or {}),
        "left_out": [list(each) for each in state.left_out],
        "closing": None if state.closing is None else state.closing.message,
        "closing_status": 1 if state.closing is None else state.closing.status,
        "faults": [{**vars(said), "fault": said.fault.to_json()} for said in state.faults],
        **of_moves(state),
        "events": list(events),
    }


def of_moves(state: State) -> dict[str, Any]:
    """What a restarted coordinator needs to know of moves, in every record that changes some of it."""
    return {
        "moves": dict(state.moves),
        "move": state.move,
        "moves_due": state.moves_due,
        "fruitless": state.fruitless,
        "given_up": sorted(state.given_up),
    }


def unwritable(journal: Path, error: OSError) -> str:
    """Why a job without a memory ends."""
    return (f"the journal {journal} cannot be written ({error.strerror or error}), and a failure that is not written "
            f"down cannot be recovered: make room on, or mend, the disk of {journal.parent}, or choose another "
            f"--run-dir. {RESTART}")


def skipped(state: State, member: Member, fault: Fault, now: float) -> dict[str, Any]:
    """The line of events.jsonl about a micro-batch that the job goes on without."""
    event = {"event": "skipped", "t": now, "generation": state.generation, "iteration": fault.iteration}
    return {**event, "worker": member.worker, "microbatch": fault.microbatch, "error": str(fault)}


def sentence(text: str) -> str:
    """With a full stop, whoever has written it."""
    return text if text.endswith(".") else f"{text}."


def last(state: State) -> str:
    return f"Last committed iteration: {state.committed if state.committed >= 0 else 'none'}."


def end(state: State, status: int, message: str, now: float) -> Step:
    """The job is over. In a generation that is for a last checkpoint ``message`` says why there is none."""
    if state.closing is not None:
        status = state.closing.status
        message = f"{sentence(state.closing.message)} No checkpoint was written: {sentence(message)} {last(state)}"
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
        Store({"kind": "end", "status": status, "message": message, "events": [event]}, needed=False),
        Emit(event),
        end_message(told, status, message),
        End(status, message),
    )
    return state.with_(phase=Phase.ENDED, ended=(status, message)), decisions
