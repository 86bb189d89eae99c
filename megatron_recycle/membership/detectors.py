"""Deciding from the clock alone who is suspect. Fed with times, so that tests need no waiting."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Heartbeats(Generic[Key]):
    """Finds who has been silent for longer than `timeout` seconds.

    The caller ticks at a steady pace. If the caller itself stood still (paused, or starved of processor
    time), signs of life may wait unread, so all timers start anew before anybody is suspected.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._seen: dict[Key, float] = {}
        self._ticked: float | None = None
        self.restarts = 0

    def watch(self, keys: Iterable[Key], now: float) -> None:
        """Watch exactly these; a newly watched one is as if just heard of."""
        self._seen = {key: self._seen.get(key, now) for key in keys}

    def beat(self, key: Key, now: float) -> None:
        if key in self._seen:
            self._seen[key] = now

    def tick(self, now: float) -> dict[Key, float]:
        """The silent ones, and when each was last heard of."""
        stood_still = self._ticked is not None and now - self._ticked > self.timeout / 2
        self._ticked = now
        if stood_still:
            self.restarts += 1
            self._seen = dict.fromkeys(self._seen, now)
        return {key: seen for key, seen in self._seen.items() if now - seen > self.timeout}


class RateLimit(Generic[Key]):
    """True at most once per `period` seconds for each key, so that a stranger cannot fill the log."""

    def __init__(self, period: float, keys: int = 1024) -> None:
        self._period = period
        self._keys = keys
        self._last: dict[Key, float] = {}

    def allows(self, key: Key, now: float) -> bool:
        last = self._last.get(key)
        if last is not None and now - last < self._period:
            return False
        self._last = {other: at for other, at in self._last.items() if now - at < self._period}
        if len(self._last) >= self._keys:
            return False
        self._last[key] = now
        return True
