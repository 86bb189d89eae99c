"""The hosts that a job can lose, judged when it begins, while it can still be started in another way. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_recycle.membership.names import Process
from megatron_recycle.membership.placement import Placement

_NAMED = 3
"""Hosts that a sentence names."""


@dataclass(frozen=True)
class Survival:
    """`fatal` has, for each host whose loss would leave a stage without a worker, these stages; `text` says it to
    people."""

    text: str
    fatal: Mapping[str, list[int]] = field(default_factory=dict)


def judge(hosts: Mapping[str, str], coordinator: str = "", guarded: bool = False) -> Survival:
    """The consequences of losing each host, for these processes.

    Args:
        hosts: where each process is, by its name (see `names`). A worker is lost with any part of it.
        coordinator: the host that the coordinator is on; empty if nobody knows.
        guarded: whether a copy of a stage with one worker is kept elsewhere.
    """
    where = _where(hosts)
    copies = min(len(workers) for workers in where.values())
    if copies < 2 and guarded:
        return Survival("each stage has one worker: one that is lost costs the iterations since the last copy (guard)")
    if copies < 2:
        return Survival("each stage has one worker: no failure can be survived. Survivors need two pipelines or more")
    all_hosts = sorted(set(hosts.values()))
    if len(all_hosts) == 1:
        return Survival(f"all workers are on host {_shown(all_hosts, all_hosts)}, whose loss ends the job")
    if fatal := _fatal(where):
        parts = len(hosts) // sum(map(len, where.values()))
        most = (copies - 1) * parts
        held = "; ".join(f"{_shown([host], all_hosts)} has all {copies} copies of stage {', '.join(map(str, stages))}"
                         for host, stages in [*fatal.items()][:_NAMED])
        held += f"; and {len(fatal) - _NAMED} hosts more" * (len(fatal) > _NAMED)
        order = ("Count the ranks through a pipeline first (--recycle-placement spread; in a topology of your own: the "
                 "axes data, pipe), or start" if _order_helps(where, len(hosts), len(all_hosts)) else "Start")
        return Survival(f"warning: losing one host can end the job: {held}. {order} at most {most} workers on each "
                        "host (--nproc), on more hosts", fatal)
    but = f" but {_shown([coordinator], all_hosts)}, where the coordinator is" if coordinator in all_hosts else ""
    return Survival(f"survives the loss of any one host{but}")


def exposed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[int]]:
    """The hosts that have all workers of a stage ``now``, two or more, and had not ``before``, with these stages."""
    where, fatal = _where(now), _fatal(_where(before))
    found = {host: [stage for stage in stages if len(where[stage]) > 1 and stage not in fatal.get(host, [])]
             for host, stages in _fatal(where).items()}
    return {host: stages for host, stages in found.items() if stages}


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


def _order_helps(where: Where, processes: int, hosts: int) -> bool:
    """Whether no host would have all copies of a stage if ranks were counted in another order."""
    pipelines = len(where[0])
    grid = Placement(len(where), pipelines, processes // (len(where) * pipelines), -(-processes // hosts))
    return not grid.fatal(spread=True)


def _shown(hosts: list[str], among: list[str]) -> str:
    """As the user knows them: the launcher's number behind a name only where several have that name."""
    plain = [host.rpartition("/")[0] or host for host in among]
    named = (host.rpartition("/")[0] or host for host in hosts)
    return ", ".join(name if plain.count(name) == 1 else host for name, host in zip(named, hosts))
