"""Events from workers' own messages. Pure, like `machine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.state import State
from megatron_recycle.membership.worker_events import Corrupt, Healed, Hint, JoinRefused, WorkerEvent

_LONGEST_TEXT = 500
_RECORDED: Mapping[type, Mapping[str, Any]] = {
    Corrupt: {"event": "suspected", "kind": FailureKind.CORRUPT, "removed": False},
    Healed: {"kind": FailureKind.CORRUPT},
    JoinRefused: {"event": "join_failed"},
}
"""Worker events whose record differs from the worker's words."""


def event_of(state: State, incarnation: str, message: WorkerEvent | Hint, now: float) -> dict[str, Any] | None:
    """The event of a member's message; None if the sender is no member. The coordinator fills in the sender."""
    member = state.member(incarnation)
    if member is None:
        return None
    short = {key: value[:_LONGEST_TEXT] if isinstance(value, str) else value
             for key, value in message.to_json().items()}
    more = _RECORDED.get(type(message))
    return {"t": now, "generation": state.generation, **short, "worker": member.worker,
            **({"rank": member.rank, "pid": member.pid, **more} if more is not None else {})}
