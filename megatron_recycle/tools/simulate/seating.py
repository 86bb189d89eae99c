"""Assignment of a trace's machines to the cluster's places. Machines come under new names, and there may be more or
fewer of them than places."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby

from megatron_recycle.tools.simulate.trace import ABSENT, Outage, Trace


def seated(hosts: Sequence[str], outages: Iterable[Outage], places: int) -> list[tuple[int, Outage]]:
    """Outages of ``places`` places in which these hosts sit, each with its place: times when a place is empty, and when
    one of its GPUs is out.

    A host comes back to its former place, if that is empty, else to the first empty one. While all are taken it waits,
    and the host that has waited longest gets the next one. At the start the first hosts have the first places: with no
    more hosts than places each one has its own for good. An outage of no duration is that of a place that was taken at
    once.
    """
    table = _Table(hosts, places)
    whole = [one for one in outages if one.gpu is None]
    gone = {one.host for one in whole if one.down <= 0}
    table.come([host for host in hosts if host not in gone], 0.0)
    moves = sorted([(one.down, False, one) for one in whole if one.down > 0]
                   + [(one.up, True, one) for one in whole if one.up != float("inf")], key=lambda move: move[:2])
    for at, several in groupby(moves, key=lambda move: move[0]):
        come = []
        for _, comes, one in several:
            if comes:
                come.append(one.host)
            else:
                table.go(one.host, at, one.kind)
        table.come(come, at)
    return [*table.empty(), *table.of_gpus([one for one in outages if one.gpu is not None])]


def most_at_once(trace: Trace) -> int:
    """Most machines of a trace that are there at the same time."""
    changes: Counter[float] = Counter()
    for one in trace.outages:
        if one.gpu is None:
            changes[max(one.down, 0.0)] -= 1
            changes[one.up] += 1
    count = most = len(trace.hosts) + changes.pop(0.0, 0)
    for at in sorted(changes):
        count += changes[at]
        most = max(most, count) if at < trace.duration else most
    return most


class _Table:
    """Seated hosts with their times, and the waiting hosts."""

    def __init__(self, hosts: Sequence[str], places: int) -> None:
        self._usual = {host: place for place, host in enumerate(hosts[:places])}
        self._sits: dict[str, tuple[int, float]] = {}
        self._waits: OrderedDict[str, None] = OrderedDict()
        self._free = dict.fromkeys(range(places), (0.0, ABSENT))  # since when, and how it was left
        self._stays: dict[str, list[tuple[int, float, float]]] = {}
        self._gaps: list[tuple[int, Outage]] = []

    def come(self, hosts: Iterable[str], at: float) -> None:
        """These hosts come, in this order; hosts that wait already come first."""
        self._waits.update(dict.fromkeys(hosts))
        while self._waits and self._free:
            host, _ = self._waits.popitem(last=False)
            usual = self._usual.get(host)
            place = usual if usual in self._free else min(self._free)
            since, kind = self._free.pop(place)
            if at:
                self._gaps.append((place, Outage(since, at, host, kind)))
            self._usual[host] = place
            self._sits[host] = place, at

    def go(self, host: str, at: float, kind: str) -> None:
        """A host goes, with this kind of outage."""
        if host not in self._sits:
            self._waits.pop(host, None)
            return
        place, since = self._sits.pop(host)
        self._stays.setdefault(host, []).append((place, since, at))
        self._free[place] = at, kind

    def empty(self) -> list[tuple[int, Outage]]:
        """Times when each place was empty. The outage's host is the one that came then, if any."""
        return [*self._gaps, *((place, Outage(since, float("inf"), "", kind))
                               for place, (since, kind) in self._free.items())]

    def of_gpus(self, outages: Iterable[Outage]) -> list[tuple[int, Outage]]:
        """The GPUs' outages, as long as their hosts sit somewhere."""
        found = []
        for one in outages:
            stays = [*self._stays.get(one.host, ())]
            if one.host in self._sits:
                stays.append((*self._sits[one.host], float("inf")))
            for place, since, until in stays:
                down, up = max(one.down, since), min(one.up, until)
                if down < up:
                    found.append((place, Outage(down, up, one.host, one.kind, one.gpu)))
        return found
