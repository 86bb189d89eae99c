"""The cluster as a job sees it: workers' places on hosts, when each place is lost and gained, and its current unit.

A *unit* is as many GPUs of one host as a worker has parts (tensor parallelism). It is lost with any of them, and back
when all of them are. Policies give units positions of the grid; the remaining units are spares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_recycle.membership.names import Process
from megatron_recycle.membership.placement import Placement
from megatron_recycle.plan import Worker
from megatron_recycle.tools.simulate.seating import most_at_once, seated
from megatron_recycle.tools.simulate.trace import HOST, Outage, Trace, TraceError


class Unit(NamedTuple):
    """GPUs ``number * tp`` to ``(number + 1) * tp - 1`` of a host."""

    host: int
    number: int

    def __str__(self) -> str:
        return f"{self.host}.{self.number}"


@dataclass(frozen=True)
class Cluster:
    """Cluster of ``hosts`` hosts with ``gpus`` GPUs each, ``tp`` of which make a worker."""

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

    def slots(self, pipelines: int, stages: int) -> dict[Worker, Unit]:
        """Initial unit of each worker of a grid, as a launcher places them (`membership.placement`). Raises TraceError
        if it does not fit."""
        if pipelines * stages > self.hosts * self.per_host:
            raise TraceError(f"{pipelines} x {stages} workers of {self.tp} GPUs need"
                             f" {pipelines * stages * self.tp} GPUs; the cluster has {self.hosts * self.gpus}")
        order = Placement(stages, pipelines, 1, self.per_host)
        taken = dict.fromkeys(range(self.hosts), 0)
        found: dict[Worker, Unit] = {}
        for name, host in order.hosts(order.spreads(None)).items():
            found[Process.parse(name).worker] = Unit(host, taken[host])
            taken[host] += 1
        return found


class Slots:
    """Positions and units of one life of a job.

    A unit that comes back takes its old position if that is still empty, else another one, else it is spare.
    """

    def __init__(self, seated: Mapping[Worker, Unit], spare: Iterable[Unit] = ()) -> None:
        self.of: dict[Unit, Worker] = {unit: worker for worker, unit in seated.items()}
        self.spare: dict[Unit, None] = dict.fromkeys(spare)
        self._usual = dict(self.of)

    def lose(self, units: Iterable[Unit]) -> list[Worker]:
        """Take these units away; returns the positions that they leave empty."""
        found = []
        for unit in units:
            self.spare.pop(unit, None)
            if unit in self.of:
                found.append(self.of.pop(unit))
        return found

    def gain(self, units: Iterable[Unit]) -> None:
        """Make these units usable again."""
        self.spare.update(dict.fromkeys(unit for unit in units if unit not in self.of))

    def fill(self, empty: Iterable[Worker]) -> dict[Worker, Unit]:
        """Spare units for empty positions, as far as there are some; they count as taken."""
        left = dict.fromkeys(empty)
        found: dict[Worker, Unit] = {}
        for unit in [*self.spare]:
            if (usual := self._usual.get(unit)) in left:
                found[usual] = unit
                del left[usual]
                del self.spare[unit]
        for worker, unit in zip([*left], [*self.spare]):
            found[worker] = unit
            del self.spare[unit]
        for worker, unit in found.items():
            self.of[unit] = worker
        return found

    def move(self, unit: Unit, to: Worker) -> None:
        """Assign a unit to another position."""
        self.of[unit] = to

    def unit(self, worker: Worker) -> Unit | None:
        """The unit of a position."""
        return next((unit for unit, other in self.of.items() if other == worker), None)


def packed(units: Iterable[Unit], pipelines: int, stages: int) -> dict[Worker, Unit]:
    """The first units, pipeline by pipeline, as a launcher numbers ranks over the hosts that are left."""
    workers = [Worker(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)]
    return dict(zip(workers, sorted(units)))


@dataclass(frozen=True)
class Change:
    """At the time ``at`` (seconds) some units are lost, and others are back. A unit in both: a machine is lost, and
    another one, which has waited, takes its place at once.

    ``whole_host``: a host is silent, so that no launcher sees processes end.
    """

    at: float
    lost: tuple[Unit, ...]
    gained: tuple[Unit, ...]
    whole_host: bool = False


def changes(trace: Trace, cluster: Cluster) -> tuple[list[Change], tuple[str, ...]]:
    """The trace's changes of the cluster's units, in order, and the differences between trace and cluster, in
    sentences.

    The cluster's hosts are places for the trace's machines (`seated`). Places that are empty at the start are a change
    at 0.
    """
    notes: list[str] = []
    machines, most = len(trace.hosts), most_at_once(trace)
    if machines > cluster.hosts:
        notes.append(f"the trace has {machines} machines, at most {most} at a time, and the cluster {cluster.hosts}"
                     " hosts: a machine that comes takes the first empty place, or waits for one")
    if most < cluster.hosts:
        notes.append(f"the trace has at most {most} machines at a time, and the cluster {cluster.hosts} hosts:"
                     f" {cluster.hosts - most} or more are always missing")
    if (more := sum((one.gpu or 0) >= cluster.gpus for one in trace.outages)):
        notes.append(f"{more} outages of GPUs that the hosts do not have were left out")
    kept = [one for one in trace.outages if (one.gpu or 0) < cluster.gpus]
    return [*_changes(seated(trace.hosts, kept, cluster.hosts), cluster, trace.duration)], tuple(notes)


def most_live(happened: Iterable[Change], cluster: Cluster) -> int:
    """Most units that are there at the same time."""
    live = cluster.hosts * cluster.per_host
    counts = [live]
    for change in happened:
        live += len(change.gained) - len(change.lost)
        if not change.at:
            counts = []
        counts.append(live)
    return max(counts)


def _changes(outages: Sequence[tuple[int, Outage]], cluster: Cluster, end: float) -> Iterator[Change]:
    """The changes from outages and their places."""
    moments: dict[float, tuple[list[tuple[int, Outage]], list[tuple[int, Outage]]]] = {}
    for place, one in outages:
        moments.setdefault(one.down, ([], []))[0].append((place, one))
        if one.up < end:
            moments.setdefault(one.up, ([], []))[1].append((place, one))
    reasons: Counter[Unit] = Counter()  # outages that keep each unit from working
    for at, (begun, over) in sorted(moments.items()):
        lost, back = set[Unit](), set[Unit]()
        for place, one in begun:
            for unit in _hit(one, place, cluster):
                if not reasons[unit]:
                    lost.add(unit)
                reasons[unit] += 1
        for place, one in over:
            for unit in _hit(one, place, cluster):
                reasons[unit] -= 1
                if not reasons[unit]:
                    back.add(unit)
        if lost or back:
            yield Change(at, tuple(sorted(lost)), tuple(sorted(back)), any(one.kind == HOST for _, one in begun))


def _hit(outage: Outage, host: int, cluster: Cluster) -> list[Unit]:
    if outage.gpu is not None:
        return [Unit(host, outage.gpu // cluster.tp)]
    return [Unit(host, number) for number in range(cluster.per_host)]
