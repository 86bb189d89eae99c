"""Journal records: the knowledge of a restarted coordinator. Each type is written and read here, side by side.

A record is the decision `Record` with its line (`lines`). Its events travel with it, so that they can still be emitted
if the coordinator dies first (`untold`). `DECIDED` and `MOVES` name the state fields that their records keep;
`OTHERWISE` the fields that follow from other records; `TRANSIENT` the fields without a record, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from megatron_recycle.membership.decisions import Note, Record
from megatron_recycle.membership.lines import (
    LINES,
    Adopted,
    CheckpointNoted,
    Committed,
    Decided,
    Ended,
    Learnt,
    Line,
    Moved,
    Offered,
    OfGeneration,
    OfMoves,
    Proven,
    Resumed,
    Went,
)
from megatron_recycle.membership.names import incomplete
from megatron_recycle.membership.resume import Checkpoint, Resume, noted
from megatron_recycle.membership.state import Event, Phase, State
from megatron_recycle.plan.plan_file import PlanFile

Events = Sequence[Event]
Json = Mapping[str, Any]
Known = TypeVar("Known", bound=Line)


MOVES = tuple(name for name in OfMoves.__struct_fields__ if name != "events")
"""Fields in every record that changes some of them; the latest counts."""

DECIDED = tuple(name for name in Decided.__struct_fields__ if name not in (*MOVES, "events", "since"))
"""Fields in the record of a new generation; the latest counts."""

OTHERWISE: Mapping[str, str] = {
    "phase": "RETURNING once generation 1 is decided, ENDED with the record of the end",
    "known": "members and stranded ones; whoever else comes says hello again",
    "acknowledged": "the records of those that hold their stage's state",
    "learnt": "a record of its own, at the start",
    "resume": "the record of the last go",
    "back": "the records of goes",
    "plan": "the digest in the record of the last go or adoption, and the plan's own file (`taken_up`)",
    "since": "the record of the generation, unless training has resumed since (`taken_up`)",
    "offers": "the records of offers: no number is used twice",
    "ended": "the record of the end",
    "checkpoints": "the records of the last ones",
}
"""Fields that follow from several records, or from another kind, and from which."""

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
"""Fields without a record, and why they need none."""


# Writing


def decided(state: State, events: Events) -> Record:
    """A new generation."""
    return Record(Decided(**_kept(state, (*DECIDED, *MOVES)), since=state.since, events=tuple(events)))


def moves(state: State, events: Events, needed: bool = False) -> Record:
    """Moves begun or ended. A restarted coordinator finds an unrecorded end again; a beginning is `needed`."""
    return Record(Moved(generation=state.generation, **_kept(state, MOVES), events=tuple(events)), needed)


def _kept(state: State, names: Sequence[str]) -> dict[str, Any]:
    found = {name: state.value(name) for name in names}
    kept = {name: tuple(sorted(value)) if isinstance(value, frozenset) else value for name, value in found.items()}
    return {**kept, "description": state.job} if "description" in kept else kept


def went(state: State, resume: Resume, digest: str | None, events: Events) -> Record:
    """The go of the current generation, and the plan in force."""
    return Record(Went(state.generation, resume, digest, tuple(events), state.closing))


def offer(state: State, number: int) -> Record:
    """A plan or a boundary is offered."""
    return Record(Offered(state.generation, number))


def proven(state: State, worker: str, event: Event) -> Record:
    """A joiner holds its stage's state."""
    return Record(Proven(state.generation, worker, (event,)), needed=False)


def resumed(state: State, event: Event) -> Record:
    """All train again."""
    return Record(Resumed(state.generation, (event,)), needed=False)


def adopted(state: State, digest: str, event: Event) -> Record:
    """All use the plan of this digest."""
    return Record(Adopted(state.generation, digest, (event,)), needed=False)


def checkpoint(state: State, written: Checkpoint, event: Event) -> Record:
    """A checkpoint is whole, or turned out to be unreadable."""
    return Record(CheckpointNoted(state.generation, written, (event,)), needed=False)


def learnt(state: State) -> Record:
    """By rank, the set-up records of the processes of the start. A process that is to join asks for its rank's, before
    its script begins."""
    return Record(Learnt({rank: tuple(map(dict, record)) for rank, record in state.forming.learnt.items()}))


