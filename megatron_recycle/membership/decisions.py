"""Decisions of the membership machine, carried out in the given order.

All of them are frozen. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.lines import AnyLine
from megatron_recycle.membership.protocol import Message, Ordered, ToWorker
from megatron_recycle.membership.state import Event, State
from megatron_recycle.plan.plan_file import PlanFile


@dataclass(frozen=True)
class Record:
    """Put this record on disk before all that follows.

    If that fails, the decision must not be carried out. A record that is not `needed` may be omitted: a restarted
    coordinator then knows less, and is still right.
    """

    record: AnyLine
    needed: bool = True


@dataclass(frozen=True)
class Note:
    """Keep this for a restarted coordinator; it replaces the note before."""

    record: AnyLine


class StopAll(Message, frozen=True, tag="stop"):
    """The end of all generations before this one, with its members and the workers that are out. Each process gets its
    own `Stop` (`messages.wire_forms`)."""

    generation: int
    members: Mapping[str, str]
    out: Mapping[str, FailureKind]


@dataclass(frozen=True)
class Tell:
    """Send `message` to these incarnations."""

    to: tuple[str, ...]
    message: ToWorker | StopAll


@dataclass(frozen=True)
class Command:
    """Send to all launchers; see `commands`."""

    message: Ordered


@dataclass(frozen=True)
class Await:
    """Feed `ReportsLate(generation)` when the time for reports is over."""

    generation: int


@dataclass(frozen=True)
class AwaitLoss:
    """Feed `NoLoss` when a failure behind a hint at `since` would have been found."""

    generation: int
    since: float


@dataclass(frozen=True)
class AwaitSaved:
    """Feed `SavedLate(generation)` when the time for a last checkpoint is over; `limit`: seconds, in place of the
    usual."""

    generation: int
    limit: float | None = None


@dataclass(frozen=True)
class AwaitEnd:
    """Feed `EndLate` in so many seconds."""

    seconds: float


@dataclass(frozen=True)
class AwaitPlace:
    """Feed `PlaceLate` when the time is over for processes of a lost stage, the last of them started as number
    `move`."""

    generation: int
    move: int


@dataclass(frozen=True)
class MakePlan:
    """Make a plan at once for the grid without `failed`, by `policy` if given, else by the job's, and feed `Planned` or
    `PlanFailed`."""

    generation: int
    failed: frozenset[str]
    policy: str | None = None


@dataclass(frozen=True)
class MakeRedo:
    """Plan the rest of an interrupted iteration, and feed `Redone`.

    `plan` is the generation's; `done` has each live worker's finished actions of the iteration, in its order. `closed`
    stages run nothing again. `size`: the micro-batches of each of the iteration's pipelines, which the script may have
    changed, and those of a block of its exact reduction. `lent`: digest of the plan of the finished actions, where that
    lends layers. `ahead`: the same for the iteration after it, which workers of closed stages may have begun; None:
    none has.
    """

    generation: int
    plan: PlanFile
    done: Mapping[str, Sequence[str]]
    size: tuple[int, int]
    closed: tuple[int, ...] = ()
    lent: str = ""
    ahead: MakeRedo | None = None


@dataclass(frozen=True)
class Improve:
    """Search for a better plan in the background, and feed `Improved` if there is one."""

    generation: int
    failed: frozenset[str]
    plan: PlanFile


@dataclass(frozen=True)
class FindMoves:
    """Ask the planner which healthy workers should change their stage, and feed `MovesFound` if some should. If it
    finds no paying moves: those `wanted` for another reason, as (mover, empty position)."""

    generation: int
    failed: frozenset[str]
    wanted: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Emit:
    """One line of events.jsonl."""

    event: Event


@dataclass(frozen=True)
class End:
    """The job is over; `status` is the launcher's exit status. `again`: a restart of the script may do better."""

    status: int
    message: str
    again: bool = False


Decision = (Record | Note | Tell | Command | Await | AwaitEnd | AwaitPlace | AwaitSaved | AwaitLoss | MakePlan
            | MakeRedo | Improve | FindMoves | Emit | End)
Step = tuple[State, tuple[Decision, ...]]
