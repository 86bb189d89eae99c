"""Cuts network namespaces that stand for hosts off from each other. Needs root and iproute2.

What a host sends to an address is lost by giving that address a link-layer address that nobody has: no error comes
back, as with a real cut, and the other direction is left alone.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from megatron_recycle.chaos.job import ChaosError, TargetJob, environment
from megatron_recycle.chaos.orders import Order

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


def lose(namespace: str | None, targets: Iterable[str]) -> None:
    """What `namespace` sends to these addresses is lost from now on."""
    for device in set(addresses(namespace).values()):
        for target in targets:
            ip(namespace, "neighbour", "replace", target, "lladdr", _NOBODY, "dev", device, "nud", "permanent")


def find(namespace: str | None) -> None:
    """Undo `lose` for all addresses."""
    for device in set(addresses(namespace).values()):
        ip(namespace, "neighbour", "flush", "dev", device, "nud", "permanent")


def set_link(namespace: str, up: bool) -> None:
    """Take the devices of a namespace up or down."""
    for device in sorted(set(addresses(namespace).values())):
        ip(namespace, "link", "set", device, "up" if up else "down")


def cut(job: TargetJob, order: Order) -> None:
    """Carry out `partition`. Raises ChaosError if a host is not a namespace in which workers of the job run."""
    ours = namespaces_of(job)
    _check(job, (*order.hosts, *order.others), ours)
    if order.link:
        for host in order.hosts:
            set_link(host, False)
        return
    others = order.others or tuple(sorted(ours - set(order.hosts)))
    theirs = [address for other in others for address in addresses(other)]
    if not order.others:
        theirs += _control_address(job, order.hosts, theirs)
    own = [address for host in order.hosts for address in addresses(host)]
    for host in order.hosts:
        lose(host, theirs)
    if not order.one_way:
        for other in others:
            lose(other, own)


def heal(job: TargetJob, hosts: Iterable[str]) -> None:
    """Undo every `partition` between these hosts and all others of the job."""
    ours = namespaces_of(job)
    _check(job, hosts, ours)
    for host in hosts:
        set_link(host, True)
    for host in sorted(ours):
        find(host)


def namespaces_of(job: TargetJob) -> set[str]:
    """Names of the network namespaces in which live workers of the job run."""
    if not _NAMESPACES.is_dir():
        return set()
    names = {(entry.stat().st_dev, entry.stat().st_ino): entry.name for entry in _NAMESPACES.iterdir()}
    found = set()
    for worker in job.workers:
        try:
            with job.held(worker):
                status = Path(f"/proc/{job.workers[worker].pid}/ns/net").stat()
        except (ChaosError, OSError):
            continue  # it has ended
        if (status.st_dev, status.st_ino) in names:
            found.add(names[status.st_dev, status.st_ino])
    return found


def _check(job: TargetJob, hosts: Iterable[str], ours: set[str]) -> None:
    for host in hosts:
        if host not in ours:
            raise ChaosError(f"no worker of the job in {job.run_dir} runs in a network namespace {host!r}; its "
                             f"namespaces: {', '.join(sorted(ours)) or 'none'}")


def _control_address(job: TargetJob, hosts: Iterable[str], known: Iterable[str]) -> list[str]:
    """The coordinator's address, if it is on none of the known hosts."""
    for worker in job.workers:
        try:
            with job.held(worker):
                control = environment(job.workers[worker].pid).get("RECYCLE_COORDINATOR", "")
        except (ChaosError, OSError):
            continue
        host = control.rpartition(":")[0]
        inside = {address for name in hosts for address in addresses(name)}
        return [host] if host and host not in known and host not in inside else []
    return []
