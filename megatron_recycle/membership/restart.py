"""What a restarted coordinator knows: a pure function of its journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_recycle.membership import learnt, moving
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.joining import still_unproven
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.state import Closing, Member, Phase, Said, State


def restore(size: int, records: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]] = ()) -> State:
    """The state to start from; feed `Restarted` to it once.

    `records` are the journal's, in order; of events.jsonl, which may have been lost, `told` is what is left: an
    iteration whose commit is in it is not told again. Before generation 1 nothing was decided: the workers say hello
    and ready again.
    """
    committed = max((one["iteration"] for one in (*records, *told)
                     if "committed" in (one.get("kind"), one.get("event"))), default=-1)
    decided = next((record for record in reversed(records) if record["kind"] == "decided"), None)
    went = next((record for record in reversed(records) if record["kind"] == "go"), None)
    ended = next((record for record in reversed(records) if record["kind"] == "end"), None)
    state = State(size=size)
    numbers = [record["number"] for record in records if record["kind"] == "offer"]
    state = state.with_(offers=max(numbers, default=0))
    if decided is not None:
        members = {name: Member(**fields) for name, fields in decided["members"].items()}
        spares = {name: Member(**fields) for name, fields in decided["spares"].items()}
        last = max(committed, decided["committed"])
        proven = {record["worker"] for record in records
                  if record["kind"] == "proven" and record["generation"] == decided["generation"]}
        state = state.with_(
            phase=Phase.RETURNING,
            generation=decided["generation"],
            known={member.incarnation: member for member in (*members.values(), *spares.values())},
            members=members,
            out=decided["out"],
            fenced=frozenset(decided["fenced"]),
            spares=spares,
            unproven=(unproven := still_unproven(decided["unproven"], proven)),
            acknowledged=frozenset(proven & unproven.keys()),
            models=decided["models"],
            ranks=decided["ranks"],
            description=decided["description"],
            learnt=learnt.restored(records),
            committed=last,
            faults=tuple(Said(**{**said, "fault": Fault.parse(said["fault"])})
                         for said in decided["faults"]),
            left_out=tuple((iteration, microbatch) for iteration, microbatch in decided["left_out"]),
            closing=None if decided["closing"] is None else Closing(decided["closing"], decided["closing_status"]),
            **moving.restored(records),
        )
    if went is not None:
        resume = Resume.from_json(went["resume"])
        before = resume.target if went["generation"] == 1 else -1  # a checkpoint's iterations are not of this run
        state = state.with_(resume=resume, committed=max(state.committed, before))
    if ended is not None:
        state = state.with_(phase=Phase.ENDED, ended=(ended["status"], ended["message"]))
    return state


def taken_up(
    state: State, records: Sequence[Mapping[str, Any]], load: Callable[[str], Mapping[str, Any] | None],
) -> State:
    """`state` with the plan in force, without which no better one is looked for, and with the moment of the failure
    if training has not resumed since. `load` gives the plan of a digest, if it is still there."""
    of_it = [record for record in records if record.get("generation") == state.generation]
    kinds = {record["kind"]: record for record in of_it}  # the last of each
    if "go" not in kinds:
        return state
    digest = kinds.get("adopted", kinds["go"])["digest"]
    since = None if "resumed" in kinds else kinds["decided"].get("since")
    return state.with_(plan=load(digest) if digest else None, since=since)


def untold(records: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events of stored decisions that a coordinator died too early to tell; `told` is events.jsonl."""
    seen = {_identity(event) for event in told}
    stored = [dict(event) for record in records for event in record.get("events", ())]
    return [event for event in stored if _identity(event) not in seen]


def _identity(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return event["event"], event.get("t"), event.get("generation"), event.get("worker")
