"""Records of the journal: what a coordinator that comes back knows. Each is written and read here, side by side.

A record is the decision `Record` with its `kind`; the events that belong to it travel with it, so that a coordinator
that dies before it could tell them tells them later (`untold`). `DECIDED` and `MOVES` name the fields of the state that
their records keep, each with its form in JSON; `OTHERWISE` those that follow from other records; `TRANSIENT` those that
are in none, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_recycle.membership.decisions import Note, Record
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.guarding import noted
from megatron_recycle.membership.names import incomplete
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.state import Closing, Member, Message, Phase, Said, State

Events = Sequence[Message]
Json = Mapping[str, Any]


class Form(NamedTuple):
    """A field's form in JSON: how it is written, and read again."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _closing(written: Json | None) -> Closing | None:
    return None if written is None else Closing(**{**written, "missing": tuple(written.get("missing", ()))})


def _said(written: Json) -> Said:
    return Said(**{**written, "fault": Fault.parse(written["fault"])})


_PLAIN = Form(lambda value: value, lambda value: value)
_TABLE = Form(dict, dict)
_NAMES = Form(sorted, frozenset)
_KINDS = Form(dict, lambda kinds: {name: FailureKind(kind) for name, kind in kinds.items()})
_MEMBERS = Form(lambda members: {name: vars(member) for name, member in members.items()},
                lambda members: {name: Member(**fields) for name, fields in members.items()})

DECIDED: Mapping[str, Form] = {
    "generation": _PLAIN,
    "members": _MEMBERS,
    "out": _KINDS,
    "fenced": _NAMES,
    "outs": _TABLE,
    "stranded": _MEMBERS,
    "unproven": _KINDS,
    "models": _TABLE,
    "ranks": _TABLE,
    "committed": _PLAIN,
    "description": Form(lambda told: dict(told or {}), _PLAIN.read),
    "left_out": Form(lambda pairs: [list(pair) for pair in pairs], lambda pairs: tuple(map(tuple, pairs))),
    "closing": Form(lambda one: one and {"message": one.message, "status": one.status, "again": one.again,
                                            "missing": list(one.missing)}, _closing),
    "faults": Form(lambda faults: [{**vars(said), "fault": said.fault.to_json()} for said in faults],
                   lambda faults: tuple(map(_said, faults))),
}
"""Fields in the record of a new generation, the latest of which counts."""

MOVES: Mapping[str, Form] = {
    "moves": _TABLE,
    "move": _PLAIN,
    "moves_due": _PLAIN,
    "fruitless": _PLAIN,
    "given_up": _NAMES,
    "dropped": _TABLE,
}
"""Fields in every record that changes some of them, the latest of which counts."""

OTHERWISE: Mapping[str, str] = {
    "phase": "RETURNING once generation 1 is decided, ENDED with the record of the end",
    "known": "members and stranded ones; whoever else comes says hello again",
    "acknowledged": "the records of those that hold their stage's state",
    "learnt": "a record of its own, at the start",
    "resume": "the record of the last go",
    "plan": "the digest in the record of the last go or adoption, and the plan's own file (`taken_up`)",
    "since": "the record of the generation, unless training has resumed since (`taken_up`)",
    "offers": "the records of offers: no number is used twice",
    "ended": "the record of the end",
    "checkpoints": "the records of the last ones",
}
"""Fields that follow from more than one record, or from one of another kind, and from which."""

_AGAIN = "members and launchers tell it again on every new connection"
_FORMING = "before generation 1 nothing is remembered: workers say hello and ready again"
_OFFERED = "it is offered again, with another number"
TRANSIENT: Mapping[str, str] = {
    "size": "the command line of the coordinator",
    "host": "where this coordinator is",
    "shape": "the command line of the coordinator",
    "joiners": _AGAIN,
    "prepared": _AGAIN,
    "leaving": _AGAIN,
    "standing": _AGAIN,
    "reports": _AGAIN,
    "redo": "it is planned again from the reports",
    "resumed": _AGAIN,
    "finished": _AGAIN,
    "hints": _AGAIN,
    "committed_by": _AGAIN,
    "behind": "it is counted again",
    "losses": "expendable: of iterations that were not told of yet",
    "returned": "it is about this coordinator's own return",
    "go": "whoever has not heard it says so, and the recovery is begun again",
    "retries": "a coordinator that has come back tries as often again",
    "fallback": "the job's own policy is tried again",
    "restoring": "processes are started again",
    "restores": "a coordinator that has come back tries as often again",
    "switch": _OFFERED,
    "offered": _OFFERED,
    "better": "it is searched for again",
    "adopted": "an adoption that is not complete is told again",
    "stood_since": "expendable: a duration in an event",
    "spared": "expendable: it is reported once more",
    "mended": "a coordinator that has come back tries as often again",
    "asked": "launchers tell of the signal again",
    "gone": _FORMING,
    "descriptions": _FORMING,
    "samples": _FORMING,
}
"""Fields that no record has, and why they need not."""


# Writing


def decided(state: State, events: Events) -> Record:
    """A new generation."""
    kept = {name: form.write(getattr(state, name)) for name, form in DECIDED.items()}
    return Record({"kind": "decided", **kept, **_of_moves(state), "since": state.since, "events": list(events)})


def moves(state: State, events: Events, needed: bool = False) -> Record:
    """Moves begun or ended. A coordinator that does not know of an end finds it again; a beginning is `needed`."""
    record = {"kind": "moves", "generation": state.generation, **_of_moves(state), "events": list(events)}
    return Record(record, needed)


def _of_moves(state: State) -> dict[str, Any]:
    return {name: form.write(getattr(state, name)) for name, form in MOVES.items()}


