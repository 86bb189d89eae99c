"""Failure suspicions from timing alone. Times are arguments, so that tests need no waiting."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

from msgspec.structs import force_setattr

from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.plan.value import Value

Key = TypeVar("Key", bound=Hashable)


class Heartbeats(Generic[Key]):
    """Finds processes that have been silent for longer than `timeout` seconds.

    The caller ticks at a steady pace. If the caller itself stood still (paused, or starved of processor time),
    heartbeats may wait unread, so all timers restart before any process is suspected.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._seen: dict[Key, float] = {}
        self._ticked: float | None = None
        self.restarts = 0

    def watch(self, keys: Iterable[Key], now: float) -> None:
        """Watch exactly these; a newly watched one counts as just heard of."""
        self._seen = {key: self._seen.get(key, now) for key in keys}

    @property
    def seen(self) -> Mapping[Key, float]:
        """When each was last heard of."""
        return self._seen

    def beat(self, key: Key, now: float) -> None:
        if key in self._seen:
            self._seen[key] = now

    def last_heard(self, moments: Mapping[Key, float]) -> None:
        """Set these as the last times heard of."""
        self._seen.update({key: at for key, at in moments.items() if key in self._seen})

    def tick(self, now: float) -> dict[Key, float]:
        """The silent ones, and when each was last heard of."""
        stood_still = self._ticked is not None and now - self._ticked > self.timeout / 2
        self._ticked = now
        if stood_still:
            self.restarts += 1
            self._seen = dict.fromkeys(self._seen, now)
        return {key: seen for key, seen in self._seen.items() if now - seen > self.timeout}


class ThreadState(str, Enum):
    """The state of a training thread."""

    WORKING = "working"
    WAITING = "waiting"
    """For other workers."""
    STANDING_BY = "standing by"
    """Its script has ended well."""
    OUTSIDE = "outside"
    """The script's own code."""

    def __str__(self) -> str:
        return self.value


class SignOfLife(Value, frozen=True):
    """The parts of a worker's heartbeat that the coordinator reads: what its training thread is `doing`, and whether
    its script has a handler of SIGTERM."""

    doing: Any = None
    sigterm: Any = False


class Doing(Value, frozen=True):
    """The work or wait of a training thread, as its worker reported it: `for_s` seconds of at most `limit_s` (None: no
    limit)."""

    state: ThreadState
    what: str
    number: int
    for_s: float
    limit_s: float | None

    def __post_init__(self) -> None:
        force_setattr(self, "what", self.what[:40])

    @classmethod
    def of(cls, progress: Mapping[str, Any] | None) -> Doing | None:
        """From a heartbeat's progress."""
        return None if progress is None else cls.read(SignOfLife.from_json(progress).doing)

    @classmethod
    def read(cls, report: Any) -> Doing | None:
        """From a heartbeat; None if it cannot be parsed."""
        try:
            return cls.from_json(report)
        except ValueError:
            return None

    @property
    def waits(self) -> bool:
        return self.state in (ThreadState.WAITING, ThreadState.STANDING_BY)

    @property
    def too_long(self) -> bool:
        return self.limit_s is not None and self.for_s > self.limit_s


class Stalls(Generic[Key]):
    """Finds workers stuck inside their own work while their heartbeats go on, and the case that all workers wait.

    A worker is never stalled while it waits for others or runs the script's own code. Only the contents of heartbeats
    count, never the time since: missing heartbeats are the business of `Heartbeats`.

    Args:
        interval: seconds between two heartbeats.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._reports: dict[Key, tuple[Doing, float] | None] = {}
        self._not_before = 0.0

    def watch(self, keys: Iterable[Key]) -> None:
        """Watch exactly these, and forget all earlier reports."""
        self._reports = dict.fromkeys(keys)

    def restart(self, now: float) -> None:
        """The caller stood still: arriving messages may have waited unread."""
        self._reports = dict.fromkeys(self._reports)
        self._not_before = now + 2 * self.interval

    def heard(self, key: Key, doing: Doing | None, now: float) -> None:
        if key in self._reports and now >= self._not_before:
            self._reports[key] = None if doing is None else (doing, now)

    def stalled(self, now: float) -> dict[Key, float]:
        """Workers past their work's time limit, and since when."""
        return {
            key: at - doing.for_s
            for key, (doing, at) in self._known()
            if doing.state is ThreadState.WORKING and doing.too_long
        }

    def all_wait(self, now: float) -> dict[Key, Doing] | None:
        """The wait of each worker, if all wait for longer than the longest limit of any."""
        found = {key: doing for key, (doing, at) in self._known() if doing.waits and now - at <= 3 * self.interval}
        if len(found) < len(self._reports) or not any(doing.state is ThreadState.WAITING for doing in found.values()):
            return None
        limits = [doing.limit_s for doing in found.values() if doing.limit_s is not None]
        if len(limits) < len(found) or any(doing.for_s <= max(limits) for doing in found.values()):
            return None
        return found

    def _known(self) -> list[tuple[Key, tuple[Doing, float]]]:
        return [(key, report) for key, report in self._reports.items() if report is not None]


