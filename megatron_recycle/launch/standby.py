"""Coordinators that stand by on every host: who holds the lease in a shared store leads; see `control.elected`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

from megatron_recycle.control.etcd import Access, Place
from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.launch.coordinator_process import Answer, Service, answer
from megatron_recycle.launch.reachability import own_address

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


def check_store(store: str, job: str) -> None:
    """Raises ConfigError."""
    if Place.parse(store).scheme == "https":
        Access.read(os.environ).context()
    if not _NAME.fullmatch(job):
        raise ConfigError(f"--job {job!r} names no job: with --store give a name that no other job has there (letters, "
                          "digits, dots, dashes), the same on each host")


def address(store: str, given: str | None) -> str:
    """Where this host's coordinator listens: ``given``, or the address from which the store's members are reached."""
    return given or own_address([host for host, _ in Place.parse(store).members]) or "127.0.0.1"


def meet(made: Service, limit: float, say: Callable[[str], None]) -> str:
    """Wait until the coordinators of all hosts will listen; returns where, "host:port,host:port".

    Raises:
        RecycleError: it did not start, or the other hosts do not come within ``limit`` seconds. It is ended then.
    """
    made.standby, hosts = True, made.spec.hosts
    say(f"recycle: this host's coordinator is at {made.control} when it leads; waiting for those of {hosts} hosts")
    said, until, why = Answer(waits=""), time.monotonic() + limit, ""
    while said.waits is not None:
        if said.waits:
            why = f" ({said.waits})"
            say(f"recycle: still waiting: {said.waits}")
        said = answer(made.child, until - time.monotonic())
    if not said.all:
        made.kill()
        late = (f"not all of {hosts} hosts have come to {made.spec.store} within {limit:.0f} s{why}; see "
                f"{made.child.log}")
        raise RecycleError(f"the coordinator did not start: {said.error}" if said.error is not None else late)
    return said.all
