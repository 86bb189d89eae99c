"""The state of the membership machine: changed by its `inputs`, the basis of its `decisions`.

All of it is frozen; a state is replaced, never changed. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import msgspec

from megatron_recycle.membership.description import Description, Job, Model
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.names import in_order, workers_of
from megatron_recycle.membership.next_life import Shape
from megatron_recycle.membership.protocol import Go, Offer, Out
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.resume import Checkpoint, Resume
from megatron_recycle.plan.grid import Grid
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.plan.value import Value

Event = Mapping[str, Any]
_UNKNOWN = Job(grid=Grid(1, (1,)))


class Phase(Enum):
    """FORMING until all are ready; RECOVERING from a decision until its go; TRAINING; ENDED for good.

    RETURNING: a restarted coordinator that waits for its members to say where they stand.
    """

    FORMING = "forming"
    RETURNING = "returning"
    RECOVERING = "recovering"
    TRAINING = "training"
    ENDED = "ended"


class Member(Value, frozen=True):
    """A process that stands for a position of the grid; the incarnation is random per process."""

    worker: str
    """Its name (see `names`): the position, with the part where a worker is several processes."""
    rank: int
    incarnation: str
    pid: int
    host: str


class Restoring(Value, frozen=True):
    """The start of a process for a position of a lost stage, beside a process (dead or alive) whose device it gets."""

    number: int
    """As of a move. 0: a launcher starts it by itself."""
    beside: Member


class Said(Value, frozen=True):
    """An error that a process has failed with."""

    worker: str
    incarnation: str
    fault: Fault
    number: int = 0
    """The number of the error in which the process waits; 0: it does not wait."""


class Closing(Value, frozen=True, omit_defaults=True):
    """The job ends with this message once the members have saved the committed state."""

    message: str
    status: int = 1
    again: bool = False
    """Whether a restart of the script may do better."""
    until: float | None = None
    """When the time to save is over, if the job was asked to leave."""
    missing: tuple[int, ...] = ()
    """Stages that no member holds: the others save their state, and no checkpoint."""
    saved: Mapping[str, tuple[str, str]] = msgspec.field(default_factory=dict)
    """By member the place of its part of the checkpoint, and the reason if it is not written."""


class Redo(Value, frozen=True):
    """The rest of an interrupted iteration: `iteration`, and its `plan` once that is `known`; then None means that the
    iteration begins anew. `done`: finished actions by worker. `provisional`: some were done before the previous
    iteration was committed there. `ahead`: the same for the iteration after it."""

    iteration: int
    done: Mapping[str, int]
    provisional: bool
    known: bool = False
    plan: PlanFile | None = None
    ahead: Redo | None = None


@dataclass(frozen=True)
class Absent:
    """Processes that are out, or about to be."""

    out: Mapping[str, FailureKind] = field(default_factory=dict)
    """Positions without a worker, and why."""
    fenced: frozenset[str] = frozenset()
    """Incarnations that were declared out; they never become members again."""
    stranded: Mapping[str, Member] = field(default_factory=dict)
    """Live processes without work, by name: the other parts of a worker that has lost one. They come in again together
    with a joiner for the lost part."""
    given_up: frozenset[str] = frozenset()
    """Empty positions that no launcher will start again."""
    outs: Mapping[str, Out] = field(default_factory=dict)
    """By rank (as text) its launcher's command about the last process declared out."""
    leaving: frozenset[str] = frozenset()
    """Incarnations of members that have asked to leave at a boundary."""


@dataclass(frozen=True)
class Arrivals:
    """Joiners and newly joined members."""

    joiners: Mapping[str, Member] = field(default_factory=dict)
    """Processes that ask to come in, by name; they wait for a boundary."""
    prepared: frozenset[str] = frozenset()
    """Incarnations of joiners and stranded processes that stand still with model and engine built."""
    unproven: Mapping[str, FailureKind] = field(default_factory=dict)
    """Members that came in with this generation and have not acknowledged their peers' state yet; with each the reason
    why its position was empty."""


