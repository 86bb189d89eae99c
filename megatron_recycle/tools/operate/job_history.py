"""Summary of a job's events: absent workers and since when, its training speed, the cost of failures so far."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

Event = Mapping[str, Any]
_LATEST = 12
"""Iterations that a pace is computed from."""
_WHOLE = 200
"""Latest iterations that the pace without failures is computed from."""
_BURST = 0.05
"""Fraction of the usual time between two commits below which the coordinator has reported a commit late."""
_FIRST = 2
"""First iterations of a generation that no pace counts: they begin with cold caches."""


@dataclass(frozen=True)
class Absence:
    """A position without a worker. `since` is Unix seconds; `iteration` is the one that was interrupted; `why` is the
    error that the process has reported, or empty; `causes` are its host's evidence, and `repair` takes a broken host
    out of service."""

    worker: str
    kind: str
    since: float
    iteration: int | None = None
    host: str = ""
    rank: int | None = None
    pid: int | None = None
    why: str = ""
    causes: tuple[str, ...] = ()
    repair: str = ""


class JobHistory:
    """History of one job; add its events in their order. All times are Unix seconds, all durations seconds.

    Attributes:
        started, finished: the events of these names, once they are there.
        counts: of all events by their names.
        members: the positions that have a worker.
        hosts, ranks, pids: of each process, as last reported.
        out: positions without a worker, by name.
        failures: every worker that was lost, in order.
        degraded_since: when the first of the positions that are out now was lost.
        recovering_since: time of the failure that is being recovered from.
        last_commit: when the last iteration was committed.
        latest: durations of the latest iterations of this generation; `whole`: of those with all workers.
        stood_still: seconds between failures and the first action after them, all together.
        slower: seconds that iterations took longer while a worker was out, all together.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.started: Event = {}
        self.finished: Event = {}
        self.last: Event = {}
        self.counts: Counter[str] = Counter()
        self.lives = 1
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.hosts: dict[str, str] = {}
        self.ranks: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self.out: dict[str, Absence] = {}
        self.failures: list[Absence] = []
        self.slow: dict[str, float] = {}
        self.degraded_since: float | None = None
        self.recovering_since: float | None = None
        self.iteration = -1
        self.committed = 0
        self.last_commit: float | None = None
        self.loss: Any = None
        self.latest: deque[float] = deque(maxlen=_LATEST)
        self.whole: deque[float] = deque(maxlen=_WHOLE)
        self.stood_still = 0.0
        self.slower = 0.0
        self.recoveries: Counter[str] = Counter()
        self.joined = 0
        self.lost_iterations = 0
        self.checkpoint: Event = {}
        self.last_copy: Event = {}
        self.spent: Event = {}
        self.digest = ""
        self.period: float | None = None
        self._offered: Event = {}
        self._generation_of_plan: int | None = None
        self._kinds: list[str] = []
        self._fresh = 0
        self._whole_at, self._whole_was = -1, self.whole_seconds
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Take in the next event. An unknown event changes nothing."""
        self.last = event
        self.counts[event["event"]] += 1
        take = getattr(self, f"_take_{event['event']}", None)
        if take is not None:
            take(event)

    @property
    def seconds(self) -> float | None:
        """Seconds of an iteration now, the median of the latest ones; None: there are none in this generation."""
        return median(self.latest) if self.latest else None

    @property
    def whole_seconds(self) -> float | None:
        """Seconds of an iteration while no worker was out; None: that was never so, or for too short."""
        return median(self.whole) if self.whole else None

    @property
    def size(self) -> int:
        """Workers and parts of workers of the whole grid."""
        return len(self.started.get("ranks", ()))

    @property
    def grid(self) -> tuple[int, int]:
        """Pipelines and stages; zeros before training has begun."""
        grid = self.started.get("grid") or {}
        return len(grid.get("microbatches", ())), int(grid.get("stages", 0))

    # One method for each event that counts

    def _take_started(self, event: Event) -> None:
        self.started, self.finished = event, {}
        self.members = tuple(event.get("members", event.get("ranks", ())))
        self.hosts, self.ranks = dict(event.get("hosts", {})), dict(event.get("ranks", {}))
        self.pids = dict(event.get("pids", {}))
        self.out, self.degraded_since, self.recovering_since = {}, None, None
        self.generation = int(event.get("generation", 1))
        self._new_pace(event)

    def _take_started_again(self, event: Event) -> None:
        """Another life of the job: the last life's facts about workers are void."""
        self.lives = int(event.get("restart", self.lives)) + 1
        self.started, self.finished, self.out, self.members = {}, {}, {}, ()
        self.degraded_since = self.recovering_since = self.last_commit = None

    def _take_suspected(self, event: Event) -> None:
        if event.get("removed") is False:
            return
        name, since = event["worker"], event["t"] - float(event.get("ms") or 0.0) / 1000
        found = Absence(name, str(event.get("kind", "")), since, event.get("iteration"), self.hosts.get(name, ""),
                        event.get("rank"), event.get("pid"), str(event.get("error", "")))
        self.out[name] = found
        self.failures.append(found)
        self._kinds.append(found.kind)
        self._interrupted(since)

    def _take_explained(self, event: Event) -> None:
        """The absence of this process, with its causes."""
        for place, one in enumerate(self.failures):
            if (one.rank, one.pid) == (event["rank"], event["pid"]):
                found = replace(one, causes=tuple(event["causes"]), repair=str(event.get("repair") or ""))
                self.failures[place] = found
                if self.out.get(one.worker) == one:
                    self.out[one.worker] = found

    def _take_left(self, event: Event) -> None:
        if "rank" in event and event.get("kind") != "move":  # without: its script has come to its end
            name = event["worker"]
            self.out[name] = Absence(name, str(event.get("kind", "")), event["t"], event.get("iteration"),
                                     self.hosts.get(name, ""), event.get("rank"), event.get("pid"))

    def _take_decided(self, event: Event) -> None:
        gone = dict(event.get("out", {}))
        self.out = {name: self.out.get(name, Absence(name, str(kind), event["t"], host=self.hosts.get(name, "")))
                    for name, kind in gone.items()}
        self.members = tuple(event.get("members", self.members))
        self.slow = {name: factor for name, factor in self.slow.items() if name not in gone}
        self.generation = int(event.get("generation", self.generation))
        self.degraded_since = min((one.since for one in self.out.values()), default=None)
        self._interrupted(event["t"] - float(event.get("ms") or 0.0) / 1000)
        self.last_copy = {} if not self.out else self.last_copy
        self._new_pace(event)

    def _take_resumed(self, event: Event) -> None:
        self.recovering_since = None
        self.stood_still += float(event.get("ms") or 0.0) / 1000
        self.recoveries.update(set(self._kinds) or {"none"})
        self._kinds = []
        self._new_pace(event)

    def _take_joined(self, event: Event) -> None:
        self.joined += "moved_from" not in event
        name = event["worker"]
        self.out.pop(name, None)
        self.pids[name] = event.get("pid", 0)

    def _take_committed(self, event: Event) -> None:
        moment, before = float(event["t"]), self.last_commit
        if event["iteration"] > self.iteration:
            self.committed += 1
        self.iteration, self.last_commit = event["iteration"], moment
        self.loss = event.get("loss", self.loss)
        self.recovering_since = None
        self._fresh += 1
        if before is None or self._fresh <= _FIRST or moment <= before:
            return
        took = moment - before
        burst = took < _BURST * (self.seconds or self.whole_seconds or 0.0)  # a coordinator that stood still catches up
        if not burst:
            self.latest.append(took)
        if not self.out:
            self.whole.extend(() if burst else (took,))
        elif (whole := self._whole_before()) is not None:
            self.slower += took - whole

    def _take_planned(self, event: Event) -> None:
        self._offered = event
        if event.get("generation") != self._generation_of_plan or not self.digest:
            self._in_force(event)

    def _take_adopted(self, event: Event) -> None:
        if event.get("digest") == self._offered.get("digest"):
            self._in_force(self._offered)
        self._new_pace(event)

    def _in_force(self, event: Event) -> None:
        self.digest, self._generation_of_plan = str(event.get("digest", "")), event.get("generation")
        period = event.get("period")
        self.period = period / 1e6 if self.counts["profiled"] and isinstance(period, (int, float)) else None

    def _take_spent(self, event: Event) -> None:
        self.spent = {**event, "digest": self.digest}

    def _take_checkpoint(self, event: Event) -> None:
        self.checkpoint = event

    def _take_saved(self, event: Event) -> None:
        if "missing" not in event:
            self.checkpoint = event

    def _take_last_copy(self, event: Event) -> None:
        self.last_copy = event

    def _take_restored(self, event: Event) -> None:
        self.lost_iterations += max(0, int(event.get("lost") or 0))
        self.iteration = int(event.get("iteration", self.iteration))

    def _take_slow(self, event: Event) -> None:
        self.slow[event["worker"]] = float(event.get("factor") or 0.0)

    def _take_finished(self, event: Event) -> None:
        self.finished = event
        self.recovering_since = None

    def _whole_before(self) -> float | None:
        """`whole_seconds`, which does not change while a worker is out."""
        if self._whole_at != len(self.failures):
            self._whole_at, self._whole_was = len(self.failures), self.whole_seconds
        return self._whole_was

    def _interrupted(self, since: float) -> None:
        self.recovering_since = since if self.recovering_since is None else min(self.recovering_since, since)

    def _new_pace(self, event: Event) -> None:
        self.latest.clear()
        self._fresh = 0
