"""Events that workers may send; none shares its name with an event of the coordinator's decisions."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_recycle.plan.value import Value


class Corrupt(Value, frozen=True, tag_field="event", tag="corrupt", forbid_unknown_fields=True, omit_defaults=True):
    """Digests of peers differ."""

    iteration: int
    digests: Mapping[str, int | str]
    shard: int | None = None


class Guarded(Value, frozen=True, tag_field="event", tag="guarded", forbid_unknown_fields=True):
    """A worker has copied its state, and that of other stages."""

    iteration: int
    stages: tuple[int, ...]
    bytes: int
    ms: float


class Healed(Value, frozen=True, tag_field="event", tag="healed", forbid_unknown_fields=True, omit_defaults=True):
    """A worker has its peers' state in place of a corrupt one."""

    iteration: int
    bytes: int
    ms: float
    shards: tuple[int, ...] = ()


class Rebuilt(Value, frozen=True, tag_field="event", tag="rebuilt", forbid_unknown_fields=True):
    """A worker has its connections."""

    generation: int
    ms: float


class Hint(Value, frozen=True, tag_field="event", tag="hint"):
    """A worker has met a communication error. The coordinator passes it on; workers do not send it as an event."""

    generation: int
    error: str


class JoinRefused(Value, frozen=True, tag_field="event", tag="refuses_itself", forbid_unknown_fields=True):
    """A joiner finds that it cannot join."""

    reason: str


class RolledBack(Value, frozen=True, tag_field="event", tag="rolled_back", forbid_unknown_fields=True):
    """A worker has undone a step made on a guess."""

    iteration: int
    actions: int


class SaveFailed(Value, frozen=True, tag_field="event", tag="save_failed", forbid_unknown_fields=True):
    """A checkpoint could not be written."""

    iteration: int
    error: str
    workers: int


WorkerEvent = Corrupt | Guarded | Healed | Rebuilt | JoinRefused | RolledBack | SaveFailed
