"""Outgoing events: each is recorded, and most are sent to launchers. Events only inform; nothing acts on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_recycle.control.event_fields import EventFields
from megatron_recycle.control.server import Server
from megatron_recycle.membership.detectors import SignOfLife
from megatron_recycle.membership.event_records import event_of
from megatron_recycle.membership.inputs import Hinted
from megatron_recycle.membership.open_positions import plain
from megatron_recycle.membership.protocol import EventTold, Explains
from megatron_recycle.membership.state import State
from megatron_recycle.membership.worker_events import Hint, WorkerEvent

_KEPT = ("started", "suspected", "joined", "moving", "move_failed")
"""Events repeated to a launcher that reconnects: its closing table is made of them."""

_NOT_SENT = ("stopped",)
"""Large events that launchers do not use."""

Event = Mapping[str, Any]


class EventFeed:
    """Sends events to their readers.

    Args:
        emit: gets every event, see observe.events.
        emitted: events emitted by an earlier coordinator.

    Attributes:
        progress: the last report of each process about its training thread, by incarnation.
    """

    def __init__(self, emit: Callable[[Event], None], server: Server, emitted: Iterable[Event] = ()) -> None:
        emitted = list(emitted)
        before = [EventFields.from_json(event) for event in emitted]
        self.progress: dict[str, Any] = {}
        self.failures: Counter[str] = Counter()
        """Worker failures by host (without its launcher's number); simultaneous ones count once."""
        self._emit = emit
        self._server = server
        self._kept = [dict(event) for event, one in zip(emitted, before, strict=True) if one.event in _KEPT]
        self._hints = {(one.worker, one.generation, one.error) for one in before if one.event == "hint"}
        self._explained = {(one.rank, one.pid) for one in before if one.event == "explained"}
        self._commits = _commits(before)
        self._left = {(one.worker, one.generation) for one in before if one.event == "left"}
        self._counted: set[tuple[str, int]] = set()
        for one in before:
            self._count(one)

    def event(self, event: Event, state: State) -> None:
        """Record an event, and send it to the launchers. The end of a script, and a commit, that an earlier coordinator
        has emitted may be decided again here. They are not emitted again, but for a commit after the job has gone back
        to an earlier iteration."""
        fields = EventFields.from_json(event)
        if fields.event == "restored":
            self._commits = frozenset()
        if self._repeats(fields):
            return
        if fields.event == "suspected":
            incarnation, host = next(((incarnation, one.host) for incarnation, one in state.known.items()
                                      if (one.worker, one.pid) == (fields.worker, fields.pid)), ("", ""))
            doing = self.progress.get(incarnation)
            event = {**event, **({"progress": doing} if doing else {}), **({"host": host} if host else {})}
            self._count(EventFields.from_json(event))
        self._emit(event)
        if fields.event in _KEPT:
            self._kept.append(dict(event))
        if fields.event not in _NOT_SENT:
            self._server.tell_launchers(EventTold(brief(event)))

    def _repeats(self, fields: EventFields) -> bool:
        """Whether an earlier coordinator has emitted this."""
        if fields.event == "committed":
            return fields.iteration in self._commits
        return fields.event == "left" and (fields.worker, fields.generation) in self._left

    def again(self) -> list[dict[str, Any]]:
        """Events that a newly connected launcher may have missed."""
        return [brief(event) for event in self._kept]

    def passed_on(self, incarnation: str, message: WorkerEvent | Hint, state: State) -> None:
        """A member's own event, checked; those of other processes are ignored."""
        if (event := event_of(state, incarnation, message, time.time())) is not None:
            self.event(event, state)

    def handled(self, state: State) -> bool:
        """Whether some script has reported its own SIGTERM handler."""
        reports = [progress or {} for incarnation, progress in self.progress.items()
                   if incarnation in state.known and incarnation not in state.absent.fenced]
        return any(SignOfLife.from_json(progress).sigterm is True for progress in reports)

    def _count(self, fields: EventFields) -> None:
        """Count a host's failures. Workers that are lost with the same generation have failed together."""
        if fields.event == "suspected" and fields.removed is not False and fields.host:
            key = (plain(fields.host), fields.generation or 0)
            if key not in self._counted:
                self._counted.add(key)
                self.failures[key[0]] += 1

    def explained(self, message: Explains, state: State) -> None:
        """A host's explanation of a failure. Launchers repeat it after a reconnect; it is passed on once."""
        key = (message.rank, message.pid)
        one = next((one for one in state.known.values() if (one.rank, one.pid) == key), None)
        if one is not None and key not in self._explained:
            self._explained.add(key)
            self.event({"event": "explained", "t": time.time(), "generation": state.generation, "worker": one.worker,
                        "rank": one.rank, "pid": one.pid, "host": one.host,
                        "causes": [cause[:300] for cause in message.causes[:8]],
                        "gpu": message.gpu[:100] or None, "repair": message.repair[:500] or None}, state)

    def hint(self, hint: Hinted, state: State) -> None:
        """Workers repeat their last hint after a reconnect; it is passed on once."""
        member = state.member(hint.incarnation)
        if member is not None and (key := (member.worker, hint.generation, hint.error)) not in self._hints:
            self._hints.add(key)
            self.passed_on(hint.incarnation, Hint(hint.generation, hint.error), state)


def brief(event: Event) -> dict[str, Any]:
    """An event for launchers, with counts in place of facts about each worker, and the hosts: the full event of
    thousands of workers, sent to each host, would take longer than the rest of a recovery."""
    kept = {key: value for key, value in event.items() if key not in ("members", "pids")}
    fields = EventFields.from_json(event)
    if fields.event == "started" and fields.hosts is not None:
        kept["hosts"] = {name: host for host, name in {str(host): name for name, host in fields.hosts.items()}.items()}
    return kept if fields.members is None else {**kept, "workers": len(fields.members)}


def _commits(events: Iterable[EventFields]) -> frozenset[int]:
    """The iterations committed since the job last went back to an earlier one, if ever."""
    iterations: set[int] = set()
    for one in events:
        if one.event == "restored":
            iterations.clear()
        elif one.event == "committed" and one.iteration is not None:
            iterations.add(one.iteration)
    return frozenset(iterations)
