"""Traces from files: two public formats and our own.

* ``time_ms,add|remove,node``: as Bamboo published its traces of preemptible machines.
* ``date, time, count``: as the traces of cloud capacity are; how many machines there are, not which.
* JSON lines: one about the trace (``duration``, ``hosts``), then one for each outage (``host``, ``kind``, ``down``,
  ``up``, ``gpu``).

The first line decides the format. A line that cannot be read is refused with its number. Impossible entries are
corrected, and each correction is reported (`Trace.cleaned`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from megatron_recycle.plan.value import read_as
from megatron_recycle.tools.simulate.trace import EXIT, HOST, KINDS, Cleaning, Outage, Trace, TraceError, checked

FOR_GOOD = float("inf")
LONG_GAP = 3600.0
"""Seconds without a reading after which a gap is reported."""


@dataclass(frozen=True, slots=True)
class Line:
    """A non-blank line of a file, with its number."""

    path: str
    number: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.number}"

    def fault(self, what: str) -> TraceError:
        return TraceError(f"{self.where}: {what}: {self.text[:60]!r}")


def read(path: str | Path, *, seed: int = 0, longest_gap: float | None = None) -> Trace:
    """The trace in this file.

    Args:
        seed: for a trace that only counts machines, draws which are lost.
        longest_gap: in such a trace, time between two readings beyond so many seconds is cut out; None: the last count
            holds, and gaps above an hour are reported.

    Raises TraceError, with the number of the line, for unreadable input.
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            lines = [Line(str(path), number, text.strip()) for number, text in enumerate(file, 1)
                     if text.strip() and not text.lstrip().startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: the trace cannot be read: {error}") from None
    if not lines:
        raise TraceError(f"{path}: the trace is empty")
    first = lines[0]
    parts = [part.strip() for part in first.text.split(",")]
    try:
        if first.text.startswith("{"):
            return _own(lines)
        if len(parts) == 3 and parts[1] in ("add", "remove"):
            return _added_and_removed(lines)
        if len(parts) == 3 and "-" in parts[0] and ":" in parts[1]:
            return _counted(lines, random.Random(seed), longest_gap)
        raise first.fault("neither 'time_ms,add|remove,node' nor 'date, time, count' nor a JSON object")
    except TraceError as error:
        if str(path) in str(error):
            raise
        raise TraceError(f"{path}: {error}") from None


# time_ms,add|remove,node


def _added_and_removed(lines: Sequence[Line]) -> Trace:
    cleaning = Cleaning()
    changes: list[tuple[float, bool, str, Line]] = []
    for line in lines:
        parts = [part.strip() for part in line.text.split(",")]
        if len(parts) != 3 or parts[1] not in ("add", "remove") or not parts[2]:
            raise line.fault("not 'time_ms,add|remove,node'")
        changes.append((_number(parts[0], line) / 1000, parts[1] == "add", parts[2], line))
    back = next((later[3] for earlier, later in pairwise(changes) if later[0] < earlier[0]), None)
    if back is not None:
        cleaning.note("lines that go back in time were sorted", back.where)
        changes.sort(key=lambda one: one[0])
    begin, end = changes[0][0], changes[-1][0]
    absent: dict[str, float] = {}  # since when
    hosts: dict[str, bool] = {}  # whether it is there
    outages: list[Outage] = []
    for at, added, host, line in changes:
        if hosts.get(host, False) is added:
            cleaning.note("a machine was added that was there, or removed that was not; the line was left out",
                          line.where)
            continue
        since = absent.pop(host, 0.0)
        if added and at - begin > since:
            outages.append(Outage(since, at - begin, host, HOST))
        elif not added:
            absent[host] = at - begin
        hosts[host] = added
    outages += [Outage(since, FOR_GOOD, host, HOST) for host, since in absent.items()]
    return checked([*hosts], outages, end - begin, cleaning)


# date, time, count


def _counted(lines: Sequence[Line], draw: random.Random, longest_gap: float | None) -> Trace:
    cleaning = Cleaning()
    readings: list[tuple[float, int]] = []
    first: datetime | None = None
    skipped = 0.0
    last = 0.0
    for line in lines:
        parts = [part.strip() for part in line.text.split(",")]
        if len(parts) != 3:
            raise line.fault("not 'date, time, count'")
        try:
            at = datetime.fromisoformat(f"{parts[0]} {parts[1]}")
        except ValueError:
            raise line.fault("not a date and a time") from None
        if not parts[2].isdecimal():
            raise line.fault("its count is no number of machines")
        first = first or at
        seconds = (at - first).total_seconds()
        if readings and seconds <= last:
            cleaning.note("a reading that is not later than the one before was left out", line.where)
            continue
        if readings and seconds - last > LONG_GAP and longest_gap is None:
            hours = (seconds - last) / 3600
            cleaning.note(f"no reading for {hours:.1f} h: the last count was taken to hold", line.where)
        if readings and longest_gap is not None and seconds - last > longest_gap:
            cleaning.note(f"a gap was cut down to {longest_gap:.0f} s", line.where)
            skipped += seconds - last - longest_gap
        last = seconds
        readings.append((seconds - skipped, int(parts[2])))
    return _named(readings, draw, cleaning)


def _named(readings: Sequence[tuple[float, int]], draw: random.Random, cleaning: Cleaning) -> Trace:
    """Names for machines that were only counted: departing ones are drawn, returning ones are those away longest."""
    most = max(count for _, count in readings)
    hosts = [f"host{number}" for number in range(most)]
    present = hosts[:readings[0][1]]
    away = dict.fromkeys(hosts[readings[0][1]:], 0.0)
    outages: list[Outage] = []
    for at, count in readings:
        while len(present) > count:
            away[present.pop(draw.randrange(len(present)))] = at
        while len(present) < count:
            host = next(iter(away))
            outages.append(Outage(away.pop(host), at, host, HOST))
            present.append(host)
    outages += [Outage(since, FOR_GOOD, host, HOST) for host, since in away.items()]
    return checked(hosts, outages, readings[-1][0], cleaning)


# JSON lines


Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Header(msgspec.Struct):
    """The first line: names of the hosts, or their number."""

    hosts: list[str] | int
    duration: Seconds


class Entry(msgspec.Struct):
    """A line about an outage, which lasts for good without ``up``."""

    host: str
    down: Seconds
    up: Seconds | None = None
    kind: str = EXIT
    gpu: Annotated[int, msgspec.Meta(ge=0)] | None = None


Kind = TypeVar("Kind")


def _own(lines: Sequence[Line]) -> Trace:
    header = _decoded(lines[0], Header)
    hosts = header.hosts
    names = [f"host{number}" for number in range(hosts)] if isinstance(hosts, int) else hosts
    known = set(names)
    if len(known) < len(names):
        raise lines[0].fault("a host is named twice")
    return checked(names, [_outage(line, known) for line in lines[1:]], header.duration, Cleaning())


def _outage(line: Line, known: set[str]) -> Outage:
    one = _decoded(line, Entry)
    if one.host not in known:
        raise line.fault(f"\"host\" is {one.host!r}, which the first line does not name")
    if one.kind not in KINDS:
        raise line.fault(f"\"kind\" is none of {', '.join(KINDS)}")
    up = FOR_GOOD if one.up is None else one.up
    if up < one.down:
        raise line.fault("it is up before it is down")
    return Outage(one.down, up, one.host, one.kind, one.gpu)


def _decoded(line: Line, kind: type[Kind]) -> Kind:
    try:
        found: Kind = read_as(kind, json.loads(line.text))
    except ValueError as error:
        raise line.fault(str(error)) from None
    return found


def _number(text: str, line: Line) -> float:
    try:
        value = float(text)
    except ValueError:
        raise line.fault("its time is no number") from None
    if not 0 <= value < FOR_GOOD:
        raise line.fault("its time is before 0, or none")
    return value