@dataclass(frozen=True)
class Moving:
    """Processes that take over a position of another stage."""

    moves: Mapping[str, str] = field(default_factory=dict)
    """Moves under way: by empty position of another stage, the incarnation of the member that is to take it."""
    move: int = 0
    """The number of these moves; moves begun together share it."""
    moves_due: bool = False
    """Whether the membership has changed, other than by a move, since moves were begun."""
    fruitless: int = 0
    """Consecutive moves whose process has failed."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Ranks (as text) whose process of a move was given up, and the number of that move."""


@dataclass(frozen=True)
class Forming:
    """Facts from the processes before generation 1."""

    models: Mapping[str, Model] = field(default_factory=dict)
    """The facts that processes with the same model must have alike, by `forming.model_key`."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """The rank of every name of the grid."""
    learnt: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By rank (as text) the set-up record of its process."""
    gone: frozenset[int] = frozenset()
    """Ranks whose process ended well before it said hello."""
    descriptions: Mapping[str, Description] = field(default_factory=dict)
    """Each ready worker's description of the job, by position, until generation 1."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """For each kind of model the first ready worker, until generation 1."""


@dataclass(frozen=True)
class Progress:
    """Iterations that are committed."""

    committed: int = -1
    """The last iteration that all members have committed."""
    back: int = 0
    """The last generation that went back to an earlier state; commits of generations before it are void."""
    committed_by: Mapping[str, int] = field(default_factory=dict)
    behind: int = 0
    """Members that have not committed the iteration after `committed` yet; 0: to be counted again."""
    losses: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tries:
    """Retries since an iteration was committed."""

    mended: int = 0
    """Consecutive generations with the same members, without a committed iteration in between."""
    retries: int = 0
    """Generations begun after a failed recovery, since an iteration was committed."""
    fallback: str | None = None
    """The policy for plans in place of the job's, since a recovery has failed."""
    restoring: Mapping[str, Restoring] = field(default_factory=dict)
    """Positions of a lost stage whose processes are being started."""
    restores: int = 0
    """Processes that were started for lost stages since an iteration was committed."""


@dataclass(frozen=True)
class Script:
    """Outcomes of the script itself."""

    faults: tuple[Said, ...] = ()
    """The latest errors of scripts, in order."""
    left_out: tuple[tuple[int, str], ...] = ()
    """Iterations and their micro-batches (``1.3``) that the job goes on without, of late."""
    asked: tuple[int, str] | None = None
    """Status and message of a signal that asks the job to end, and that scripts handle themselves."""


