"""Failure domains: the hosts that a job can lose, judged when it begins and can still be started differently. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_recycle.membership.names import Process, workers_of
from megatron_recycle.membership.placement import Placement
from megatron_recycle.membership.shards import ShardTable
from megatron_recycle.plan.grid import Worker

_NAMED = 3
"""Limit of hosts named in a sentence."""


@dataclass(frozen=True)
class FailureDomains:
    """`fatal` has, for each host whose loss would leave a stage without a worker, or a shard of its optimizer's state
    without a holder, these stages; `text` is the message for users."""

    text: str
    fatal: Mapping[str, list[int]] = field(default_factory=dict)


def judge(hosts: Mapping[str, str], coordinator: str = "", guarded: bool = False,
          tables: Sequence[ShardTable] = (), back: bool = True) -> FailureDomains:
    """The consequences of losing each host, for these processes.

    Args:
        hosts: the host of each process, by its name (see `names`). A worker is lost with any part of it.
        coordinator: the coordinator's host; empty if unknown.
        guarded: whether a copy of a stage with one worker is kept elsewhere.
        tables: the holders of shards, where the optimizer's state is cut.
        back: whether the job goes back to a checkpoint of its own where a stage or a shard is lost.
    """
    where = _where(hosts)
    copies = min(len(workers) for workers in where.values())
    if copies < 2 and guarded:
        return FailureDomains("each stage has one worker: one that is lost costs the iterations since the last copy "
                              "(guard)")
    if copies < 2:
        return FailureDomains("each stage has one worker: no failure can be survived. Survivors need two pipelines or "
                              "more")
    all_hosts = sorted(set(hosts.values()))
    if any(len(of) < 2 for table in tables for of in table.holders):
        cost = ("any failure costs the iterations since the last checkpoint, and ends a job that has written none"
                if back else "no failure can be survived")
        return FailureDomains(f"each shard of the optimizer's state has one holder (state_copies 1): {cost} (a worker "
                              "that is asked to leave hands its shards over first). With 2 or more the others go on",
                              {host: [*of] for host, of in _last_holders(where, tables).items()})
    if len(all_hosts) == 1:
        return FailureDomains(f"all workers are on host {_shown(all_hosts, all_hosts)}, whose loss ends the job")
    fatal = _fatal(where)
    lost = {host: left for host, of in _last_holders(where, tables).items()
            if (left := {stage: shards for stage, shards in of.items() if stage not in fatal.get(host, [])})}
    if fatal or lost:
        found = {host: sorted([*fatal.get(host, []), *lost.get(host, {})]) for host in sorted({*fatal, *lost})}
        of_hosts = [f"{_shown([host], all_hosts)} has {what}" for host in found
                    for what in _what(fatal.get(host, []), lost.get(host, {}), copies)]
        held = "; ".join(of_hosts[:_NAMED]) + f"; and {len(of_hosts) - _NAMED} hosts more" * (len(of_hosts) > _NAMED)
        advice = "" if not fatal else _advice(where, len(hosts), len(all_hosts), copies)
        advice += " Give a larger state_copies, or start all parts of a worker on one host" if lost else ""
        return FailureDomains(f"warning: losing one host can end the job: {held}.{advice}", found)
    but = f" but {_shown([coordinator], all_hosts)}, where the coordinator is" if coordinator in all_hosts else ""
    return FailureDomains(f"survives the loss of any one host{but}")


def exposed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[int]]:
    """By host that has all workers (two or more) of some stages ``now`` and had not ``before``, these stages."""
    where, fatal = _where(now), _fatal(_where(before))
    found = {host: [stage for stage in stages if len(where[stage]) > 1 and stage not in fatal.get(host, [])]
             for host, stages in _fatal(where).items()}
    return {host: stages for host, stages in found.items() if stages}


def exposed_shards(before: Mapping[str, str], tables_before: Sequence[ShardTable], now: Mapping[str, str],
                   tables: Sequence[ShardTable]) -> dict[str, dict[str, list[int]]]:
    """By host with a part of all holders (two or more) of a shard ``now`` and not ``before``: by stage these shards.
    Stages that have all workers on one host are left to `exposed`."""
    where, known = _where(now), _last_holders(_where(before), tables_before)
    whole = {(host, stage) for host, stages in _fatal(where).items() for stage in stages}
    single = {(table.stage, shard) for table in tables for shard, of in enumerate(table.holders) if len(of) < 2}
    found = {host: {str(stage): left for stage, shards in of.items() if (host, stage) not in whole
                    and (left := [shard for shard in shards if shard not in known.get(host, {}).get(stage, [])
                                  and (stage, shard) not in single])}
             for host, of in _last_holders(where, tables).items()}
    return {host: of for host, of in found.items() if of}


Where = Mapping[int, Mapping[int, set[str]]]
"""Stage -> pipeline -> the hosts of the worker's parts."""