class Hosts(Generic[Key]):
    """Distinguishes a lost host from a frozen process: a lost host silences all its workers and its launcher.

    Heartbeats of one host time out a moment apart, so a silent worker's verdict waits for its host mates, at most two
    heartbeat intervals. A mate (or launcher) heard of clearly later than the silent worker proves that the host is
    there.

    Args:
        interval: seconds between two heartbeats.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._host: dict[Key, str] = {}
        self._launchers: dict[str, float] = {}

    def watch(self, hosts: Mapping[Key, str]) -> None:
        """Judge these: the host of each."""
        self._host = dict(hosts)

    def restart(self, now: float) -> None:
        """The caller stood still: launchers' heartbeats may wait unread, as workers' may."""
        self._launchers = dict.fromkeys(self._launchers, now)

    def launcher_beat(self, host: str, now: float) -> None:
        """A heartbeat of the host's launcher."""
        self._launchers[host] = now

    def judge(self, silent: Mapping[Key, float], seen: Mapping[Key, float], timeout: float,
              now: float) -> dict[Key, FailureKind]:
        """The kind of failure of each of `silent` (key -> when last heard of) that can be judged now.

        `seen` has the last heartbeat of all.
        """
        verdicts: dict[Key, FailureKind] = {}
        for host in {self._host.get(key, "") for key in silent}:
            keys = [key for key, at in self._host.items() if at == host]
            gone = {key: silent[key] for key in silent if self._host.get(key, "") == host}
            signs = [seen[key] for key in keys if key not in gone and key in seen]
            signs += [self._launchers[host]] if host in self._launchers else []
            last = max(gone.values())
            if any(sign > last + 2 * self.interval for sign in signs):
                verdicts.update(dict.fromkeys(gone, FailureKind.FROZEN))
            elif all(now - sign > timeout for sign in signs):
                alone = len(gone) + (host in self._launchers) < 2
                verdicts.update(dict.fromkeys(gone, FailureKind.FROZEN if alone else FailureKind.UNREACHABLE))
            elif now - min(gone.values()) > timeout + 2 * self.interval:
                verdicts.update(dict.fromkeys(gone, FailureKind.FROZEN))
        return verdicts


class HangUps(Generic[Key]):
    """Finds a lost host whose network still works: its kernel has closed the connections of its launcher and all its
    workers, and none is back within `patience` seconds. A live process reconnects within one second.

    The end of a single connection is not judged here: the launcher reports the end of its process. A host without a
    launcher is not judged, nor is one with a worker that has never connected, as just after a coordinator restart. If
    the caller stood still, a reconnecting host may wait unread, so all timers restart.
    """

    def __init__(self, patience: float = 2.0) -> None:
        self.patience = patience
        self._host: dict[Key, str] = {}
        self._gone: dict[Key, float | None] = {}  # of all that ever connected; None: connected
        self._launchers: dict[str, float | None] = {}
        self._ticked: float | None = None

    def watch(self, hosts: Mapping[Key, str]) -> None:
        """Judge these: the host of each."""
        self._host = dict(hosts)
        self._gone = {key: at for key, at in self._gone.items() if at is None or key in self._host}

    def came(self, key: Key) -> None:
        self._gone[key] = None

    def gone(self, key: Key, now: float) -> None:
        self._gone[key] = now

    def launcher_came(self, host: str) -> None:
        self._launchers[host] = None

    def launcher_gone(self, host: str, now: float) -> None:
        self._launchers[host] = now

    def tick(self, now: float) -> dict[Key, float]:
        """The workers of lost hosts, and when the last connection of each host closed."""
        if self._ticked is not None and now - self._ticked > self.patience / 2:
            self._gone = {key: None if at is None else now for key, at in self._gone.items()}
            self._launchers = {host: None if at is None else now for host, at in self._launchers.items()}
        self._ticked = now
        found: dict[Key, float] = {}
        for host in {self._host[key] for key, at in self._gone.items() if at is not None and key in self._host}:
            keys = [key for key, at in self._host.items() if at == host]
            moments = [self._launchers.get(host), *(self._gone.get(key) for key in keys)]
            ends = [at for at in moments if at is not None]
            if len(ends) == len(moments) and now - max(ends) > self.patience:
                found.update(dict.fromkeys(keys, max(ends)))
        return found


class RateLimit(Generic[Key]):
    """Allows each key once per `period` seconds, and at most `keys` keys, so that a stranger cannot fill the log. Times
    only grow."""

    def __init__(self, period: float, keys: int = 1024) -> None:
        self._period = period
        self._keys = keys
        self._last: dict[Key, float] = {}

    def allows(self, key: Key, now: float) -> bool:
        while self._last and now - next(iter(self._last.values())) >= self._period:  # the first one is the oldest
            del self._last[next(iter(self._last))]
        if key in self._last or len(self._last) >= self._keys:
            return False
        self._last[key] = now
        return True
