"""Inputs of the membership machine: everything that the coordinator hears of a job.

A process's own inputs (`Heard`) are its messages, both on the wire and for the machine. All are frozen. Times are Unix
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import field
from msgspec.structs import force_setattr

from megatron_recycle.membership.description import Description
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.names import Process
from megatron_recycle.membership.protocol import (
    Explains,
    Fetch,
    Fetched,
    Heartbeat,
    Interrupt,
    Join,
    Kinds,
    LauncherHello,
    LogsNow,
    Measured,
    Message,
    Said,
    Stacks,
)
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.state import Member
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.plan.value import Value

_LONGEST_TEXT, _LONGEST_PLACE = 500, 1000


class Heard(Message, frozen=True):
    """A process's statement about itself; the server ensures that no process speaks for another."""

    incarnation: str

    def _cut(self, most: int, *names: str) -> None:
        """Truncate text from outside."""
        for name in names:
            force_setattr(self, name, getattr(self, name)[:most])


class WorkerHello(Message, frozen=True, tag="hello", omit_defaults=True):
    """A worker presents itself; `generation` is the last one whose go it received, 0 for none."""

    worker: str
    rank: int
    incarnation: str
    pid: int
    host: str
    generation: int
    role: str = ""

    def __post_init__(self) -> None:
        if (plain := str(Process.parse(self.worker))) != self.worker:
            raise ValueError(f"worker {self.worker!r:.60} is to be written {plain!r}")

    @property
    def member(self) -> Member:
        """The process."""
        return Member(self.worker, self.rank, self.incarnation, self.pid, self.host)


@dataclass(frozen=True)
class Hello:
    """A process presents itself, or comes back after it lost its connection.

    `generation` is the last one whose go it received, 0 for none.
    """

    member: Member
    generation: int = 0


class Ready(Heard, frozen=True, tag="ready", omit_defaults=True):
    """The process is ready. `learnt` is its set-up record, if it was there at the start (see `records.learnt`)."""

    description: Description
    report: Report
    learnt: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Loss:
    """A process to be declared out."""

    incarnation: str
    kind: FailureKind


@dataclass(frozen=True)
class Lost:
    """A detector's verdict: processes that failed together, since this time. One decision, not several."""

    losses: tuple[Loss, ...]
    since: float


class Exited(Message, frozen=True, tag="exit"):
    """A process has ended. `status` is as in `subprocess`: negative for a signal; None if unknown."""

    rank: int
    pid: int
    status: int | None
    since: float = field(name="t")
    log: str = ""
    move: int = 0
    """The number of the move that the process was started for."""
    said: str = ""
    """The reason, as the process or its launcher reported it."""


class Reported(Heard, frozen=True, tag="report"):
    generation: int
    report: Report


@dataclass(frozen=True)
class ReportsLate:
    generation: int


class Received(Value, frozen=True):
    """A received copy: its bytes, and milliseconds from the first to the last."""

    bytes: int = 0
    ms: float = 0.0


class Holds(Heard, frozen=True, tag="holds"):
    """A process that came in with `generation` has all of its stage's state, checked.

    `received` counts the copy from its peers.
    """

    generation: int
    received: Received


@dataclass(frozen=True)
class Planned:
    generation: int
    plan: PlanFile
    plan_ms: float


@dataclass(frozen=True)
class PlanFailed:
    generation: int
    error: str


@dataclass(frozen=True)
class Redone:
    """The answer to `MakeRedo`: a plan that begins with all finished actions; None: the iteration begins anew. `ahead`:
    the same for the iteration after it."""

    generation: int
    plan: PlanFile | None
    ahead: PlanFile | None = None


class Improvement:
    """A search result that improves the job but is not needed."""


@dataclass(frozen=True)
class Improved(Improvement):
    generation: int
    plan: PlanFile
    plan_ms: float


@dataclass(frozen=True)
class MovesFound(Improvement):
    """The planner's answer to `FindMoves`: by member, the empty position that it should take."""

    generation: int
    moves: Mapping[str, str]


class StaysOut(Message, frozen=True, tag="stays_out"):
    """A launcher will not start this rank again."""

    rank: int


class Resumed(Heard, frozen=True, tag="resumed"):
    generation: int
    t: float


class Committed(Heard, frozen=True, tag="committed"):
    """A member has stepped `iteration` for good, in this generation: before its go, all may go back to an earlier
    state."""

    generation: int
    iteration: int
    loss: float | None = None


class Adopted(Heard, frozen=True, tag="adopted"):
    generation: int
    iteration: int
    digest: str


