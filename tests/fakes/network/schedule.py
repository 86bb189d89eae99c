"""When messages arrive, where there is no clock.

A message is late by a number of other events, and where nobody else has anything to do it comes at once. A thread that
waits delivers the messages that are due: there is no thread for it, and nobody sleeps.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import itertools
import math
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from megatron_recycle.errors import GenerationOver

_PATIENCE = 0.0002
"""Seconds that a late message gives others to do what they have to do, where threads are not known."""
_DELAYS = (0, 0, 0, 0, 1, 2, 5, 60)
"""Events by which a message is late, each as often as the others."""
_LOOKING = threading.Lock()


def frames() -> dict[int, FrameType]:
    """Where each thread is, by its ident. Garbage is not collected meanwhile: CPython hangs if a finalizer lets another
    thread run then (gh-106883)."""
    with _LOOKING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


class Stuck(BaseException):
    """Nobody can go on, or what two ends do does not fit together; says where every thread stands."""


@dataclass(order=True)
class Flight:
    """Something that happens when ``due`` events have been; ``arrive()`` is called under the lock."""

    due: int
    number: int
    arrive: Callable[[], None] = field(compare=False)
    of: tuple[Callable[[], Any], ...] = field(compare=False)
    """Its content, or None if that is gone."""


@dataclass
class _Waiting:
    event: threading.Event
    who: str
    what: object


class Flights:
    """Everything that is under way, and how many events have been. Used under the network's lock.

    Args:
        seed: decides how late messages are.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._heap: list[Flight] = []
        self._now = 0
        self._numbers = itertools.count()
        self._last: dict[Hashable, int] = defaultdict(int)

    def __iter__(self) -> Iterator[Flight]:
        """In the order in which they arrive."""
        return iter(sorted(self._heap))

    def __bool__(self) -> bool:
        return bool(self._heap)

    def draw(self, *of: object) -> int:
        """A number that depends on the seed and on ``of`` only."""
        return int.from_bytes(hashlib.blake2b(repr((self._seed, of)).encode(), digest_size=4).digest(), "big")

    def fly(self, channel: Hashable, arrive: Callable[[], None], *of: Callable[[], Any]) -> None:
        """Call ``arrive()`` some events later, after what was given before for ``channel``."""
        number = next(self._numbers)
        delay = _DELAYS[self.draw(channel, self._last[channel]) % len(_DELAYS)]
        due = self._last[channel] = max(self._now + delay, self._last[channel] + 1)
        heapq.heappush(self._heap, Flight(due, number, arrive, of))

    def take(self, flight: Flight) -> None:
        """``flight`` does not arrive by itself any more."""
        self._heap.remove(flight)
        heapq.heapify(self._heap)

    def tick(self) -> None:
        """One more event: what is due arrives."""
        self._now += 1
        while self._heap and self._heap[0].due <= self._now:
            heapq.heappop(self._heap).arrive()

    def jump(self) -> None:
        """As many events as it takes until the next one arrives."""
        self._now = max(self._now, self._heap[0].due - 1)
        self.tick()


