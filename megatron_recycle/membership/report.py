"""The report of a worker that stands still: its position, what it holds, and what it has kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, field

from megatron_recycle.membership.verdict import Verdict
from megatron_recycle.plan.value import Value

ActionText = Annotated[str, Meta(pattern=r"^(?:F|B|W|FB)\d{1,9}\.\d{1,9}(?:/\d{1,9})?\Z")]
"""An action of a plan other than a step."""


class KeptReport(Value, frozen=True, omit_defaults=True):
    """An attempt that was given up, and may be resumed.

    Attributes:
        chain: the attempt in which its first action was done.
        actions: the finished ones, in order.
        provisional: whether they were done before the previous iteration was committed here.
        microbatches: of each pipeline; the script may have changed that.
        block: micro-batches of a block of the exact reduction.
        lent: digest of the plan of these actions, where that lends layers.
        joint: whether some W that is yet to come needs the worker's other parts.
    """

    iteration: int
    chain: int
    actions: tuple[ActionText, ...]
    provisional: bool
    microbatches: int
    block: int
    lent: str = ""
    joint: bool = False


class ClosedReport(Value, frozen=True):
    """An iteration that some stages have closed, with its loss and weight (`LossRelay.wait`)."""

    iteration: int
    loss: float
    weight: float
    stages: tuple[int, ...]


class GuardReport(Value, frozen=True, omit_defaults=True):
    """Copies of states.

    Attributes:
        own: the iterations whose end this worker has a copy of.
        of: the same by other stage that it keeps copies of.
        back: the earliest iteration after which it can go on; None: it never goes back.
        read: the last iteration whose samples cannot be read again.
        midway: whether it is on its way back to a checkpoint, which it may have half loaded.
    """

    own: tuple[int, ...] = ()
    of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    back: int | None = None
    read: int = -1
    midway: bool = False


class ShardsReport(Value, frozen=True):
    """The shards of an optimizer's state.

    Attributes:
        of: the number of shards.
        copies: the wanted number of holders of each.
        held: by shard that this worker has whole, the last iteration whose gradient it holds of it.
    """

    of: int
    copies: int
    held: Mapping[int, int]


class Report(Value, frozen=True, omit_defaults=True):
    """The position of a worker; see `Standing`.

    Attributes:
        committed: the last iteration that it has stepped for good; None: as `stepped`.
        actions: finished actions of the iteration; `earlier`: of the one before, if that is not committed.
        asked: the last iteration that its script has asked for; None: `iteration`.
        kept: attempts that may be resumed.
        torn: whether the last one was given up in the midst of an action that cannot be begun again.
        shards: None where the worker has all of its stage's state.
    """

    iteration: int
    attempt: int
    holds: int
    stepped: int
    verdict: Verdict | None
    actions: int
    committed: int | None = None
    earlier: int = 0
    asked: int | None = None
    guard: GuardReport = GuardReport()
    kept: tuple[KeptReport, ...] = ()
    torn: bool = False
    closed: ClosedReport | None = None
    shards: ShardsReport | None = None

    @property
    def final(self) -> int:
        """The last iteration stepped for good."""
        return self.stepped if self.committed is None else self.committed

    @property
    def last_asked(self) -> int:
        """The last iteration that the script has asked for."""
        return self.iteration if self.asked is None else self.asked

    def kept_of(self, iteration: int, chain: int | None = None) -> KeptReport | None:
        """The resumable attempt at ``iteration`` (with this ``chain``, if given)."""
        return next((kept for kept in self.kept if kept.iteration == iteration and chain in (None, kept.chain)), None)

    def closed_in(self, iteration: int) -> ClosedReport | None:
        """The facts about ``iteration``, if this worker's stage has closed it."""
        return self.closed if self.closed is not None and self.closed.iteration == iteration else None
