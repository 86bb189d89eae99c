"""The fields of events that a coordinator reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.plan.value import Value


class EventFields(Value, frozen=True):
    """An emitted event; its other fields are for readers of events.jsonl."""

    event: str
    generation: int | None = None
    iteration: int | None = None
    worker: str | None = None
    rank: int | None = None
    pid: int | None = None
    host: str | None = None
    removed: bool | None = None
    error: str | None = None
    hosts: Mapping[str, Any] | None = None
    members: Mapping[str, Any] | None = None

    @classmethod
    def understood(cls, event: Mapping[str, Any]) -> bool:
        """Whether a line of a file that any process may have written to is an event."""
        try:
            cls.from_json(event)
        except ValueError:
            return False
        return True
