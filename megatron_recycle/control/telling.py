"""Events on their way out: each is recorded, and launchers hear of most. Events only tell; nothing acts on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_recycle.control.server import Server
from megatron_recycle.membership.inputs import Hinted
from megatron_recycle.membership.protocol import EventTold, Explains
from megatron_recycle.membership.said import event_of
from megatron_recycle.membership.state import State
from megatron_recycle.membership.vacancies import plain

_KEPT = ("started", "suspected", "joined", "moving", "move_failed")
"""Events that a launcher is told again when it comes back: its closing table is made of them."""

_NOT_TOLD = ("stopped",)
"""Events that launchers make nothing of, and that are large."""

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
        self.failures: Counter[str] = Counter()
        """How often workers of each host, without its launcher's number, have failed; at the same time counts once."""
        self._emit = emit
        self._server = server
        self._kept = [dict(event) for event in told if event["event"] in _KEPT]
        self._hints = {_hint_key(event) for event in told if event["event"] == "hint"}
        self._explained = {(event.get("rank"), event.get("pid")) for event in told if event["event"] == "explained"}
        self._commits = _commits(told)
        self._counted: set[tuple[str, int]] = set()
        for event in told:
            self._count(event)

    def event(self, event: Event, state: State) -> None:
        """Record an event, and tell the launchers. A commit that an earlier coordinator told just before its end is
        decided once more by this one, and told by it only after the job has gone back to an earlier iteration."""
        if event["event"] == "restored":
            self._commits = frozenset()
        elif event["event"] == "committed" and event["iteration"] in self._commits:
            return
        if event["event"] == "suspected":
            doing = self.progress.get(_incarnation_of(event, state))
            event = {**event, "progress": doing} if doing else event
            host = next((one.host for one in state.known.values() if (one.worker, one.pid) == (
                event["worker"], event.get("pid"))), "")
            event = {**event, "host": host} if host else event
            self._count(event)
        self._emit(event)
        if event["event"] in _KEPT:
            self._kept.append(dict(event))
        if event["event"] not in _NOT_TOLD:
            self._server.tell_launchers(EventTold(brief(event)))

    def again(self) -> list[dict[str, Any]]:
        """Events that a launcher which has just come may have missed."""
        return [brief(event) for event in self._kept]

    def passed_on(self, incarnation: str, said: Mapping[str, Any], state: State) -> None:
        """A member's own event, checked; nobody else has a say."""
        if (event := event_of(state, incarnation, said, time.time())) is not None:
            self.event(event, state)

    def handled(self, state: State) -> bool:
        """Whether some script has said that it has a SIGTERM handler of its own."""
        return any((progress or {}).get("sigterm") is True for incarnation, progress in self.progress.items()
                   if incarnation in state.known and incarnation not in state.absent.fenced)

    def _count(self, event: Event) -> None:
        """Workers that are lost with the same generation have failed together."""
        if event["event"] == "suspected" and event.get("removed") is not False and event.get("host"):
            key = (plain(event["host"]), int(event.get("generation", 0)))
            if key not in self._counted:
                self._counted.add(key)
                self.failures[key[0]] += 1

    def explained(self, message: Explains, state: State) -> None:
        """A host says why one of its processes has failed; launchers repeat it after a reconnect, and it is passed on
        once."""
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
        said = {"event": "hint", "generation": hint.generation, "error": hint.error}
        key = _hint_key({**said, "worker": member.worker}) if member is not None else None
        if key is not None and key not in self._hints:
            self._hints.add(key)
            self.passed_on(hint.incarnation, said, state)


def brief(event: Event) -> dict[str, Any]:
    """An event for launchers. Of what it says of each worker they see the count, and which hosts there are: for
    thousands of workers the whole of it, told to each host, would be more than all that a recovery takes beside."""
    kept = {key: value for key, value in event.items() if key not in ("members", "pids")}
    if event["event"] == "started" and isinstance(hosts := event.get("hosts"), dict):
        kept["hosts"] = {name: host for host, name in {str(host): name for name, host in hosts.items()}.items()}
    return {**kept, "workers": len(members)} if isinstance(members := event.get("members"), dict) else kept


def _commits(told: Iterable[Event]) -> frozenset[int]:
    """The committed iterations, since the job has gone back to an earlier one if it has."""
    iterations: set[int] = set()
    for event in told:
        if event["event"] == "restored":
            iterations.clear()
        elif event["event"] == "committed" and isinstance(event.get("iteration"), int):
            iterations.add(event["iteration"])
    return frozenset(iterations)


def _incarnation_of(event: Event, state: State) -> str:
    key = (event["worker"], event.get("pid"))
    return next((who for who, member in state.known.items() if (member.worker, member.pid) == key), "")


def _hint_key(event: Event) -> str:
    """Equal for hints that are the same."""
    return repr([event.get(name) for name in ("worker", "generation", "error")])
