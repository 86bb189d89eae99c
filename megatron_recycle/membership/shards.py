"""Holders of the shards of a stage's optimizer state: pure, and the same on every process.

A stage's optimizer state is cut into shards once, where the framework cuts it, and the cuts stay for the job's life. A
shard is held by `copies` workers of its stage, its twins, which step it alike; so the death of one loses nothing, and
another peer adopts the shard in the same recovery. `assign` alone decides adoptions, from the survivors' shards and
hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from megatron_recycle.membership.names import Process, in_order, workers_of
from megatron_recycle.membership.report import Report
from megatron_recycle.plan.grid import Worker
from megatron_recycle.plan.value import Value

Holders = tuple[tuple[str, ...], ...]
"""By shard, the processes that hold it."""


class Shard(NamedTuple):
    """Shard number ``shard`` of part ``part`` of stage ``stage``."""

    stage: int
    part: int
    shard: int


class ShardTable(Value, frozen=True):
    """The shards of part ``part`` of stage ``stage``: the processes that ``had`` them when the generation began (none,
    where all load a checkpoint), and its `holders` (the first speaks for the shard)."""

    stage: int
    part: int
    had: Holders
    holders: Holders

    @property
    def moves(self) -> list[tuple[int, str, str]]:
        """(shard, giver, taker) for each copy to be made, in an order that all keep to; the giving is spread over the
        shard's owners."""
        return [(shard, had[number % len(had)], taker)
                for shard, (had, holders) in enumerate(zip(self.had, self.holders)) if had
                for number, taker in enumerate(name for name in holders if name not in had)]


def assign(had: Sequence[Sequence[str]], members: Iterable[str], hosts: Mapping[str, frozenset[str]],
           copies: int) -> Holders:
    """Holders of each shard among ``members``: ``copies`` of them, or all if there are fewer. Twins are on different
    hosts where possible; loads differ by more than one shard only for the sake of hosts; no other copies are made. The
    first holder speaks for the shard; speakers differ as far as possible.

    Args:
        had: by shard, its owners, members or not.
        hosts: by member, the hosts with any of which it is lost.
    """
    names = in_order(members)
    wanted = min(copies, len(names))
    found = [[name for name in of if name in names] for of in had]
    load = Counter({name: sum(name in of for of in found) for name in names})

    def apart(of: Sequence[str], name: str) -> bool:
        return all(hosts[name].isdisjoint(hosts[other]) for other in of if other != name)

    def give_up(shard: int, name: str) -> None:
        found[shard].remove(name)
        load[name] -= 1

    def take(shard: int, name: str) -> None:
        found[shard].append(name)
        load[name] += 1

    for shard, of in enumerate(found):
        while len(of) > wanted:  # a twin on the same host first, then the highest load
            give_up(shard, max(of, key=lambda name: (not apart(of, name), load[name], Process.parse(name))))
    for shard, of in enumerate(found):
        while len(of) < wanted:
            free = [name for name in names if name not in of]
            take(shard, min(free, key=lambda name: (not apart(of, name), load[name],
                                                    (names.index(name) - shard) % len(names))))
        if wanted > 1 and (common := frozenset.intersection(*(hosts[name] for name in of))):
            others = [name for name in names if common.isdisjoint(hosts[name])]
            if others:  # a host has come back
                give_up(shard, max(of, key=lambda name: (load[name], Process.parse(name))))
                take(shard, min(others, key=lambda name: (load[name], Process.parse(name))))
    while (move := _relief(found, had, load, names, apart)) is not None:
        shard, giver, taker = move
        give_up(shard, giver)
        take(shard, taker)
    return _with_speakers(found, names)


def _with_speakers(found: Sequence[Sequence[str]], names: Sequence[str]) -> Holders:
    """Holders in order, except that the speaker comes first: the holder that speaks for the fewest earlier shards."""
    duties: Counter[str] = Counter()
    holders = []
    for shard, of in enumerate(found):
        first = min(of, key=lambda name: (duties[name], (names.index(name) - shard) % len(names)))
        duties[first] += 1
        holders.append((first, *in_order(set(of) - {first})))
    return tuple(holders)


def to_begin_with(place: int, count: int, copies: int) -> list[int]:
    """The shards that the worker at ``place`` among its stage's ``count`` makes when it builds its model: its shards by
    `assign` if each worker has a host of its own."""
    return sorted((place - number) % count for number in range(min(copies, count)))


def _relief(found: Sequence[Sequence[str]], had: Sequence[Sequence[str]], load: Counter[str], names: Sequence[str],
            apart: Callable[[Sequence[str], str], bool]) -> tuple[int, str, str] | None:
    """A move (shard, giver, taker) from a worker with at least two shards more than the taker. It puts no twins on one
    host that were apart. Shards still to be copied go first; the last owner of a shard never gives it up to new copies
    alone."""
    for giver in sorted(names, key=lambda name: -load[name]):
        for taker in sorted(names, key=lambda name: load[name]):
            if load[giver] < load[taker] + 2:
                break
            by_cost = sorted(range(len(found)), key=lambda shard: giver in had[shard])
            for shard in by_cost:
                rest = [name for name in found[shard] if name != giver]
                kept = not rest or {*rest} & {*had[shard]}
                if giver in found[shard] and taker not in rest and kept and (
                        apart(rest, taker) or not apart(rest, giver)):
                    return shard, giver, taker
    return None


