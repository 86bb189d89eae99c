"""The values that the membership machine works on: its state, what may happen to it, and what it decides.

All of them are frozen; a state is replaced, never changed. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.names import in_order, workers_of
from megatron_recycle.membership.resume import Resume

Message = Mapping[str, Any]


class Phase(Enum):
    """FORMING until all are ready; RECOVERING from a decision until its go; TRAINING; ENDED for good.

    RETURNING: a restarted coordinator that waits until its members say where they stand.
    """

    FORMING = "forming"
    RETURNING = "returning"
    RECOVERING = "recovering"
    TRAINING = "training"
    ENDED = "ended"


@dataclass(frozen=True)
class Member:
    """A process that stands for a position of the grid; the incarnation is random per process."""

    worker: str
    """Its name (see `names`): the position, with the part of it where a worker is several processes."""
    rank: int
    incarnation: str
    pid: int
    host: str


@dataclass(frozen=True)
class Said:
    """What a process has failed with."""

    worker: str
    incarnation: str
    fault: Fault
    number: int = 0
    """Of the errors of this process that it waits in; 0: it does not."""


@dataclass(frozen=True)
class Closing:
    """The job ends with this message once the members have saved what is committed."""

    message: str
    status: int = 1
    saved: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By member where its part of the checkpoint is, and why it is not written, if it is not."""


@dataclass(frozen=True)
class State:
    """Everything the coordinator's decisions depend on. `size` is the number of workers of the whole grid."""

    size: int
    host: str = ""
    """The host that the coordinator is on, as its members would name it; empty: nobody knows."""
    phase: Phase = Phase.FORMING
    generation: int = 0
    known: Mapping[str, Member] = field(default_factory=dict)
    """Every process that has said hello and was not refused, by incarnation."""
    members: Mapping[str, Member] = field(default_factory=dict)
    """The live workers of this generation, by position."""
    out: Mapping[str, str] = field(default_factory=dict)
    """Positions without a live worker, and the kind of failure."""
    fenced: frozenset[str] = frozenset()
    """Incarnations that were declared out; they are never members again."""
    spares: Mapping[str, Member] = field(default_factory=dict)
    """Live processes that have no work, by name: the other parts of a worker that has lost one. They come in again
    together with a joiner in that one's place."""
    joiners: Mapping[str, Member] = field(default_factory=dict)
    """Processes that want to come in, by name; they wait for a boundary."""
    prepared: frozenset[str] = frozenset()
    """Incarnations of joiners (and spares) whose model and engine are built, and who stand still."""
    unproven: Mapping[str, str] = field(default_factory=dict)
    """Members that came in with this generation and have not acknowledged their peers' state yet; with each the
    reason why its position was empty."""
    acknowledged: frozenset[str] = frozenset()
    """Of the unproven those that have, while another part of their worker has not."""
    leaving: frozenset[str] = frozenset()
    """Incarnations of members that have asked to leave at a boundary."""
    moves: Mapping[str, str] = field(default_factory=dict)
    """Moves under way: the empty position of another stage, and the incarnation of the member that is to take it."""
    move: int = 0
    """The number of these moves; all that are begun at once have the same."""
    moves_due: bool = False
    """Whether the membership has changed, other than by a move, since moves were begun."""
    fruitless: int = 0
    """Moves in a row whose process has failed."""
    given_up: frozenset[str] = frozenset()
    """Positions that are out and that no launcher will start again."""
    switch: int = 0
    """Number of the offer by which the members make a boundary; 0: none is being made."""
    standing: Mapping[str, float] = field(default_factory=dict)
    """Members that stand at the boundary, and since when."""
    stood_since: float | None = None
    """When the first member began to wait for those that came in with this generation."""
    models: Mapping[str, Message] = field(default_factory=dict)
    """What the processes of a stage must have alike (`forming.OWN`), by the stage's number."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """The rank of every name of the grid."""
    learnt: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    """What the process of each rank (as text) was told by others before training began."""
    gone: frozenset[int] = frozenset()
    """Ranks whose process ended well before it said hello."""
    descriptions: Mapping[str, Message] = field(default_factory=dict)
    """What each ready worker says of the job, by position, until generation 1."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """For each kind of model the first worker that was ready, until generation 1."""
    description: Message | None = None
    reports: Mapping[str, Message] = field(default_factory=dict)
    plan: Message | None = None
    """The plan of this generation, from when it is made."""
    go: Message | None = None
    """The last announced go, to be told again to a worker that lost its connection."""
    resume: Resume | None = None
    """The last resume point that was announced."""
    returned: frozenset[str] = frozenset()
    """RETURNING: members that have said they are in the current generation."""
    ended: tuple[int, str] | None = None
    """Status and message of the end."""
    since: float | None = None
    """When the failure happened that is being recovered from; of several, the first."""
    resumed: Mapping[str, float] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()
    """Positions whose script has ended well; they stand by until all have."""
    committed: int = -1
    """The last iteration that all members have committed."""
    committed_by: Mapping[str, int] = field(default_factory=dict)
    behind: int = 0
    """Members that have not committed the iteration after `committed` yet; 0: to be counted again."""
    losses: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    adopted: Mapping[str, str] = field(default_factory=dict)
    offered: Message | None = None
    """The offer of a plan that not all members are known to have adopted."""
    better: Improved | None = None
    """The plan that is offered when they have."""
    offers: int = 0
    hints: Mapping[str, str] = field(default_factory=dict)
    """Who met a communication error in this generation, and which."""
    spared: frozenset[str] = frozenset()
    """Members of this generation that were suspected, but are the last of their stage."""
    mended: int = 0
    """Generations with the same members in a row, without a committed iteration in between."""
    faults: tuple[Said, ...] = ()
    """Errors of scripts, the latest ones, in their order."""
    left_out: tuple[tuple[int, str], ...] = ()
    """Iterations and their micro-batches (``1.3``) that the job goes on without, of late."""
    closing: Closing | None = None
    """What this generation is for, if not for training."""

    @property
    def stages(self) -> int:
        return 0 if self.description is None else int(self.description["grid"]["stages"])

    @property
    def failed(self) -> frozenset[str]:
        """Workers that are out, wholly or in part: to the planner that is the same."""
        return frozenset(map(str, workers_of(self.out)))

    @property
    def proven(self) -> dict[str, Member]:
        """The members that hold their stage's state."""
        return {name: member for name, member in self.members.items() if name not in self.unproven}

    def incarnations(self) -> dict[str, str]:
        """Member names and their incarnations, as the wire and the group prefix want them."""
        return {name: self.members[name].incarnation for name in in_order(self.members)}

    def reachable(self) -> tuple[str, ...]:
        """Incarnations of all that are told of a new generation: members and spares."""
        return (*self.incarnations().values(), *(self.spares[name].incarnation for name in in_order(self.spares)))

    def member(self, incarnation: str) -> Member | None:
        """The member of this incarnation; None if it is unknown, out, or not yet in."""
        found = self.known.get(incarnation)
        current = None if found is None else self.members.get(found.worker)
        return current if current is not None and current.incarnation == incarnation else None

    def ms(self, now: float) -> float | None:
        """Milliseconds since the failure, None when there was none."""
        return None if self.since is None else round((now - self.since) * 1000, 3)

    def with_(self, **changes: Any) -> State:
        return replace(self, **changes)


