"""Cuts between network namespaces that stand for hosts. Needs root and iproute2.

A cut gives an address of the other host an unused link-layer address. Packets to it are lost without an error, as with
a real cut, and the other direction stays open. `Cuts` records each cut for its undoing, since by then the workers
behind it may have ended.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megatron_recycle.observe.events import read_events
from megatron_recycle.tools.chaos.orders import Order
from megatron_recycle.tools.chaos.target_job import ChaosError, TargetJob, launched_as

Fact = TypeVar("Fact")
_NAMESPACES = Path("/run/netns")
_NOBODY = "02:00:00:00:00:01"


def ip(namespace: str | None, *words: str) -> str:
    """Run `ip` in a namespace (None: this process's); returns its output. Raises ChaosError."""
    command = ["ip", *(["-n", namespace] if namespace else []), *words]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChaosError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise ChaosError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def addresses(namespace: str | None) -> dict[str, str]:
    """IPv4 address -> device of a namespace, without loopback."""
    found = json.loads(ip(namespace, "-j", "-4", "address"))
    return {address["local"]: device["ifname"] for device in found if device.get("ifname") not in (None, "lo")
            for address in device["addr_info"]}


@dataclass
class Cuts:
    """Changes of the network: (namespace, device) of links taken down, (namespace, device, address) of cut paths. A
    change is recorded before it is made, so that an interrupted one is undone too."""

    links: list[tuple[str, str]] = field(default_factory=list)
    ways: list[tuple[str, str, str]] = field(default_factory=list)

    def namespaces(self) -> set[str]:
        """Namespaces with recorded cuts that are still there."""
        named = {namespace for namespace, *_ in (*self.links, *self.ways)}
        return {name for name in named if (_NAMESPACES / name).exists()}

    def undo(self) -> list[str]:
        """Undo all of it; returns the cuts that could not be undone. A namespace that is gone has no cuts any more."""
        present, left = self.namespaces(), []
        for namespace, device in self.links:
            if namespace in present:
                left += _failure(namespace, "link", "set", device, "up")
        for namespace, device, address in self.ways:
            if namespace in present and (address, device) in _lost(namespace):
                left += _failure(namespace, "neighbour", "del", address, "dev", device)
        return left


def recorded(run_dir: Path) -> Cuts:
    """All cuts that were made in the job of this folder, healed or not."""
    cuts = Cuts()
    path = run_dir / "chaos.jsonl"
    for event in read_events(path) if path.exists() else ():
        record: Mapping[str, Sequence[Sequence[str]]] = event.get("cuts", {})
        cuts.links += [(one[0], one[1]) for one in record.get("links", ())]
        cuts.ways += [(one[0], one[1], one[2]) for one in record.get("ways", ())]
    return cuts


def lose(namespace: str | None, targets: Iterable[str], cuts: Cuts | None = None) -> None:
    """Cut the path from `namespace` to these addresses. A path that is cut already is left out of `cuts`."""
    lost = _lost(namespace)
    for device in sorted(set(addresses(namespace).values())):
        for target in targets:
            if (target, device) in lost:
                continue
            if cuts is not None and namespace is not None:
                cuts.ways.append((namespace, device, target))
            ip(namespace, "neighbour", "replace", target, "lladdr", _NOBODY, "dev", device, "nud", "permanent")


def find(namespace: str | None) -> None:
    """Undo `lose` for all addresses."""
    for address, device in _lost(namespace):
        ip(namespace, "neighbour", "del", address, "dev", device)


def set_link(namespace: str, up: bool, cuts: Cuts | None = None) -> None:
    """Take the devices of a namespace up or down."""
    for device in sorted(set(addresses(namespace).values())):
        if cuts is not None:
            cuts.links.append((namespace, device))
        ip(namespace, "link", "set", device, "up" if up else "down")


def cut(job: TargetJob, order: Order, cuts: Cuts) -> None:
    """Carry out `partition`, and record it in `cuts`.

    Raises ChaosError if a host is not a namespace in which workers of the job run.
    """
    ours = namespaces_of(job)
    _check(job, (*order.hosts, *order.others), ours)
    if order.link:
        for host in order.hosts:
            set_link(host, False, cuts)
        return
    others = order.others or tuple(sorted(ours - set(order.hosts)))
    theirs = [address for other in others for address in addresses(other)]
    if not order.others:
        theirs += _control_address(job, order.hosts, theirs)
    own = [address for host in order.hosts for address in addresses(host)]
    for host in order.hosts:
        lose(host, theirs, cuts)
    if not order.one_way:
        for other in others:
            lose(other, own, cuts)


def heal(job: TargetJob, hosts: Iterable[str]) -> None:
    """Undo every `partition` between these hosts and all others of the job, also where no worker lives any more."""
    ours = namespaces_of(job) | recorded(job.run_dir).namespaces()
    _check(job, hosts, ours)
    for host in hosts:
        set_link(host, True)
    for host in sorted(ours):
        find(host)


def _lost(namespace: str | None) -> list[tuple[str, str]]:
    """(address, device) of the paths that `lose` has cut there."""
    found = json.loads(ip(namespace, "-j", "neighbour", "show", "nud", "permanent") or "[]")
    return [(entry["dst"], entry["dev"]) for entry in found if entry.get("lladdr") == _NOBODY]


def _failure(namespace: str, *words: str) -> list[str]:
    try:
        ip(namespace, *words)
    except ChaosError as error:
        return [str(error)]
    return []


def namespaces_of(job: TargetJob) -> set[str]:
    """Names of the network namespaces in which live workers of the job run."""
    if not _NAMESPACES.is_dir():
        return set()
    names = {(entry.stat().st_dev, entry.stat().st_ino): entry.name for entry in _NAMESPACES.iterdir()}
    inside = _of_live(job, lambda pid: Path(f"/proc/{pid}/ns/net").stat())
    return {names[status.st_dev, status.st_ino] for status in inside if (status.st_dev, status.st_ino) in names}


def _of_live(job: TargetJob, look: Callable[[int], Fact]) -> Iterator[Fact]:
    """The fact that ``look`` finds for each live worker's process."""
    for worker in job.workers:
        try:
            with job.held(worker):
                found = look(job.workers[worker].pid)
        except (ChaosError, OSError):
            continue  # it has ended
        yield found


def _check(job: TargetJob, hosts: Iterable[str], ours: set[str]) -> None:
    for host in hosts:
        if host not in ours:
            raise ChaosError(f"no worker of the job in {job.run_dir} runs in a network namespace {host!r}; its "
                             f"namespaces: {', '.join(sorted(ours)) or 'none'}")


def _control_address(job: TargetJob, hosts: Iterable[str], known: Iterable[str]) -> list[str]:
    """The coordinator's address, if it is on none of the known hosts."""
    launched = next(_of_live(job, launched_as), None)
    host = (launched.control or "").rpartition(":")[0] if launched is not None else ""
    inside = {address for name in hosts for address in addresses(name)}
    return [host] if host and host not in known and host not in inside else []