def those_that_may_go(tables: Sequence[ShardTable], wanted: Sequence[str], members: Iterable[str]) -> list[str]:
    """The part of ``wanted`` that can leave together so that each shard keeps a holder, if it can have one among the
    remaining ``members``; all parts of a worker or none. The others' shards must be adopted first."""
    stay = {worker.stage for worker in {*workers_of(members)} - {*workers_of(wanted)}}
    going: set[Worker] = set()
    for worker in workers_of(wanted):
        out = {*going, worker}
        if not any(out.issuperset(workers_of(of)) and (len(of) > 1 or table.stage in stay)
                   for table in tables for of in table.holders):
            going = out
    return [name for name in wanted if Process.parse(name).worker in going]


# From reports


def of_report(report: Report) -> Mapping[int, int]:
    """By shard that a process has, the last iteration whose gradient it holds of it."""
    return {} if report.shards is None else report.shards.held


def count_of(names: Iterable[str], reports: Mapping[str, Report]) -> int:
    """The number of shards in these processes' state; 0 if each holds all of it."""
    return max((shards.of for name in names if (shards := reports[name].shards) is not None), default=0)


def tables(parts: Iterable[Sequence[str]], reports: Mapping[str, Report], joined: Iterable[str],
           hosts: Mapping[str, str], leaving: Iterable[str] = ()) -> tuple[ShardTable, ...]:
    """The table of each of ``parts``, processes that have the same parameters and report; ``joined`` come in and have
    nothing yet. ``leaving`` members keep their shards as long as they are there, beside remaining holders, if there are
    any. Every shard must have an owner."""
    parts, joined, found, leavers = [*parts], [*joined], [], {*workers_of(leaving)}
    at = _hosts_of_workers([*(name for names in parts for name in names), *joined], hosts)
    for names in parts:
        count = count_of(names, reports)
        if not count:
            continue
        first = Process.parse(names[0])
        had = tuple(tuple(name for name in names if shard in of_report(reports[name])) for shard in range(count))
        new = [name for name in joined if (Process.parse(name).worker.stage, Process.parse(name).part)
               == (first.worker.stage, first.part)]
        copies = copies_of([reports[names[0]]])
        members = [*names, *new]
        staying = [name for name in members if Process.parse(name).worker not in leavers] or members
        holders = assign(had, staying, {name: at[Process.parse(name).worker] for name in staying}, copies)
        kept = tuple((*of, *(name for name in own if name not in staying)) for of, own in zip(holders, had))
        found.append(ShardTable(first.worker.stage, first.part or 0, had, kept))
    return tuple(found)


def anew(hosts: Mapping[str, str], counts: Mapping[tuple[int, int], int], copies: int) -> tuple[ShardTable, ...]:
    """The tables of processes on ``hosts`` without any shards yet, as when all load a checkpoint; ``counts``: by stage
    and part, the number of shards."""
    at, found = _hosts_of_workers(hosts, hosts), []
    for (stage, part), count in counts.items():
        own = {name: at[process.worker] for name in in_order(hosts)
               if ((process := Process.parse(name)).worker.stage, process.part or 0) == (stage, part)}
        nobody: Holders = ((),) * count
        found.append(ShardTable(stage, part, nobody, assign(nobody, own, own, copies)))
    return tuple(found)


def copies_of(reports: Iterable[Report]) -> int:
    """The wanted number of copies of each shard."""
    return max((report.shards.copies for report in reports if report.shards is not None), default=1)


def lost(parts: Iterable[Sequence[str]], reports: Mapping[str, Report]) -> list[Shard]:
    """The lost shards of ``parts``, processes that have the same parameters and report."""
    found = []
    for names in parts:
        first, had = Process.parse(names[0]), {shard for name in names for shard in of_report(reports[name])}
        found += [Shard(first.worker.stage, first.part or 0, shard)
                  for shard in range(count_of(names, reports)) if shard not in had]
    return found


def told(gone: Sequence[Shard], holders: Mapping[Shard, Sequence[str]] = MappingProxyType({})) -> str:
    """``gone`` as text for users, with its last known ``holders``."""
    by_holders: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for one in gone:
        shards = by_holders.setdefault((one.stage, tuple(in_order(holders.get(one, ())))), [])
        shards += [one.shard] if one.shard not in shards else []
    return "; ".join(f"stage {stage} has lost shard {', '.join(map(str, shards))} of its optimizer state"
                     + f" ({' and '.join(names)} held it)" * bool(names)
                     for (stage, names), shards in by_holders.items())


def _hosts_of_workers(names: Iterable[str], hosts: Mapping[str, str]) -> dict[Worker, frozenset[str]]:
    """The hosts of each worker's parts: the worker is lost with any of them."""
    found: dict[Worker, set[str]] = {}
    for name in names:
        found.setdefault(Process.parse(name).worker, set()).update({hosts[name]} if name in hosts else ())
    return {worker: frozenset(of) for worker, of in found.items()}
