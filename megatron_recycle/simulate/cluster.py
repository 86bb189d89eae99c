"""The cluster as a job sees it: workers' places on hosts, and when each place is lost and gained.

A *unit* is as many GPUs of one host as a worker has parts (tensor parallelism). It is lost with any of them, and back
when all of them are. Policies give units positions of the grid; those that are left over are spares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_recycle.membership.names import Process
from megatron_recycle.membership.placement import Placement
from megatron_recycle.plan import Worker
from megatron_recycle.simulate.trace import HOST, Outage, Trace, TraceError


class Unit(NamedTuple):
    """GPUs ``number * tp`` to ``(number + 1) * tp - 1`` of a host."""

    host: int
    number: int

    def __str__(self) -> str:
        return f"{self.host}.{self.number}"


@dataclass(frozen=True)
class Cluster:
    """``hosts`` hosts with ``gpus`` GPUs each, ``tp`` of which make a worker."""

    hosts: int
    gpus: int
    tp: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.gpus < 1 or self.tp < 1:
            raise TraceError("a cluster needs hosts and GPUs")
        if self.gpus % self.tp:
            raise TraceError(f"a worker's {self.tp} GPUs must be on one host, and hosts have {self.gpus}: give --gpus a"
                             f" multiple of {self.tp}")

    @property
    def per_host(self) -> int:
        """Units of a host."""
        return self.gpus // self.tp

    def units(self) -> list[Unit]:
        """All units, host by host."""
        return [Unit(host, number) for host in range(self.hosts) for number in range(self.per_host)]

    def seats(self, pipelines: int, stages: int, spread: bool | None = None) -> dict[Worker, Unit]:
        """Where a launcher puts each worker of a grid at the start (`membership.placement`). Raises TraceError if it
        does not fit."""
        if pipelines * stages > self.hosts * self.per_host:
            raise TraceError(f"{pipelines} x {stages} workers of {self.tp} GPUs need"
                             f" {pipelines * stages * self.tp} GPUs; the cluster has {self.hosts * self.gpus}")
        order = Placement(stages, pipelines, 1, self.per_host)
        wide = order.spreads(None) if spread is None else spread
        taken = dict.fromkeys(range(self.hosts), 0)
        found: dict[Worker, Unit] = {}
        for name, host in order.hosts(wide).items():
            found[Process.parse(name).worker] = Unit(host, taken[host])
            taken[host] += 1
        return found


@dataclass(frozen=True)
class Change:
    """At the time ``at`` (seconds) these units are lost, and those are back.

    ``whole_host``: a host is silent, so that nobody sees processes end.
    """

    at: float
    lost: tuple[Unit, ...]
    gained: tuple[Unit, ...]
    whole_host: bool = False


def changes(trace: Trace, cluster: Cluster) -> tuple[list[Change], tuple[str, ...]]:
    """What the trace does to the cluster's units, in order, and what of it was left out, in sentences.

    The trace's hosts are the cluster's in their order. Outages that begin before the start are a change at 0.
    """
    number = {name: index for index, name in enumerate(trace.hosts)}
    notes: list[str] = []
    if len(trace.hosts) > cluster.hosts:
        notes.append(f"the trace has {len(trace.hosts)} hosts, the cluster {cluster.hosts}: the first"
                     f" {cluster.hosts} count")
    if len(trace.hosts) < cluster.hosts:
        notes.append(f"the trace has {len(trace.hosts)} hosts, the cluster {cluster.hosts}: the others never fail")
    kept = [one for one in trace.outages if number[one.host] < cluster.hosts and (one.gpu or 0) < cluster.gpus]
    if (more := sum((one.gpu or 0) >= cluster.gpus for one in trace.outages)):
        notes.append(f"{more} outages of GPUs that the hosts do not have were left out")
    return [*_changes(kept, number, cluster, trace.duration)], tuple(notes)


def _changes(outages: Sequence[Outage], number: dict[str, int], cluster: Cluster, end: float) -> Iterator[Change]:
    moments: dict[float, list[tuple[Outage, int]]] = {}
    for one in outages:
        moments.setdefault(one.down, []).append((one, 1))
        if one.up < end:
            moments.setdefault(one.up, []).append((one, -1))
    reasons: dict[Unit, int] = {}  # outages that keep each unit from working
    for at in sorted(moments):
        before: dict[Unit, bool] = {}
        silent = False
        for one, more in moments[at]:
            host = number[one.host]
            for unit in _hit(one, host, cluster):
                before.setdefault(unit, reasons.get(unit, 0) > 0)
                reasons[unit] = reasons.get(unit, 0) + more
            silent |= more > 0 and one.kind == HOST
        lost = tuple(unit for unit in sorted(before) if reasons[unit] and not before[unit])
        gained = tuple(unit for unit in sorted(before) if not reasons[unit] and before[unit])
        if lost or gained:
            yield Change(at, lost, gained, silent)


def _hit(outage: Outage, host: int, cluster: Cluster) -> list[Unit]:
    if outage.gpu is not None:
        return [Unit(host, outage.gpu // cluster.tp)]
    return [Unit(host, number) for number in range(cluster.per_host)]
