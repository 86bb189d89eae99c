"""Network namespaces as hosts, joined by a bridge. Whatever happens to a test, its namespaces go away: with the test,
or, if its process was killed, with the next one that needs some."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_OURS = re.compile(r"rch(\d+)([a-z])\d+$")


@dataclass(frozen=True)
class Hosts:
    """`names` of the namespaces, their `addresses` on `eth0`, and the bridge's `address` outside of all of them."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    address: str


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)


def enter(name: str) -> None:
    """Move the calling thread, and those it starts from now on, to a namespace."""
    with Path("/run/netns", name).open() as namespace:
        if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")


@contextmanager
def hosts(count: int, ipv6: bool = False) -> Iterator[Hosts]:
    """`count` namespaces on a bridge; with ``ipv6`` they have addresses of that kind alone, but for loopback. Skips the
    test, saying why, where that is not possible."""
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (iproute2) to make network namespaces")
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    _sweep()
    me = f"{os.getpid()}{_free_letter()}"
    net = f"10.{64 + os.getpid() % 128}.{(os.getpid() // 128 + 31 * ord(me[-1])) % 256}"
    between = "." if not ipv6 else "::"
    net = net if not ipv6 else f"fd00:{net.replace('.', ':')}"
    made = Hosts(tuple(f"rch{me}{number}" for number in range(count)),
                 tuple(f"{net}{between}{number + 1}" for number in range(count)), f"{net}{between}254")
    try:
        reason = _build(made, f"rcb{me}")
        if reason is not None:
            pytest.skip(f"network namespaces are not permitted here: {reason}")
        yield made
    finally:
        _remove(me, made.names)


def _build(made: Hosts, bridge: str) -> str | None:
    """Why it cannot be done; None if it is."""
    mask = "/64 nodad" if ":" in made.address else "/24"
    steps = [f"link add {bridge} type bridge", f"address add {made.address}{mask} dev {bridge}",
             f"link set {bridge} up"]
    for name, address in zip(made.names, made.addresses):
        port = name.replace("rch", "rcv")
        steps += [f"netns add {name}", f"link add {port} type veth peer name eth0 netns {name}",
                  f"link set {port} master {bridge} up", f"-n {name} address add {address}{mask} dev eth0",
                  f"-n {name} link set eth0 up", f"-n {name} link set lo up"]
    for step in steps:
        done = ip(*step.split())
        if done.returncode != 0:
            return f"ip {step}: {done.stderr.strip()}"
    return None


def _free_letter() -> str:
    """Of the sets of hosts that this process has at a time."""
    taken = {entry.name for entry in Path("/sys/class/net").iterdir()}
    return next(letter for letter in "abcdefgh" if f"rcb{os.getpid()}{letter}" not in taken)


def _remove(owner: str, names: tuple[str, ...] | list[str]) -> None:
    for name in names:
        ip("netns", "del", name)
    ip("link", "del", f"rcb{owner}")


def _sweep() -> None:
    """Remove what a killed test process has left."""
    left: dict[str, list[str]] = {}
    folder = Path("/run/netns")
    for name in os.listdir(folder) if folder.is_dir() else ():
        if (found := _OURS.match(name)) is not None and not Path("/proc", found[1]).exists():
            left.setdefault(found[1] + found[2], []).append(name)
    for owner, names in left.items():
        _remove(owner, names)
