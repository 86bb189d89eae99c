"""Alarms: the events of a job that need an operator. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.tools.operate.job_history import Absence, Event, JobHistory
from megatron_recycle.tools.operate.outlook import Facts, duration, judge

VERSION = 1
"""Version of the JSON that a command gets; raised when a field goes away or changes its meaning."""
ALARMS = ("lost", "resumed", "explained", "last_copy", "last_host", "degraded", "whole", "stalled", "restored",
          "unreachable", "restarted", "ended")
"""docs/monitoring.md has the occasion of each."""
_MOST = 10
"""Most alarms in a row without a pause."""
_REFILL = 30.0
"""Seconds until there is room for one more."""
_ALWAYS = ("ended",)
"""Alarms exempt from the rate limit."""


@dataclass(frozen=True)
class Alarm:
    """``name`` is one of ALARMS, ``summary`` one line for people; ``worker`` names the workers concerned."""

    name: str
    t: float
    summary: str
    workers: tuple[str, ...] = ()
    cause: Mapping[str, Any] = field(default_factory=dict)


class Alarms:
    """Alarms of a job. Add each event with the history after it, and tick now and then; both return the alarms due.

    Args:
        degraded_after: seconds.
    """

    def __init__(self, degraded_after: float = 600.0) -> None:
        self._degraded_after = degraded_after
        self._lost: list[Absence] = []
        self._degraded = self._stalled = self._unreachable = False

    def add(self, event: Event, seen: JobHistory) -> list[Alarm]:
        """Alarms of one event, which ``seen`` has taken in already."""
        name = event["event"]
        if name == "suspected" and event.get("removed") is not False:
            self._lost.append(seen.out[event["worker"]])
            return []
        found = self._flush(event, seen) if name in ("decided", "finished") else []
        if (alarm := _of_event(event, seen)) is not None:
            found.append(Alarm(alarm[0], event["t"], alarm[1], cause=event))
        if name == "decided" and not seen.out and self._degraded:
            self._degraded = False
            found.append(Alarm("whole", event["t"], "all positions have a worker again", cause=event))
        if name == "committed":
            self._stalled = False
        return found

    def tick(self, facts: Facts) -> list[Alarm]:
        """Alarms caused by the passage of time."""
        seen, found = facts.seen, list[Alarm]()
        if seen.finished:
            return found
        since = seen.degraded_since
        if since is not None and not self._degraded and facts.now - since > self._degraded_after:
            self._degraded = True
            found.append(Alarm("degraded", facts.now, f"{', '.join(seen.out)} out for {duration(facts.now - since)}: "
                               f"{len(seen.members)} of {seen.size} workers train", tuple(seen.out)))
        outlook = judge(facts)
        if outlook.word == "STALLED" and not self._stalled:
            self._stalled = True
            found.append(Alarm("stalled", facts.now, outlook.line))
        away = outlook.word == "UNREACHABLE"
        if away and not self._unreachable:
            found.append(Alarm("unreachable", facts.now, outlook.line))
        self._unreachable = away
        return found

    def _flush(self, event: Event, seen: JobHistory) -> list[Alarm]:
        lost, self._lost = self._lost, []
        if not lost:
            return []
        named = ", ".join(f"{one.worker} ({one.kind}{' on ' + one.host if one.host else ''})" for one in lost[:8])
        more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
        rest = f"; {len(seen.members)} of {seen.size} workers go on" if event["event"] == "decided" else ""
        return [Alarm("lost", event["t"], f"lost {named}{more} in iteration {lost[0].iteration}{rest}",
                      tuple(one.worker for one in lost), event)]


def _of_event(event: Event, seen: JobHistory) -> tuple[str, str] | None:
    """The alarm that an event is by itself, and its summary."""
    match event["event"]:
        case "resumed":
            survivors, ms = event.get("survivors", len(seen.members)), float(event.get("ms") or 0)
            return "resumed", f"{survivors} workers train again after {ms:.0f} ms"
        case "explained":
            repair = f"; {event['repair']}" if event.get("repair") else ""
            return "explained", f"{event['worker']} on {event['host']}: {'; '.join(event['causes'])}{repair}"
        case "last_copy":
            return "last_copy", "; ".join(
                f"{worker} on {event.get('hosts', {}).get(stage, '?')} is the last worker of stage {stage}"
                for stage, worker in event.get("stages", {}).items())
        case "last_host":
            hosts = ", ".join({**event.get("hosts", {}), **event.get("shards", {})})
            return "last_host", f"without {hosts} the job cannot go on, until workers have joined"
        case "restored":
            lost = event.get("lost", 0)
            return "restored", f"all have gone back to iteration {event.get('iteration')}: {lost} iterations are lost"
        case "started_again":
            times = f"{event.get('restart')} of {event.get('of')}"
            return "restarted", f"started again ({times}): {event.get('reason', '')}"
        case "finished":
            return "ended", f"ended with status {event.get('status')}: {event.get('message', '')}"
    return None


def to_json(alarm: Alarm, facts: Facts, suppressed: int = 0) -> dict[str, Any]:
    """The JSON that a command gets on its standard input. Times are Unix seconds."""
    seen, outlook = facts.seen, judge(facts)
    return {"v": VERSION, "event": alarm.name, "t": alarm.t, "run": facts.run, "summary": alarm.summary,
            "workers": list(alarm.workers), "verdict": outlook.word.lower().replace(" ", "_"),
            "level": int(outlook.level), "next_end": outlook.next_end, "repair": outlook.repair,
            "iteration": seen.iteration, "generation": seen.generation, "out": sorted(seen.out),
            "workers_now": len(seen.members), "workers_whole": seen.size, "suppressed": suppressed,
            "cause": {key: value for key, value in alarm.cause.items() if key not in ("members", "pids", "ranks")}}


class Rate:
    """Rate limit: lets through a few at once, and then one each half minute, so that a job that fails all the time does
    not flood the operator.

    Attributes:
        suppressed: alarms held back since the last one that was let through.
        held_back: all alarms held back.
    """

    def __init__(self) -> None:
        self.suppressed = self.held_back = 0
        self._room, self._at = float(_MOST), -math.inf

    def lets(self, alarm: Alarm, now: float) -> int | None:
        """Number of alarms held back before this one, which may go; None: this one is held back, too."""
        self._room = min(float(_MOST), self._room + max(0.0, now - self._at) / _REFILL)
        self._at = now
        if self._room < 1 and alarm.name not in _ALWAYS:
            self.suppressed += 1
            self.held_back += 1
            return None
        self._room = max(0.0, self._room - 1)
        before, self.suppressed = self.suppressed, 0
        return before
