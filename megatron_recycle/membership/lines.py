"""The lines of the journal, as types. Each has its own events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.membership.description import Job, Model
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.protocol import Kinds, Out
from megatron_recycle.membership.resume import Checkpoint, Resume
from megatron_recycle.membership.state import Closing, Member, Said
from megatron_recycle.plan.value import Value

Events = tuple[Mapping[str, Any], ...]


class Line(Value, frozen=True, tag_field="kind"):
    """One line."""


class OfMoves(Line, frozen=True, kw_only=True):
    """The fields of the state about moves; the latest line that has them counts."""

    moves: Mapping[str, str]
    move: int
    moves_due: bool
    fruitless: int
    given_up: tuple[str, ...]
    dropped: Mapping[str, int]
    events: Events = ()


class Decided(OfMoves, frozen=True, tag="decided", kw_only=True):
    """A new generation: fields of the state, the latest of which count, and the time of the failure."""

    generation: int
    members: Mapping[str, Member]
    out: Mapping[str, FailureKind]
    fenced: tuple[str, ...]
    outs: Mapping[str, Out]
    stranded: Mapping[str, Member]
    unproven: Mapping[str, FailureKind]
    models: Mapping[str, Model]
    ranks: Mapping[str, int]
    committed: int
    description: Job
    left_out: tuple[tuple[int, str], ...]
    closing: Closing | None
    faults: tuple[Said, ...]
    since: float | None = None


class Moved(OfMoves, frozen=True, tag="moves", kw_only=True):
    """Moves begun or ended."""

    generation: int


class OfGeneration(Line, frozen=True):
    """A line about a generation."""

    generation: int


class Went(OfGeneration, frozen=True, tag="go"):
    """The go, the digest of the plan in force, and the end that the generation prepares by now."""

    resume: Resume
    digest: str | None
    events: Events = ()
    closing: Closing | None = None


class Offered(OfGeneration, frozen=True, tag="offer"):
    """A plan or a boundary was offered."""

    number: int
    events: Events = ()


class Proven(OfGeneration, frozen=True, tag="proven"):
    """A joiner holds its stage's state."""

    worker: str
    events: Events = ()


class Resumed(OfGeneration, frozen=True, tag="resumed"):
    """All train again."""

    events: Events = ()


class Adopted(OfGeneration, frozen=True, tag="adopted"):
    """All use the plan of this digest."""

    digest: str
    events: Events = ()


class CheckpointNoted(OfGeneration, frozen=True, tag="checkpoint"):
    """A checkpoint is whole, or turned out to be unreadable."""

    checkpoint: Checkpoint
    events: Events = ()


class Learnt(Line, frozen=True, tag="learnt"):
    """By rank, the set-up records of the processes of the start."""

    learnt: Mapping[str, tuple[dict[str, Any], ...]]
    events: Events = ()


class Committed(Line, frozen=True, tag="committed"):
    """The last iteration that all have committed since the way `back` (`Progress.back`): a note, overwritten each time.
    It may stand behind later lines."""

    iteration: int
    back: int = 0


class Ended(Line, frozen=True, tag="end"):
    """The end of the job, or of this life of it."""

    status: int
    message: str
    again: bool
    events: Events = ()


AnyLine = (Decided | Moved | Went | Offered | Proven | Resumed | Adopted | CheckpointNoted | Learnt | Committed | Ended)
LINES: Kinds[AnyLine] = Kinds(AnyLine)