class Unlent(Heard, frozen=True, tag="unlent"):
    """A member cannot take the plan on offer, since layers of ``stage`` cannot be lent."""

    generation: int
    stage: int
    why: str

    def __post_init__(self) -> None:
        self._cut(_LONGEST_TEXT, "why")


class Finished(Heard, frozen=True, tag="finished"):
    generation: int


class Leave(Heard, frozen=True, tag="leave"):
    """A member asks to leave at the next boundary."""


class Boundary(Heard, frozen=True, tag="boundary"):
    """A member has committed all before `iteration` and waits there, since `t`."""

    generation: int
    iteration: int
    t: float


class Hinted(Heard, frozen=True, tag="hint"):
    """A worker met a communication error. It never names the culprit: errors cascade."""

    generation: int
    error: str

    def __post_init__(self) -> None:
        self._cut(_LONGEST_TEXT, "error")


class Raised(Heard, frozen=True, tag="raised", omit_defaults=True):
    """A process has met an error, at this time, that its script has not handled."""

    fault: Fault
    since: float = field(name="t")
    number: int = 0
    """The process waits for an answer to this number; 0: it ends."""

    def __post_init__(self) -> None:
        self.fault.check()


class Ending(Heard, frozen=True, tag="ending"):
    """A process ends, at this time, because of an error if one is known. The machine gets an `Exited`, or with an error
    a `Raised`."""

    fault: Fault | None
    since: float = field(name="t")

    def __post_init__(self) -> None:
        if self.fault is not None:
            self.fault.check()


class Saved(Heard, frozen=True, tag="saved"):
    """A member's part of the last checkpoint is at ``place``; with an `error` it was not written."""

    generation: int
    place: str
    error: str

    def __post_init__(self) -> None:
        self._cut(_LONGEST_TEXT, "error")
        self._cut(_LONGEST_PLACE, "place")


class Written(Heard, frozen=True, tag="written"):
    """All members have written their parts of the checkpoint at ``place``, of the state after ``iteration``.

    ``facts`` are needed besides to go back to it; None: going back is impossible."""

    generation: int
    iteration: int
    place: str
    facts: Mapping[str, Any] | None = None


class Unreadable(Heard, frozen=True, tag="unreadable"):
    """A member cannot read the checkpoint at ``place``, which all have begun to load."""

    generation: int
    place: str
    why: str

    def __post_init__(self) -> None:
        self._cut(_LONGEST_TEXT, "why")


class Unwritten(Heard, frozen=True, tag="unwritten"):
    """A member cannot write its part of a checkpoint, while others wait for it in theirs."""

    generation: int
    why: str

    def __post_init__(self) -> None:
        self._cut(_LONGEST_TEXT, "why")


@dataclass(frozen=True)
class SavedLate:
    generation: int


@dataclass(frozen=True)
class NoLoss:
    """The detection time of any failure has passed since the first hint of this generation."""

    generation: int
    since: float


THE_END = "the end"


@dataclass(frozen=True)
class Stuck:
    """All members have waited beyond every time limit: by member what it waits for (THE_END: its script has ended
    well), and since when."""

    generation: int
    waiting: Mapping[str, str]
    since: float


@dataclass(frozen=True)
class Restarted:
    """The coordinator has come back; its state is from `records.restore`."""


@dataclass(frozen=True)
class PlaceLate:
    """The time is over for processes of a lost stage, the last of them started as number `move`."""

    generation: int
    move: int


@dataclass(frozen=True)
class Interrupted:
    """The job is ended from outside (signal, time limit, launcher). `again`: a restart of the script may do better.
    `handled`: some script has its own handler for the signal. `saves`: a last checkpoint comes first, if one can be
    written."""

    status: int
    message: str
    again: bool = False
    handled: bool = False
    saves: bool = False


@dataclass(frozen=True)
class EndLate:
    """The time is over that scripts have to end after a signal that they handle themselves."""


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

FromWorker = (
    WorkerHello | Heartbeat | Ready | Reported | Holds | Resumed | Committed | Adopted | Unlent | Finished | Leave
    | Boundary | Hinted | Raised | Ending | Saved | Written | Unreadable | Unwritten | Said | Measured | LogsNow
    | Fetch | Fetched | Stacks
)
FROM_WORKER: Kinds[FromWorker] = Kinds(FromWorker)
FromLauncher = LauncherHello | Heartbeat | Exited | StaysOut | Explains | Interrupt | Join
FROM_LAUNCHER: Kinds[FromLauncher] = Kinds(FromLauncher)
