"""The training thread's present activity and its limit, reported with every heartbeat.

Heartbeats come from a thread of their own, so they go on when the training thread is stuck. The coordinator detects
that by these reports: a thread that *works* (inside an action, data loading included) for far longer than such work
ever took is stuck; a thread that *waits* for others, *stands by* at the end, or is *outside* (in the script's own
code) is not. The limits are learnt from this worker's own durations.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_recycle.membership.detectors import ThreadState
from megatron_recycle.plan import Action
from megatron_recycle.runtime.spans import Spans

WORKING, WAITING = ThreadState.WORKING, ThreadState.WAITING
STANDING_BY, OUTSIDE = ThreadState.STANDING_BY, ThreadState.OUTSIDE
REDUCE = "reduce"
"""The wait for the stage's gradient. Most of it is transfer, so its durations are learnt as well."""

RECOVERY = "a recovery"
"""Such a wait may be for a stage's whole state, many times as large as a gradient."""

HANDLES = "new handles"
"""Times of torch's store, and of the other workers at it, are not learnt either."""

COPY = "copy"
"""Work on a stage's state together with other workers. One of them may be stuck, so durations are not learnt."""

CONNECT = "connect"
"""Building handles together with other workers; it has a limit of its own."""

ACTIONS = "actions"
"""The part of an iteration that is its actions, see `part_of`."""

_PARTS = {**dict.fromkeys(("forward", "full forward", "backward", "weight", "data"), ACTIONS),
          "full backward": "full backwards",
          **dict.fromkeys(("begin", "reduce", "reduced", "step"), "own")}
_WAITS = {REDUCE: "reduction", "parameters": "reduction", "a verdict": "verdict", "the loss": "verdict",
          "gradient norms": "verdict", "the last messages": "own"}

_FACTOR, _FACTOR_IN_RECOVERY = 3.0, 10.0  # how much longer than the longest seen
_WARM_UP = 2  # of each kind: the first ones compile, build communicators, fill caches
_WINDOW = 64  # latest durations of each kind that count
_PATIENT_FLOORS = 6.0  # that all workers may wait in a recovery, and before any reduction was seen


class Activity:
    """The state of one training thread. That thread alone changes it; any thread may ask `told`.

    Args:
        floor: seconds added to three times the longest duration seen.
        clock: seconds that only grow.
    """

    def __init__(self, floor: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.spans = Spans()
        """The thread's transitions, one after the other."""
        self._floor = floor
        self._clock = clock
        self._now = (OUTSIDE, "start", 0, clock())
        self._seen: dict[str, int] = {}
        self._taken: dict[str, deque[float]] = {}
        self._longest: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._counted = self._now[3]  # the time up to which `_spent` counts

    def at(self, iteration: int, action: Action | None) -> None:
        """The following work is of this iteration, and of this action."""
        self.spans.at(self._clock(), iteration, action)

    def work(self, what: str) -> None:
        """From now on the thread works on ``what`` (forward, backward, weight, data, step, ...)."""
        self._enter(WORKING, what)

    @contextmanager
    def during(self, state: ThreadState, what: str) -> Iterator[None]:
        """A block in ``state``, after which the previous state returns. The duration of a block that an exception has
        cut short is not learnt."""
        before, doing, _, _ = self._now
        self._enter(state, what)
        try:
            yield
        except BaseException:
            self._enter(before, doing, whole=False)
            raise
        self._enter(before, doing)

    def told(self) -> dict[str, Any]:
        """For the coordinator: state, what, a running number, for how many seconds, and the limit to these (None
        where there is none yet, or none at all)."""
        state, what, number, since = self._now
        return {"state": state, "what": what, "number": number, "for_s": round(self._clock() - since, 3),
                "limit_s": self._limit(state, what)}

    def spent(self) -> dict[str, float]:
        """The thread's time since the last call: seconds by part (`part_of`), which add up to all of it."""
        state, what, _, _ = self._now
        self._count(state, what, self._clock())
        found, self._spent = self._spent, {}
        return found

    def _count(self, state: str, what: str, now: float) -> None:
        part = part_of(state, what)
        self._spent[part] = self._spent.get(part, 0.0) + now - self._counted
        self._counted = now

    def _limit(self, state: str, what: str) -> float | None:
        if state == WORKING and what in self._longest:
            return round(_FACTOR * self._longest[what] + self._floor, 3)
        if state in (WAITING, STANDING_BY):
            # In case all wait. A worker that has not seen an exchange yet cannot know how long it takes.
            patient = what in (RECOVERY, HANDLES) or _key(WAITING, REDUCE) not in self._longest
            factor = _FACTOR_IN_RECOVERY if what in (RECOVERY, HANDLES) else _FACTOR
            floor = self._floor * (_PATIENT_FLOORS if patient else 1.0)
            return round(factor * max(self._longest.values(), default=0.0) + floor, 3)
        return None

    def _enter(self, state: ThreadState, what: str, whole: bool = True) -> None:
        before, doing, number, since = self._now
        now = self._clock()
        self._now = (state, what, number + 1, now)
        self.spans.marks.append((now, state, what))
        self._count(before, doing, now)
        if whole and doing not in (COPY, CONNECT) and (before == WORKING or doing == REDUCE):
            self._learn(_key(before, doing), now - since)

    def _learn(self, key: str, seconds: float) -> None:
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen > _WARM_UP:
            taken, longest = self._taken.setdefault(key, deque(maxlen=_WINDOW)), self._longest.get(key, 0.0)
            lost = taken[0] if len(taken) == _WINDOW else 0.0
            taken.append(seconds)
            # The longest of them, which most of the time has not changed.
            self._longest[key] = seconds if seconds >= longest else max(taken) if lost >= longest else longest


def part_of(state: str, what: str) -> str:
    """The part of an iteration that a thread in ``state`` ``what`` is in.

    ``actions``: forwards, backwards, weight gradients, with reading data and all that goes on between two of them;
    ``full backwards`` apart. Waits: for ``messages`` of other stages, for the ``reduction`` of the gradient, for the
    ``verdict`` on the step with its numbers. ``own``: the step, and all that is done at the end of an iteration and
    before the next one. ``script``: its own code, and the framework's. ``other``: recoveries, checkpoints, evaluations.
    """
    if state == WORKING:
        return _PARTS.get(what, "other")
    if state == WAITING:
        return "messages" if what[:1] in "FB" and what[1:2].isdigit() else _WAITS.get(what, "other")
    return "script" if state == OUTSIDE else "other"


def _key(state: str, what: str) -> str:
    return what if state == WORKING else f"{state} {what}"
