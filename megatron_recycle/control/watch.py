"""All detectors of one coordinator behind one clock: silence, stuck workers, and waits of everybody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.membership.detectors import Doing, HangUps, Heartbeats, Hosts, Stalls
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.state import Member


@dataclass(frozen=True)
class Findings:
    """The findings of a tick, by incarnation; times are the caller's clock."""

    lost: Mapping[str, FailureKind] = field(default_factory=dict)
    """Kind of failure of those that are to be declared out, in one decision."""
    since: float = 0.0
    """When the first of them was last well, or when the last one began to wait."""
    waiting: Mapping[str, Doing] | None = None
    """The wait of each process, if nobody is at fault and nothing moves."""


class Watch:
    """Fed by the coordinator with each arrival; `tick` judges the arrivals that are missing.

    Args:
        interval, timeout: of the heartbeats, in seconds.
    """

    def __init__(self, interval: float, timeout: float) -> None:
        self._heartbeats: Heartbeats[str] = Heartbeats(timeout)
        self._hosts: Hosts[str] = Hosts(interval)
        self._stalls: Stalls[str] = Stalls(interval)
        self._hang_ups: HangUps[str] = HangUps()
        self._where: Mapping[str, str] = {}
        self._left: tuple[str, Mapping[str, float]] = "", {}
        """A host on which all have been silent for longer than they were watched, and when that began."""

    def members(self, members: Iterable[Member], others: Iterable[Member], interval: float, timeout: float,
                now: float) -> None:
        """Watch exactly these. A joiner or a stranded process only has to live; nobody waits for it."""
        training = {member.incarnation: member.host for member in members}
        hosts = {**training, **{member.incarnation: member.host for member in others}}
        self._heartbeats.timeout = timeout
        self._hosts.interval = self._stalls.interval = interval
        self._where = hosts
        self._heartbeats.watch(hosts, now)
        self._hosts.watch(hosts)
        self._hang_ups.watch(hosts)
        self._stalls.watch(training)

    def left(self, node: str, since: float) -> None:
        """The coordinator before this one was on the host of this number, and has been silent since. So is that whole
        host until one of its processes comes: then all of them have as much time to come as anybody has."""
        hosts = {host for host in self._where.values() if host.rpartition("/")[2] == node}
        if len(hosts) == 1:
            (host,) = hosts
            watched = {key: at for key, at in self._heartbeats.seen.items() if self._where[key] == host}
            self._left = host, watched
            self._heartbeats.last_heard(dict.fromkeys(watched, since))

    def _lives(self, host: str | None) -> None:
        if host == self._left[0]:
            seen = self._heartbeats.seen
            self._heartbeats.last_heard({key: max(at, seen.get(key, at)) for key, at in self._left[1].items()})
            self._left = "", {}

    def came(self, incarnation: str) -> None:
        """A worker has a connection, maybe another one."""
        self._lives(self._where.get(incarnation))
        self._hang_ups.came(incarnation)

    def hung_up(self, incarnation: str, now: float) -> None:
        """A worker's last connection has ended."""
        self._hang_ups.gone(incarnation, now)

    def launcher_came(self, host: str) -> None:
        self._lives(host)
        self._hang_ups.launcher_came(host)

    def launcher_hung_up(self, host: str, now: float) -> None:
        self._hang_ups.launcher_gone(host, now)

    def beat(self, incarnation: str, now: float) -> None:
        """Any message of a worker."""
        self._heartbeats.beat(incarnation, now)

    def told(self, incarnation: str, progress: Mapping[str, Any] | None, now: float) -> None:
        """A heartbeat says what the worker's training thread does."""
        self._stalls.heard(incarnation, Doing.of(progress), now)

    def launcher_beat(self, host: str, now: float) -> None:
        """Any message of a host's launcher."""
        self._hosts.launcher_beat(host, now)

    def tick(self, now: float) -> Findings:
        before = self._heartbeats.restarts
        silent = self._heartbeats.tick(now)
        if self._heartbeats.restarts > before:
            self._stalls.restart(now)
            self._hosts.restart(now)
        lost = self._hosts.judge(silent, self._heartbeats.seen, self._heartbeats.timeout, now)
        since = {key: silent[key] for key in lost}
        for key, at in self._hang_ups.tick(now).items():
            lost.setdefault(key, FailureKind.UNREACHABLE)
            since.setdefault(key, at)
        stalled = {key: at for key, at in self._stalls.stalled(now).items() if key not in silent and key not in lost}
        if lost or stalled:
            found = {**lost, **dict.fromkeys(stalled, FailureKind.STALLED)}
            return Findings(found, min([*since.values(), *stalled.values()]))
        waiting = None if silent else self._stalls.all_wait(now)
        return Findings() if waiting is None else Findings(since=now - _shortest(waiting), waiting=waiting)


def _shortest(waiting: Mapping[str, Doing]) -> float:
    return min(doing.for_s for doing in waiting.values())
