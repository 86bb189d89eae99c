"""The coordinator's clocks: ticking detectors (silence, stuck workers, waits of all), and timeouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.control.leader_election import LEASE_S
from megatron_recycle.control.sockets import FOUND_S
from megatron_recycle.membership.description import Job
from megatron_recycle.membership.detectors import Doing, HangUps, Heartbeats, Hosts, Stalls
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Input, Interrupted, Loss, Lost, Stuck
from megatron_recycle.membership.state import Member, Phase, State


@dataclass(frozen=True)
class Timeouts:
    """Timeouts, in seconds. A description that has one of the first three overrides it when training begins."""

    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 10.0
    report_timeout: float = 30.0
    start_timeout: float = 600.0
    save_timeout: float = 600.0
    hello_timeout: float = 5.0

    @property
    def detection(self) -> float:
        """The time within which any failure of a process or host is detected."""
        return self.heartbeat_timeout + 3 * self.heartbeat_interval

    def overridden(self, job: Job) -> Timeouts:
        """These, overridden by the ``job``'s."""
        names = ("heartbeat_interval", "heartbeat_timeout", "report_timeout")
        return Timeouts(**{**vars(self), **{n: wanted for n in names if (wanted := getattr(job, n))}})


@dataclass(frozen=True)
class Findings:
    """The findings of a tick, by incarnation; times are the caller's clock."""

    lost: Mapping[str, FailureKind] = field(default_factory=dict)
    """Kind of failure of each process to be declared out, in one decision."""
    since: float = 0.0
    """When the first of them was last well, or when the last one began to wait."""
    waiting: Mapping[str, Doing] | None = None
    """The wait of each process, if all wait and none has failed."""


class Watch:
    """Failure detectors, fed with each arrival; `tick` judges the missing ones.
    """

    def __init__(self, interval: float, timeout: float) -> None:
        self._heartbeats: Heartbeats[str] = Heartbeats(timeout)
        self._hosts: Hosts[str] = Hosts(interval)
        self._stalls: Stalls[str] = Stalls(interval)
        self._hang_ups: HangUps[str] = HangUps()
        self._where: Mapping[str, str] = {}
        self._left: tuple[str, Mapping[str, float]] = "", {}
        """A host whose processes have all been silent for longer than they were watched, and since when."""

    def members(self, members: Iterable[Member], others: Iterable[Member], interval: float, timeout: float,
                now: float) -> None:
        """Watch exactly these. A joiner or a stranded process only has to live; no worker waits for it."""
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
        """The previous coordinator was on the host of this number, and has been silent since. The whole host counts as
        silent since then, until one of its processes comes: then all of them get the usual time to come."""
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
        """A worker has a (new) connection."""
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
        """Any message of a worker has come."""
        self._heartbeats.beat(incarnation, now)

    def told(self, incarnation: str, progress: Mapping[str, Any] | None, now: float) -> None:
        """A heartbeat has the activity of the worker's training thread."""
        self._stalls.heard(incarnation, Doing.of(progress), now)

    def launcher_beat(self, host: str, now: float) -> None:
        """Any message of a host's launcher has come."""
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
        if waiting is None:
            return Findings()
        return Findings(since=now - min(doing.for_s for doing in waiting.values()), waiting=waiting)


class Clocks:
    """Inputs from the passing of time, in an event loop.

    Args:
        feed: takes the inputs.
        state: the job's present state.
    """

    def __init__(self, timeouts: Timeouts, feed: Callable[[Input], None], state: Callable[[], State]) -> None:
        self.timeouts = timeouts
        self.watch = Watch(timeouts.heartbeat_interval, timeouts.heartbeat_timeout)
        self._feed = feed
        self._state = state
        self._stopped = False

    def start(self) -> None:
        """Tick from now on, in the running event loop."""
        asyncio.get_running_loop().call_later(self.timeouts.start_timeout, self._start_late)
        self._tick()

    def stop(self) -> None:
        """No further tick."""
        self._stopped = True

    def new_generation(self, state: State) -> None:
        """Watch exactly the processes of ``state``, with its own limits; earlier reports of their work are void."""
        if state.description is not None:
            self.timeouts = self.timeouts.overridden(state.description)
        self.watch_all(state)

    def watch_all(self, state: State) -> None:
        """Watch exactly the processes of ``state``."""
        others = (*state.arrivals.joiners.values(), *state.absent.stranded.values())
        interval, timeout = self.timeouts.heartbeat_interval, self.timeouts.heartbeat_timeout
        self.watch.members(state.members.values(), others, interval, timeout, time.monotonic())

    def follow(self, node: str) -> None:
        """The previous coordinator was on the host of this number, and its lease has ended. If the host was lost with
        it, the host has been silent as long, although this coordinator has seen little of that."""
        since = min(LEASE_S, self.timeouts.heartbeat_timeout - FOUND_S)
        if since > 0:
            self.watch.left(node, time.monotonic() - since)

    def after(self, seconds: float, happened: Input) -> None:
        """Feed this input after so many seconds."""
        asyncio.get_running_loop().call_later(seconds, self._feed, happened)

    def _tick(self) -> None:
        if self._stopped or self._state().phase is Phase.ENDED:
            return
        pace = min(0.5, max(0.05, self.timeouts.heartbeat_interval / 2))
        asyncio.get_running_loop().call_later(pace, self._tick)
        now = time.monotonic()
        found = self.watch.tick(now)
        since = time.time() - (now - found.since)
        if found.lost:
            self._feed(Lost(tuple(Loss(incarnation, kind) for incarnation, kind in found.lost.items()), since))
        elif found.waiting is not None:
            state = self._state()
            waiting = {state.known[key].worker: doing.what for key, doing in found.waiting.items()}
            self._feed(Stuck(state.generation, waiting, since))

    def _start_late(self) -> None:
        state = self._state()
        if state.phase is not Phase.FORMING:
            return
        ready = {member.rank for member in state.known.values() if member.worker in state.forming.descriptions}
        missing = ", ".join(str(rank) for rank in range(state.size) if rank not in ready)
        limit = f"{self.timeouts.start_timeout:.0f} s"
        self._feed(Interrupted(1, f"not ready within {limit}: rank {missing}; see their logs", again=True))