# What happens


@dataclass(frozen=True)
class Hello:
    """A process presents itself, or comes back after it lost its connection.

    `generation` is the last one that it was told to go in, 0 for none.
    """

    member: Member
    generation: int = 0


@dataclass(frozen=True)
class Ready:
    """`learnt` is what the process was told by others before, of one of the start (see `learnt`)."""

    incarnation: str
    description: Message
    report: Message
    learnt: Sequence[Message] = ()


@dataclass(frozen=True)
class Loss:
    incarnation: str
    kind: str


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
    """The error that it has failed with, of one that has told."""


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
    """The coordinator has come back; its state is from `restart.restore`."""


@dataclass(frozen=True)
class Interrupted:
    """Somebody outside (a signal, a limit of time, the launcher) ends the job."""

    status: int
    message: str


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
    | Improved
    | MovesFound
    | StaysOut
    | Resumed
    | Committed
    | Adopted
    | Finished
    | Leave
    | Boundary
    | Hinted
    | Raised
    | Saved
    | SavedLate
    | NoLoss
    | Stuck
    | Restarted
    | Interrupted
)


# What is decided, to be carried out in this order


@dataclass(frozen=True)
class Store:
    """Put this record on disk before anything that follows.

    What cannot be written must not be done, unless it is not `needed`: then a coordinator that comes back knows less,
    and is right all the same.
    """

    record: Message
    needed: bool = True


@dataclass(frozen=True)
class Note:
    """Keep this where a coordinator that comes back finds it; it replaces the note before."""

    record: Message


@dataclass(frozen=True)
class Tell:
    """Send `message` to these incarnations."""

    to: tuple[str, ...]
    message: Message


@dataclass(frozen=True)
class Await:
    """Feed `ReportsLate(generation)` when the time for reports is over."""

    generation: int


@dataclass(frozen=True)
class AwaitLoss:
    """Feed `NoLoss` when any failure that explains a hint given at `since` would have been found."""

    generation: int
    since: float


@dataclass(frozen=True)
class AwaitSaved:
    """Feed `SavedLate(generation)` when the time for a last checkpoint is over; `limit`: seconds, if it is a special
    one."""

    generation: int
    limit: float | None = None


@dataclass(frozen=True)
class MakePlan:
    """Make a plan at once for the grid without `failed`, and feed `Planned` or `PlanFailed`."""

    generation: int
    failed: frozenset[str]


@dataclass(frozen=True)
class Improve:
    """Look for a better plan in the background, and feed `Improved` if there is one."""

    generation: int
    failed: frozenset[str]
    plan: Message


@dataclass(frozen=True)
class FindMoves:
    """Ask the planner which healthy workers had better change their stage, and feed `MovesFound` if some."""

    generation: int
    failed: frozenset[str]


@dataclass(frozen=True)
class Emit:
    """One line of events.jsonl."""

    event: Message


@dataclass(frozen=True)
class End:
    """The job is over; `status` is the launcher's exit status."""

    status: int
    message: str


Decision = Store | Note | Tell | Await | AwaitSaved | AwaitLoss | MakePlan | Improve | FindMoves | Emit | End
Step = tuple[State, tuple[Decision, ...]]
