"""Events on their way out: each is recorded, and launchers hear of most. Events only tell; nothing acts on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_recycle.control.server import Server
from megatron_recycle.membership.state import State

_KEPT = ("started", "suspected", "joined", "moving", "move_failed")
"""Events that a launcher is told again when it comes back: its closing table is made of them."""

Event = Mapping[str, Any]


class Telling:
    """Gets events to those that read them.

    Args:
        emit: gets every event, see observe.events.
        told: the events that an earlier coordinator has told.

    Attributes:
        progress: what each process has said of its training thread last, by incarnation.
    """

    def __init__(self, emit: Callable[[Event], None], server: Server, told: Iterable[Event] = ()) -> None:
        told = list(told)
        self.progress: dict[str, Any] = {}
        self._emit = emit
        self._server = server
        self._kept = [dict(event) for event in told if event["event"] in _KEPT]
        self._hints = {_hint_key(event) for event in told if event["event"] == "hint"}

    def event(self, event: Event, state: State) -> None:
        """Record an event, and tell the launchers."""
        if event["event"] == "suspected":
            doing = self.progress.get(_incarnation_of(event, state))
            event = {**event, "progress": doing} if doing else event
        self._emit(event)
        if event["event"] in _KEPT:
            self._kept.append(dict(event))
        self._server.tell_launchers({"type": "event", "event": dict(event)})

    def again(self) -> list[dict[str, Any]]:
        """Events that a launcher which has just come may have missed."""
        return self._kept

    def passed_on(self, incarnation: str, name: str, fields: Mapping[str, Any], state: State) -> None:
        """A worker's own event; what a fenced one says is marked, since it counts for nothing."""
        member = state.known.get(incarnation)
        if member is None:
            return
        event = {"t": time.time(), "generation": state.generation, **fields, "event": name, "worker": member.worker}
        self.event({**event, "fenced": True} if incarnation in state.fenced else event, state)

    def hint(self, incarnation: str, fields: Mapping[str, Any], state: State) -> None:
        """Workers repeat their last hint after a reconnect; it is passed on once."""
        member = state.known.get(incarnation)
        key = _hint_key({**fields, "worker": member.worker}) if member is not None else None
        if key is not None and key not in self._hints:
            self._hints.add(key)
            self.passed_on(incarnation, "hint", fields, state)


def _incarnation_of(event: Event, state: State) -> str:
    key = (event["worker"], event.get("pid"))
    return next((who for who, member in state.known.items() if (member.worker, member.pid) == key), "")


def _hint_key(event: Event) -> tuple[Any, ...]:
    """Equal for hints that are the same."""
    return event.get("worker"), event.get("generation"), event.get("error")
