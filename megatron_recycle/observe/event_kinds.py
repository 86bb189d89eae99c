"""Types of the events that code reads, with the fields that are read; docs/events.md has all events with all fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import field

from megatron_recycle.plan.grid import Grid
from megatron_recycle.plan.value import Value


class Named(Value, frozen=True):
    """Any event."""

    event: str


class Ranked(Value, frozen=True):
    """Any event: the rank it is about, if it has one."""

    worker: Any = None
    rank: Any = None


class Kind(Value, frozen=True, tag_field="event"):
    """An event whose further fields are read."""


class Started(Kind, frozen=True, tag="started"):
    ranks: Mapping[str, int]
    hosts: Mapping[str, str] = field(default_factory=dict)
    survival: str | None = None
    grid: Grid | None = None


class Suspected(Kind, frozen=True, tag="suspected"):
    iteration: int
    worker: str
    kind: str
    rank: int
    pid: int
    ms: float = 0.0
    removed: bool = True
    stranded: bool = False
    error: str | None = None


class Explained(Kind, frozen=True, tag="explained"):
    worker: str
    rank: int
    pid: int
    host: str
    causes: tuple[str, ...]
    gpu: str | None = None
    repair: str | None = None


class Left(Kind, frozen=True, tag="left"):
    kind: str = ""


class Planned(Kind, frozen=True, tag="planned"):
    source: str = ""


class Resumed(Kind, frozen=True, tag="resumed"):
    ms: float | None = None


class Committed(Kind, frozen=True, tag="committed"):
    iteration: int
    loss: float | str | None = None


class LastCopy(Kind, frozen=True, tag="last_copy"):
    stages: Mapping[str, str]
    hosts: Mapping[str, str] = field(default_factory=dict)
    checkpoint: int | None = None
    kept_by: Mapping[str, str] | None = None


class LastHost(Kind, frozen=True, tag="last_host"):
    hosts: Mapping[str, tuple[int, ...]]
    shards: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)


class Restored(Kind, frozen=True, tag="restored"):
    iteration: int


class Joined(Kind, frozen=True, tag="joined"):
    moved_from: str | None = None


KINDS: Mapping[str, type[Kind]] = {str(kind.__struct_config__.tag): kind for kind in Kind.__subclasses__()}
"""Types by the name of the event."""