class Schedule:
    """All that is under way, and all threads that wait.

    Args:
        seed: decides how late messages are.
        limit: seconds without any event after which everybody who waits is told `Stuck`.
        report: what else there is to say then; called under the lock.
    """

    def __init__(self, seed: int, limit: float, report: Callable[[], str]) -> None:
        self.lock = threading.Lock()
        """The lock of everything in the network."""
        self.flights = Flights(seed)
        self._limit, self._report = limit, report
        self._own = threading.local()
        self._waiting: dict[threading.Thread, _Waiting] = {}
        self._running: set[threading.Thread] = set()
        """Threads of `run`. If there are no others, it is known when nobody can go on."""
        self._strangers = False
        self._stuck: str | None = None
        self._last_event = time.monotonic()

    def run(self, *functions: Callable[[], Any]) -> list[Any]:
        """The results of ``functions``, each in a thread of its own, which starts no others that talk.

        `GenerationOver` and anything beyond Exception but `Stuck` are returned; what else one raises is raised. They
        are `Stuck` as soon as all wait and nothing is under way.
        """
        outcomes: list[Any] = [None] * len(functions)

        def work(index: int) -> None:
            try:
                outcomes[index] = functions[index]()
            except BaseException as error:  # noqa: BLE001  (raised again below)
                outcomes[index] = error
            with self.lock:
                self._running.discard(threading.current_thread())
                self.wake_one()

        threads = [threading.Thread(target=work, args=(index,), name=f"function {index}", daemon=True)
                   for index in range(len(functions))]
        with self.lock:
            self._running.update(threads)
            self._strangers = False
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for outcome in outcomes:
            if isinstance(outcome, (Exception, Stuck)) and not isinstance(outcome, GenerationOver):
                raise outcome
        return outcomes

    # ---- under the lock

    def tick(self) -> None:
        """One more event: what is due arrives."""
        self._notice_stranger()
        self._last_event = time.monotonic()
        self.flights.tick()

    def block(self, who: str, what: object, seconds: float = math.inf) -> None:
        """Wait for something to happen; look again afterwards. Raises Stuck."""
        if self._stuck is not None:
            raise Stuck(self._stuck)
        event = self._event()
        event.clear()
        self._notice_stranger()
        thread = threading.current_thread()
        self._waiting[thread] = _Waiting(event, who, what)
        try:
            if not self._strangers:
                idle = sum(not each.event.is_set() for each in self._waiting.values())
                if idle >= len(self._running) and math.isinf(seconds):
                    self._jump()
                    return
                patience = self._limit
            else:
                patience = _PATIENCE if self.flights else self._limit
            self.lock.release()
            try:
                woken = event.wait(min(seconds, patience))
            finally:
                self.lock.acquire()
            late = time.monotonic() - self._last_event > self._limit
            if not woken and (late or (self._strangers and self.flights)):
                self._jump()
        finally:
            del self._waiting[thread]

    def wake(self, *whats: object) -> None:
        """Wake the threads that wait for one of ``whats``, or all, to look again."""
        for each in self._waiting.values():
            if not whats or any(each.what is what for what in whats):
                each.event.set()

    def wake_one(self) -> None:
        """Somebody who waits has to see to what is under way."""
        for each in itertools.islice(self._waiting.values(), 1):
            each.event.set()

    def give_up(self, why: str) -> None:
        """Everybody who waits is told `Stuck`."""
        self._stuck = self._stuck or why
        self.wake()

    def waits(self, threads: Collection[threading.Thread]) -> bool:
        """Whether all ``threads`` wait here, and none of them has been told to look again."""
        return all(thread in self._waiting and not self._waiting[thread].event.is_set() for thread in threads)

    def standing(self) -> str:
        """Where every thread that waits here stands."""
        found, lines = frames(), []
        for thread, each in self._waiting.items():
            stack = traceback.extract_stack(found[thread.ident]) if thread.ident in found else []
            path = [f"{frame.name}:{frame.lineno}" for frame in reversed(stack)
                    if not frame.filename.endswith(("/threading.py", "/memory/schedule.py", "/memory/fabric.py"))]
            lines.append(f"{each.who} waits in thread {thread.name} for {each.what}: {' < '.join(path[:12])}")
        return "\n".join(lines)

    def _notice_stranger(self) -> None:
        self._strangers |= threading.current_thread() not in self._running

    def _jump(self) -> None:
        """Nobody else has anything to do: the next message comes, or nobody ever goes on."""
        if self.flights:
            self._notice_stranger()
            self._last_event = time.monotonic()
            self.flights.jump()
        else:
            self.give_up(f"nobody can go on:\n{self.standing()}\n{self._report()}")

    def _event(self) -> threading.Event:
        if not hasattr(self._own, "event"):
            self._own.event = threading.Event()
        event: threading.Event = self._own.event
        return event