def _where(hosts: Mapping[str, str]) -> Where:
    where: dict[int, dict[int, set[str]]] = {}
    for name, host in hosts.items():
        worker = Process.parse(name).worker
        where.setdefault(worker.stage, {}).setdefault(worker.pipeline, set()).add(host)
    return where


def _fatal(where: Where) -> dict[str, list[int]]:
    """By host whose loss would leave a stage without a worker, these stages."""
    hosts = sorted({host for workers in where.values() for parts in workers.values() for host in parts})
    return {host: stages for host in hosts
            if (stages := [stage for stage, workers in sorted(where.items())
                           if all(host in parts for parts in workers.values())])}


def _what(stages: Sequence[int], shards: Mapping[int, Sequence[int]], copies: int) -> list[str]:
    """A host's sole copies, in words."""
    found = [f"all {copies} copies of stage {', '.join(map(str, stages))}"] if stages else []
    return found + [f"a part of each worker that holds shard {', '.join(map(str, of))} of stage {stage}'s optimizer "
                    "state" for stage, of in shards.items()]


def _advice(where: Where, processes: int, hosts: int, copies: int) -> str:
    """How to start so that no host has all copies of a stage."""
    most = (copies - 1) * (processes // sum(map(len, where.values())))
    order = ("Count the ranks through a pipeline first (--recycle-placement spread; in a topology of your own: the "
             "axes data, pipe), or start" if _order_helps(where, processes, hosts) else "Start")
    return f" {order} at most {most} workers on each host (--nproc), on more hosts"


def _last_holders(where: Where, tables: Sequence[ShardTable]) -> dict[str, dict[int, list[int]]]:
    """By host whose loss would leave a shard without a holder: by stage, these shards."""
    found: dict[str, dict[int, list[int]]] = {}
    for host in sorted({host for workers in where.values() for parts in workers.values() for host in parts}):
        lost = {Worker(pipeline, stage) for stage, workers in where.items()
                for pipeline, parts in workers.items() if host in parts}
        for table in tables:
            gone = [shard for shard, of in enumerate(table.holders) if lost.issuperset(workers_of(of))]
            if gone:
                shards = found.setdefault(host, {}).setdefault(table.stage, [])
                shards += [shard for shard in gone if shard not in shards]
    return found


def _order_helps(where: Where, processes: int, hosts: int) -> bool:
    """Whether no host would have all copies of a stage if ranks were counted in another order."""
    pipelines = len(where[0])
    grid = Placement(len(where), pipelines, processes // (len(where) * pipelines), -(-processes // hosts))
    return not grid.fatal(spread=True)


def _shown(hosts: list[str], among: list[str]) -> str:
    """Host names for users: with the launcher's number only where several share a name."""
    plain = [host.rpartition("/")[0] or host for host in among]
    named = (host.rpartition("/")[0] or host for host in hosts)
    return ", ".join(name if plain.count(name) == 1 else host for name, host in zip(named, hosts))
