"""Failure traces: when each host, or one GPU of it, was out. A value; `reading` and `generating` make it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_recycle.errors import RecycleError

EXIT, HOST, ABSENT = KINDS = "exit", "host", "absent"
"""`exit`: processes end, and their launcher sees it. `host`: the whole host is silent. `absent`: the host was never
there before, or was taken away with notice."""
_LONGEST = 100 * 365.25 * 86400
"""Seconds that a trace may last."""


class TraceError(RecycleError):
    """A trace that cannot be read or simulated; the message names file and line, and what to do."""


@dataclass(frozen=True, slots=True)
class Outage:
    """`host` does not work from ``down`` until ``up`` (seconds; infinite: for good).

    ``gpu``: only this GPU of it; None: the whole host, which sorts before its GPUs.
    """

    down: float
    up: float
    host: str
    kind: str = EXIT
    gpu: int | None = None

    def __lt__(self, other: Outage) -> bool:
        return self._place() < other._place()

    def _place(self) -> tuple[float, float, str, str, int]:
        return self.down, self.up, self.host, self.kind, -1 if self.gpu is None else self.gpu


@dataclass(frozen=True)
class Trace:
    """The outages of these hosts in the seconds from 0 to ``duration``.

    ``hosts`` are in their order of appearance. ``outages`` are ordered by their begin; of one host and GPU they do not
    overlap. ``cleaned``: the corrections that made it so, in sentences.
    """

    hosts: tuple[str, ...]
    outages: tuple[Outage, ...]
    duration: float
    cleaned: tuple[str, ...] = ()

    @property
    def failures(self) -> int:
        """Outages that begin after the start."""
        return sum(outage.down > 0 for outage in self.outages)

    def part(self, begin: float, end: float) -> Trace:
        """The seconds from ``begin`` to ``end`` as a trace of their own. Raises TraceError if there are none."""
        end = min(end, self.duration)
        if not 0 <= begin < end:
            raise TraceError(f"the trace ends after {self.duration:.0f} s: from {begin:.0f} s on there is nothing left")
        kept = [Outage(max(0.0, one.down - begin), one.up - begin, one.host, one.kind, one.gpu)
                for one in self.outages if one.up > begin and one.down < end]
        return Trace(self.hosts, tuple(sorted(kept)), end - begin, self.cleaned)

    def lines(self) -> Iterator[str]:
        """The trace in our own format: a line about itself, then one for each outage, in JSON."""
        yield json.dumps({"duration": self.duration, "hosts": list(self.hosts)})
        for one in self.outages:
            fields: dict[str, Any] = {"host": one.host, "kind": one.kind, "down": one.down,
                                      "up": None if one.up == float("inf") else one.up}
            yield json.dumps(fields if one.gpu is None else {**fields, "gpu": one.gpu})


@dataclass
class Cleaning:
    """Corrections made while a trace was read, one sentence for each kind."""

    _changes: dict[str, list[str]] = field(default_factory=dict)

    def note(self, what: str, where: str) -> None:
        """Record the correction ``what`` at ``where`` (a line, a time)."""
        self._changes.setdefault(what, []).append(where)

    def told(self) -> tuple[str, ...]:
        """A sentence for each kind of correction: how often, and where first."""
        return tuple(f"{what}: {len(places)} times, first {places[0]}" if len(places) > 1 else f"{what}: {places[0]}"
                     for what, places in self._changes.items())


def merged(outages: Iterable[Outage], cleaning: Cleaning) -> tuple[Outage, ...]:
    """Outages of the same host and GPU that overlap or touch, as one. The first one's kind counts."""
    found: dict[tuple[str, int | None], list[Outage]] = {}
    for one in sorted(outages):
        if one.up <= one.down:
            cleaning.note("an outage that lasts no time was left out", f"{one.host} at {one.down:.0f} s")
            continue
        row = found.setdefault((one.host, one.gpu), [])
        if row and one.down <= row[-1].up:
            cleaning.note("outages of one host that overlap were made one", f"{one.host} at {one.down:.0f} s")
            row[-1] = replace(row[-1], up=max(row[-1].up, one.up))
        else:
            row.append(one)
    return tuple(sorted(one for row in found.values() for one in row))


def lasting(duration: float) -> float:
    """The duration, if a trace may last so long. Raises TraceError otherwise."""
    if not 0 < duration <= _LONGEST:
        raise TraceError(f"the trace lasts {duration:g} s: give seconds above 0, and at most a hundred years")
    return float(duration)


def checked(hosts: Sequence[str], outages: Iterable[Outage], duration: float, cleaning: Cleaning) -> Trace:
    """A cleaned trace of these. Raises TraceError if it is empty or takes no time."""
    if not hosts:
        raise TraceError("the trace names no host")
    lasts = lasting(duration)
    kept = [one for one in outages if one.down < lasts]
    return Trace(tuple(hosts), merged(kept, cleaning), lasts, cleaning.told())