def committed(state: State) -> Note:
    """The last iteration that all have committed; one line, overwritten each time."""
    return Note(Committed(state.progress.committed, state.progress.back))


def ended(status: int, message: str, again: bool, event: Event) -> Record:
    """The end of the job, or of this life of it."""
    return Record(Ended(status, message, again, (event,)), needed=False)


# Reading


def restore(size: int, records: Sequence[Json]) -> State:
    """The state to start from; feed `Restarted` to it once.

    `records` are the journal's, in order. Before generation 1 there are no decisions. Workers report iterations
    committed since the last note again. Raises WireError for a record of another version.
    """
    lines = [LINES.read(record) for record in records]
    state = State(size=size, offers=max((one.number for one in lines if isinstance(one, Offered)), default=0))
    if (decided := _last(lines, Decided)) is not None:
        state = _of_decided(state, decided, lines)
    if (gone := _last(lines, Went)) is not None:
        closing = gone.closing if gone.generation == state.generation else state.closing
        state = state.with_(resume=gone.resume, closing=closing)
    back, last = _progress(lines)
    state = state.with_(back=back, committed=last)
    for one in lines:
        if isinstance(one, CheckpointNoted):
            state = state.with_(checkpoints=noted(state.checkpoints, one.checkpoint))
    if (end := _last(lines, Ended)) is not None:
        state = state.with_(phase=Phase.ENDED, ended=(end.status, end.message, end.again))
    return state


def _of_decided(state: State, decided: Decided, lines: Sequence[Line]) -> State:
    moves = _last(lines, OfMoves) or decided
    kept = {**{name: getattr(decided, name) for name in DECIDED}, **{name: getattr(moves, name) for name in MOVES}}
    state = state.with_(**{**kept, "fenced": frozenset(decided.fenced), "given_up": frozenset(moves.given_up)},
                        phase=Phase.RETURNING)
    proven = {one.worker for one in lines if isinstance(one, Proven) and one.generation == state.generation}
    unproven = incomplete(state.arrivals.unproven, proven)
    learnt = _last(lines, Learnt)
    return state.with_(
        known={member.incarnation: member for member in (*state.members.values(), *state.absent.stranded.values())},
        unproven=unproven,
        acknowledged=frozenset(proven & unproven.keys()),
        learnt={} if learnt is None else learnt.learnt,
    )


def _progress(lines: Sequence[Line]) -> tuple[int, int]:
    """The last generation that went back to an earlier state (0: none), and the last iteration committed since."""
    back, last = 0, -1
    for one in lines:
        if isinstance(one, Went) and one.resume.restored:
            back, last = one.generation, one.resume.target
        elif isinstance(one, Went) and one.generation == 1:  # the iterations of a checkpoint
            last = max(last, one.resume.target)
        elif isinstance(one, Decided):
            last = max(last, one.committed)
        elif isinstance(one, Committed) and one.back == back:
            last = max(last, one.iteration)
    return back, last


def _last(lines: Sequence[Line], kind: type[Known]) -> Known | None:
    return next((one for one in reversed(lines) if isinstance(one, kind)), None)


def taken_up(state: State, records: Sequence[Json], load: Callable[[str], PlanFile | None]) -> State:
    """`state` with the plan in force (the base of the search for better ones), and with the time of the failure if
    training has not resumed since. `load` returns the plan of a digest, if it still exists."""
    lines = [LINES.read(record) for record in records]
    of_it = [one for one in lines if isinstance(one, (Decided, OfGeneration)) and one.generation == state.generation]
    gone, adopted, decided = _last(of_it, Went), _last(of_it, Adopted), _last(of_it, Decided)
    if gone is None or decided is None:
        return state
    digest = gone.digest if adopted is None else adopted.digest
    since = decided.since if _last(of_it, Resumed) is None else None
    return state.with_(plan=load(digest) if digest else None, since=since)


def untold(records: Sequence[Json], emitted: Sequence[Json]) -> list[dict[str, Any]]:
    """Events of recorded decisions that the coordinator died too early to emit. `emitted` is events.jsonl, used for
    nothing else."""
    seen = {_identity(event) for event in emitted}
    recorded = [dict(event) for record in records for event in getattr(LINES.read(record), "events", ())]
    return [event for event in recorded if _identity(event) not in seen]


def _identity(event: Json) -> str:
    return repr([event.get(name) for name in ("event", "t", "generation", "worker")])
