"""Decisions of the membership machine, to be carried out in the order in which they are given.

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
    """Put this record on disk before anything that follows is done.

    If the record cannot be written, the decision must not be carried out. A record that is not `needed` may be left
    out: then a coordinator that comes back knows less, and is right all the same.
    """

    record: AnyLine
    needed: bool = True


@dataclass(frozen=True)
class Note:
    """Keep this where a coordinator that comes back finds it; it replaces the note before."""

    record: AnyLine


class StopAll(Message, frozen=True, tag="stop"):
    """The end of all generations before this one, with its members and who is out: it travels as a `Stop` of each
    one's own (`messages.wire_forms`)."""

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
    """Tell all launchers; see `commands`."""

    message: Ordered


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
class AwaitEnd:
    """Feed `EndLate` in so many seconds."""

    seconds: float


@dataclass(frozen=True)
class AwaitPlace:
    """Feed `PlaceLate(generation)` when the time for the processes of a lost stage is over."""

    generation: int


@dataclass(frozen=True)
class MakePlan:
    """Make a plan at once for the grid without `failed`, by another `policy` than the job's if one is named, and feed
    `Planned` or `PlanFailed`."""

    generation: int
    failed: frozenset[str]
    policy: str | None = None


@dataclass(frozen=True)
class MakeRedo:
    """Plan the rest of an iteration that a failure has interrupted, and feed `Redone`.

    `plan` is the generation's; `done` has the actions that each live worker has done of the iteration, in its order.
    Nothing of the stages that are `closed` is to be run again. `size`: the micro-batches of each of the iteration's
    pipelines, which the script may have changed, and those of a block of its exact reduction. `lent`: digest of the
    plan by which they were done, where that lends layers. `ahead`: the same of the iteration after it, which workers of
    closed stages may have begun; None: nobody has.
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
    """Look for a better plan in the background, and feed `Improved` if there is one."""

    generation: int
    failed: frozenset[str]
    plan: PlanFile


@dataclass(frozen=True)
class FindMoves:
    """Ask the planner which healthy workers had better change their stage, and feed `MovesFound` if some. Where it
    finds none that pay, those `wanted` for another reason: the empty position by mover."""

    generation: int
    failed: frozenset[str]
    wanted: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Emit:
    """One line of events.jsonl."""

    event: Event


@dataclass(frozen=True)
class End:
    """The job is over; `status` is the launcher's exit status. `again`: the script may do better if it is started
    again."""

    status: int
    message: str
    again: bool = False


Decision = (Record | Note | Tell | Command | Await | AwaitEnd | AwaitPlace | AwaitSaved | AwaitLoss | MakePlan
            | MakeRedo | Improve | FindMoves | Emit | End)
Step = tuple[State, tuple[Decision, ...]]