@dataclass(frozen=True)
class Round:
    """State of one generation alone."""

    acknowledged: frozenset[str] = frozenset()
    """Unproven members that have acknowledged, while another part of their worker has not."""
    switch: int = 0
    """Number of the offer by which the members make a boundary; 0: none is being made."""
    standing: Mapping[str, float] = field(default_factory=dict)
    """Members that stand at the boundary, and since when."""
    reports: Mapping[str, Report] = field(default_factory=dict)
    plan: PlanFile | None = None
    """This generation's plan, once made; replaced when all have adopted another."""
    redo: Redo | None = None
    """The rest of the iteration that the generation begins with; None: its plan was not asked for."""
    returned: frozenset[str] = frozenset()
    """RETURNING: members that have said they are in the current generation."""
    resumed: Mapping[str, float] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()
    """Positions whose script has ended well; they stand by until all have."""
    adopted: Mapping[str, str] = field(default_factory=dict)
    offered: Offer | None = None
    """The offered plan, until all members are known to have adopted it."""
    better: tuple[PlanFile, float] | None = None
    """The next plan to offer, and the milliseconds that the search for it took."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """The communication error that each member has met in this generation."""
    spared: frozenset[str] = frozenset()
    """Members of this generation that were suspected, but are the last of their stage."""


@dataclass(frozen=True)
class State:
    """Everything the coordinator's decisions depend on. `size` is the number of workers of the whole grid.

    A new field is named in `records` too: how the journal keeps it, or why it need not.
    """

    size: int
    host: str = ""
    """The coordinator's host, as its members would name it; empty: unknown."""
    shape: Shape | None = None
    """The facts that this life of the job must share with the one before; None: it is the first."""
    phase: Phase = Phase.FORMING
    generation: int = 0
    known: Mapping[str, Member] = field(default_factory=dict)
    """Every process that has said hello and was not refused, by incarnation."""
    members: Mapping[str, Member] = field(default_factory=dict)
    """The live workers of this generation, by position."""
    absent: Absent = Absent()
    arrivals: Arrivals = Arrivals()
    round: Round = Round()
    moving: Moving = Moving()
    stood_since: float | None = None
    """When the first member began to wait for this generation's joiners."""
    forming: Forming = Forming()
    description: Job | None = None
    go: Go | None = None
    """The last announced go, repeated to a worker that lost its connection."""
    resume: Resume | None = None
    """The last resume point that was announced."""
    ended: tuple[int, str, bool] | None = None
    """Status and message of the end, and whether a restart of the script may do better."""
    since: float | None = None
    """Time of the failure that is being recovered from; of several, the first."""
    progress: Progress = Progress()
    offers: int = 0
    tries: Tries = Tries()
    script: Script = Script()
    checkpoints: tuple[Checkpoint, ...] = ()
    """The newest whole checkpoints, the last one last."""
    closing: Closing | None = None
    """The end that this generation prepares, if it does not train."""

    @property
    def job(self) -> Job:
        """The job's description; before all are ready, one with usual settings."""
        return self.description or _UNKNOWN

    @property
    def stages(self) -> int:
        return 0 if self.description is None else self.description.grid.stages

    @property
    def in_force(self) -> bool:
        """Whether the members have this generation's go, as far as this coordinator knows."""
        return self.phase in (Phase.TRAINING, Phase.RETURNING)

    @property
    def latest(self) -> PlanFile | None:
        """The plan on offer, or else the one in force."""
        return self.round.plan if self.round.offered is None else self.round.offered.plan

    @property
    def failed(self) -> frozenset[str]:
        """Workers that are out, wholly or in part: the planner makes no difference."""
        return frozenset(map(str, workers_of(self.absent.out)))

    @property
    def proven(self) -> dict[str, Member]:
        """The members that hold their stage's state."""
        return {name: member for name, member in self.members.items() if name not in self.arrivals.unproven}

    def incarnations(self) -> dict[str, str]:
        """Member names and their incarnations, as the wire and the group prefix want them."""
        return {name: self.members[name].incarnation for name in in_order(self.members)}

    def reachable(self) -> tuple[str, ...]:
        """Incarnations to inform of a new generation: members and stranded processes."""
        stranded = self.absent.stranded
        return (*self.incarnations().values(), *(stranded[name].incarnation for name in in_order(stranded)))

    def member(self, incarnation: str) -> Member | None:
        """The member of this incarnation; None if it is unknown, out, or not yet in."""
        found = self.known.get(incarnation)
        current = None if found is None else self.members.get(found.worker)
        return current if current is not None and current.incarnation == incarnation else None

    def ms(self, now: float) -> float | None:
        """Milliseconds since the failure; None without one."""
        return None if self.since is None else round((now - self.since) * 1000, 3)

    def with_(self, **changes: Any) -> State:
        """A copy with new values of these fields, its own or those of its parts."""
        own, parts = dict[str, Any](), dict[str, dict[str, Any]]()
        for name, value in changes.items():
            if name in PART_OF:
                parts.setdefault(PART_OF[name], {})[name] = value
            else:
                own[name] = value
        return replace(self, **own, **{part: replace(getattr(self, part), **values) for part, values in parts.items()})

    def value(self, name: str) -> Any:
        """The value of a field, its own or one of its parts'."""
        return getattr(getattr(self, PART_OF[name]) if name in PART_OF else self, name)

    def next_generation(self, **changes: Any) -> State:
        """The state in generation g+1, with ``changes`` and without the `Round` of g."""
        return replace(self, generation=self.generation + 1, round=Round(), closing=None).with_(**changes)


PART_OF: Mapping[str, str] = {
    one.name: part for part, kind in (
        ("absent", Absent), ("arrivals", Arrivals), ("round", Round), ("moving", Moving), ("forming", Forming),
        ("progress", Progress), ("tries", Tries), ("script", Script)) for one in fields(kind)}
"""Field -> the part of a `State` that has it."""
