"""Inputs of the membership machine: all that happens to a job, as its coordinator hears of it.

All of them are frozen. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.state import Member, Message


@dataclass(frozen=True)
class Hello:
    """A process presents itself, or comes back after it lost its connection.

    `generation` is the last one that it was told to go in, 0 for none.
    """

    member: Member
    generation: int = 0


@dataclass(frozen=True)
class Ready:
    """`learnt` is what the process was told by others before, of one of the start (see `records.learnt`)."""

    incarnation: str
    description: Message
    report: Message
    learnt: Sequence[Message] = ()


@dataclass(frozen=True)
class Loss:
    """One process that is to be declared out."""

    incarnation: str
    kind: FailureKind


@dataclass(frozen=True)
class Lost:
    """A detector's verdict: these fail together, since this time. One decision, not several."""

    losses: tuple[Loss, ...]
    since: float


@dataclass(frozen=True)
class Exited:
    """A process has ended. `status` is as in `subprocess`: negative for a signal; None if nobody saw it."""

    rank: int
    pid: int
    status: int | None
    since: float
    log: str = ""
    move: int = 0
    """The number of the move that the process was started for."""
    said: str = ""
    """Why, as it has told itself, or as its launcher knows."""


@dataclass(frozen=True)
class Reported:
    incarnation: str
    generation: int
    report: Message


@dataclass(frozen=True)
class ReportsLate:
    generation: int


@dataclass(frozen=True)
class Holds:
    """A process that came in with `generation` has all of its stage's state, checked.

    `received` is what it got from its peers (bytes, ms).
    """

    incarnation: str
    generation: int
    received: Message


@dataclass(frozen=True)
class Planned:
    generation: int
    plan: Message
    plan_ms: float


@dataclass(frozen=True)
class PlanFailed:
    generation: int
    error: str


@dataclass(frozen=True)
class Redone:
    """The answer to `MakeRedo`: a plan that begins with all that is done; None: the iteration is begun anew."""

    generation: int
    plan: Message | None


@dataclass(frozen=True)
class Improved:
    generation: int
    plan: Message
    plan_ms: float


@dataclass(frozen=True)
class MovesFound:
    """The planner's answer to `FindMoves`: members and the empty positions they had better take."""

    generation: int
    moves: Mapping[str, str]


@dataclass(frozen=True)
class StaysOut:
    """A launcher will not start this rank again."""

    rank: int


@dataclass(frozen=True)
class Resumed:
    incarnation: str
    generation: int
    t: float


@dataclass(frozen=True)
class Committed:
    incarnation: str
    iteration: int
    loss: float | None = None


@dataclass(frozen=True)
class Adopted:
    incarnation: str
    generation: int
    iteration: int
    digest: str


@dataclass(frozen=True)
class Unlent:
    """A member cannot take the plan on offer, since layers of ``stage`` cannot be lent."""

    incarnation: str
    generation: int
    stage: int
    why: str


@dataclass(frozen=True)
class Finished:
    incarnation: str
    generation: int


@dataclass(frozen=True)
class Leave:
    """A member wants to go at the next boundary."""

    incarnation: str


@dataclass(frozen=True)
class Boundary:
    """A member has committed all before `iteration` and waits there, since `t`."""

    incarnation: str
    generation: int
    iteration: int
    t: float


@dataclass(frozen=True)
class Hinted:
    """A worker met a communication error. It never names the culprit: errors cascade."""

    incarnation: str
    generation: int
    error: str


@dataclass(frozen=True)
class Raised:
    """A process has met an error, at this time, that its script has not handled."""

    incarnation: str
    fault: Fault
    since: float
    number: int = 0
    """The process waits for an answer to this number; 0: it ends."""


@dataclass(frozen=True)
class Saved:
    """A member's part of the last checkpoint is at ``place``, or, with an `error`, nowhere."""

    incarnation: str
    generation: int
    place: str
    error: str


@dataclass(frozen=True)
class Written:
    """All members have written their parts of the checkpoint at ``place``, of the state after ``iteration``.

    ``facts`` are what a job that goes back to it has to know beside; None: it cannot."""

    incarnation: str
    generation: int
    iteration: int
    place: str
    facts: Message | None = None


@dataclass(frozen=True)
class Unreadable:
    """A member has begun to load the checkpoint at ``place``, with all others, and cannot."""

    incarnation: str
    generation: int
    place: str
    why: str


@dataclass(frozen=True)
class Unwritten:
    """A member cannot write its part of a checkpoint, while others wait for it in the midst of theirs."""

    incarnation: str
    generation: int
    why: str


@dataclass(frozen=True)
class SavedLate:
    generation: int


@dataclass(frozen=True)
class NoLoss:
    """The time in which any failure is found has passed since the first hint of this generation."""

    generation: int
    since: float


THE_END = "the end"


@dataclass(frozen=True)
class Stuck:
    """All members have waited for longer than anything takes: what each waits for (THE_END: for nothing more, since its
    script has ended well), and since when."""

    generation: int
    waiting: Mapping[str, str]
    since: float


@dataclass(frozen=True)
class Restarted:
    """The coordinator has come back; its state is from `records.restore`."""


@dataclass(frozen=True)
class PlaceLate:
    """The time for the processes of a lost stage is over."""

    generation: int


@dataclass(frozen=True)
class Interrupted:
    """Somebody outside (a signal, a limit of time, the launcher) ends the job. `again`: the script may do better if it
    is started again. `handled`: some script has a handler of its own for the signal. `saves`: a last checkpoint comes
    first, if one can be written."""

    status: int
    message: str
    again: bool = False
    handled: bool = False
    saves: bool = False


@dataclass(frozen=True)
class EndLate:
    """The time that scripts have to end after a signal that they handle themselves is over."""


Input = (
    Hello
    | Ready
    | Lost
    | Exited
    | Reported
    | Holds
    | ReportsLate
    | Planned
    | PlanFailed
    | Redone
    | Improved
    | MovesFound
    | StaysOut
    | Resumed
    | Committed
    | Adopted
    | Unlent
    | Finished
    | Leave
    | Boundary
    | Hinted
    | Raised
    | Saved
    | SavedLate
    | PlaceLate
    | Written
    | Unreadable
    | Unwritten
    | NoLoss
    | Stuck
    | Restarted
    | Interrupted
    | EndLate
)