def went(state: State, resume: Resume, digest: str | None, events: Events) -> Record:
    """The go of the current generation, and the plan in force."""
    return _of_generation(state, "go", events, resume=resume.to_json(), digest=digest)


def offer(state: State, number: int) -> Record:
    """A plan or a boundary is offered."""
    return _of_generation(state, "offer", (), number=number)


def proven(state: State, worker: str, event: Message) -> Record:
    """A process that came in holds its stage's state."""
    return _of_generation(state, "proven", (event,), needed=False, worker=worker)


def resumed(state: State, event: Message) -> Record:
    """All train again."""
    return _of_generation(state, "resumed", (event,), needed=False)


def adopted(state: State, digest: str, event: Message) -> Record:
    """All use the plan of this digest."""
    return _of_generation(state, "adopted", (event,), needed=False, digest=digest)


def _of_generation(state: State, kind: str, events: Events, needed: bool = True, **fields: Any) -> Record:
    return Record({"kind": kind, "generation": state.generation, **fields, "events": list(events)}, needed)


def checkpoint(state: State, written: Message, event: Message) -> Record:
    """A checkpoint is whole, or cannot be read after all."""
    return _of_generation(state, "checkpoint", (event,), needed=False, checkpoint=dict(written))


def learnt(state: State) -> Record:
    """By rank, all that the processes of the start were told by others before training began. A process that is to
    join asks for its rank's, before its script begins."""
    told = {rank: list(record) for rank, record in state.learnt.items()}
    return Record({"kind": "learnt", "learnt": told, "events": []})


def committed(iteration: int) -> Note:
    """The last iteration that all have committed; one line, written over again and again."""
    return Note({"kind": "committed", "iteration": iteration})


def ended(status: int, message: str, again: bool, event: Message) -> Record:
    """The end of the job, or of this life of it."""
    return Record({"kind": "end", "status": status, "message": message, "again": again, "events": [event]},
                  needed=False)


# Reading


def restore(size: int, records: Sequence[Json]) -> State:
    """The state to start from; feed `Restarted` to it once.

    `records` are the journal's, in order. Before generation 1 nothing was decided. Iterations that were committed since
    the last note follow from what workers say again.
    """
    state = State(size=size, offers=max((one["number"] for one in records if one["kind"] == "offer"), default=0))
    if (record := _last(records, "decided")) is not None:
        state = _of_decided(state, record, records, _committed(records))
    if (record := _last(records, "go")) is not None:
        resume = Resume.from_json(record["resume"])
        before = resume.target if record["generation"] == 1 else -1  # a checkpoint's iterations are not of this run
        state = state.with_(resume=resume, committed=max(state.committed, before))
    if any(one["kind"] == "go" and one["resume"]["restored"] for one in records):
        state = state.with_(committed=_committed_again(records))
    for record in (one for one in records if one["kind"] == "checkpoint"):
        state = state.with_(checkpoints=noted(state.checkpoints, record["checkpoint"]))
    if (record := _last(records, "end")) is not None:
        state = state.with_(phase=Phase.ENDED, ended=(record["status"], record["message"], record["again"]))
    return state


def _of_decided(state: State, decided: Json, records: Sequence[Json], committed: int) -> State:
    moves = next((record for record in reversed(records) if "moves" in record), decided)
    kept = {name: form.read(decided[name]) for name, form in DECIDED.items()}
    kept |= {name: form.read(moves[name]) for name, form in MOVES.items()}
    state = state.with_(**kept, phase=Phase.RETURNING)
    proven = {record["worker"] for record in records
              if record["kind"] == "proven" and record["generation"] == state.generation}
    unproven = incomplete(state.unproven, proven)
    learnt = _last(records, "learnt")
    return state.with_(
        known={member.incarnation: member for member in (*state.members.values(), *state.stranded.values())},
        unproven=unproven,
        acknowledged=frozenset(proven & unproven.keys()),
        learnt={} if learnt is None else learnt["learnt"],
        committed=max(state.committed, committed),
    )


def _committed(records: Sequence[Json]) -> int:
    return max((one["iteration"] for one in records if one["kind"] == "committed"), default=-1)


def _committed_again(records: Sequence[Json]) -> int:
    """The last committed iteration of a job that has gone back to an earlier one, at the last such go."""
    at = max(number for number, one in enumerate(records) if one["kind"] == "go" and one["resume"]["restored"])
    back, since = records[at], records[at + 1:]
    decided = [one["committed"] for one in since if one["kind"] == "decided"]
    return max(back["resume"]["target"], *decided, _committed(since))


def _last(records: Sequence[Json], kind: str) -> Json | None:
    return next((record for record in reversed(records) if record["kind"] == kind), None)


def taken_up(state: State, records: Sequence[Json], load: Callable[[str], Json | None]) -> State:
    """`state` with the plan in force, without which no better one is looked for, and with the moment of the failure
    if training has not resumed since. `load` gives the plan of a digest, if it is still there."""
    of_it = [record for record in records if record.get("generation") == state.generation]
    kinds = {record["kind"]: record for record in of_it}  # the last of each
    if "go" not in kinds:
        return state
    digest = kinds.get("adopted", kinds["go"])["digest"]
    since = None if "resumed" in kinds else kinds["decided"].get("since")
    return state.with_(plan=load(digest) if digest else None, since=since)


def untold(records: Sequence[Json], told: Sequence[Json]) -> list[dict[str, Any]]:
    """Events of recorded decisions that a coordinator died too early to tell; `told` is events.jsonl, of which nothing
    else follows."""
    seen = {_identity(event) for event in told}
    recorded = [dict(event) for record in records for event in record.get("events", ())]
    return [event for event in recorded if _identity(event) not in seen]


def _identity(event: Json) -> str:
    return repr([event.get(name) for name in ("event", "t", "generation", "worker")])
